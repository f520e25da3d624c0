"""The served gradient is the derivative of the served value."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from gradient_support import WrittenOut

from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate, ScoreOptions
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.face.alignment import estimate_similarity

OPTIONS = ScoreOptions(include_crop_gradients=True, gradient_encoding="float32")


@pytest.fixture(scope="module", params=["toy", "real"])
def scorer(request: Any) -> EmbeddedScorer:
    return EmbeddedScorer(request.getfixturevalue(f"{request.param}_pack"))


def painted(seed: int, count: int, side: int = 96) -> np.ndarray:
    painter = pytest.importorskip("likeness_toyworld.painter", reason="the toy world is not installed")
    motion = painter.sample_motion(np.random.default_rng(seed))
    return painter.paint_clip(painter.sample_identity(seed), motion, count, side)[0]


def crop_of(frame: np.ndarray, landmarks: np.ndarray, size: int = 112) -> np.ndarray:
    return cv2.warpAffine(frame, estimate_similarity(landmarks, size), (size, size), borderValue=0.0)


def other_person(scorer: EmbeddedScorer) -> IdentityTemplate:
    return scorer.embed_identity(list(painted(8, 3)))


def test_gradients_equal_those_of_a_network_written_out(scorer: EmbeddedScorer) -> None:
    """A rectifier whose input is rounding alone opens here and not there, now and then: a step in the derivative."""
    frames, identity = painted(3, 9), other_person(scorer)
    options = OPTIONS.model_copy(update={"identity_weight": 0.5, "coverage_weight": 2.0})
    reward = scorer.score(frames, identity, options)
    assert reward.embedded_frame_count == len(reward.crop_gradients) == 9
    written_out = WrittenOut(scorer.pack.recognizer.path)
    distances = []
    for gradient, score in zip(reward.crop_gradients, reward.frames, strict=True):
        crop = crop_of(frames[score.frame_index], score.observation.face.landmarks)
        pixels = (torch.from_numpy(crop).permute(2, 0, 1)[None] / 255).requires_grad_()
        similarity = written_out.similarity(pixels, torch.from_numpy(identity.embedding))
        assert similarity.item() == pytest.approx(score.similarity, abs=1e-5)
        (expected,) = torch.autograd.grad(0.5 * similarity.sum() / 9, pixels)
        distances.append(np.linalg.norm(gradient.values - expected[0].numpy()) / expected.norm().item())
    assert np.median(distances) < 1e-5
    assert max(distances) < 1e-2


def test_gradients_predict_finite_differences_of_the_served_similarity(scorer: EmbeddedScorer) -> None:
    """Crops are uint8, so a step is one grey level up and one down, along the gradient's signs in some pixels."""
    frame, identity = painted(3, 1)[0], other_person(scorer)
    reward = scorer.score(frame[None], identity, OPTIONS)
    (gradient,) = reward.crop_gradients
    crop = crop_of(frame, reward.frames[0].observation.face.landmarks).astype(np.int64)
    rng = np.random.default_rng(0)
    predicted, found = [], []
    for share in np.linspace(-0.1, 0.1, 24):
        signs = np.sign(gradient.values.transpose(1, 2, 0) * share).astype(np.int64)
        step = np.where(rng.random(crop.shape) < abs(share), signs, rng.integers(-1, 2, crop.shape))
        low, high = np.clip(crop - step, 0, 255), np.clip(crop + step, 0, 255)
        embeddings = scorer.analyzer.recognizer.embed([low.astype(np.uint8), high.astype(np.uint8)])
        found.append(float((embeddings[1] - embeddings[0]) @ identity.embedding))
        predicted.append(float(np.sum(gradient.values.transpose(1, 2, 0) * (high - low) / 255)))
    assert np.corrcoef(predicted, found)[0, 1] > 0.98
    assert np.polyfit(predicted, found, 1)[0] == pytest.approx(1.0, abs=0.1)


def test_the_least_frame_alone_has_a_gradient(scorer: EmbeddedScorer) -> None:
    frames, identity = painted(3, 3), other_person(scorer)
    mean = scorer.score(frames, identity, OPTIONS)
    least = scorer.score(frames, identity, OPTIONS.model_copy(update={"aggregation": "min"}))
    worst = int(np.argmin(least.similarities))
    for index, (of_mean, of_least) in enumerate(zip(mean.crop_gradients, least.crop_gradients, strict=True)):
        expected = 3 * of_mean.values if index == worst else np.zeros_like(of_mean.values)
        np.testing.assert_allclose(of_least.values, expected, rtol=1e-5, atol=1e-9)


def test_frames_without_a_face_have_none_and_thin_out_the_others(scorer: EmbeddedScorer) -> None:
    frames, identity = painted(3, 2), other_person(scorer)
    alone = scorer.score(frames, identity, OPTIONS)
    diluted = scorer.score(np.concatenate([np.zeros_like(frames), frames]), identity, OPTIONS)
    assert [gradient.frame_index for gradient in diluted.crop_gradients] == [2, 3]
    for before, after in zip(alone.crop_gradients, diluted.crop_gradients, strict=True):
        np.testing.assert_allclose(after.values, before.values / 2, rtol=1e-5, atol=1e-9)
    assert scorer.score(np.zeros_like(frames), identity, OPTIONS).crop_gradients == ()


@pytest.mark.parametrize("over", ["unary", "stream"])
@pytest.mark.parametrize(("encoding", "cost"), [("float32", 1e-5), ("float16", 6e-4)])
def test_gradients_cross_the_wire(
    serve: Callable[..., Any], scorer: EmbeddedScorer, over: str, encoding: str, cost: float
) -> None:
    """float16 rounds to 11 bits, 2^-11 at most. The stream makes other batches of the frames: 1e-5 of rounding."""
    frames, identity = painted(3, 10), other_person(scorer)
    options = ScoreOptions(include_crop_gradients=True, gradient_encoding=encoding)
    here = scorer.score(frames, identity, options)
    with RewardClient(serve(scorer).endpoint) as client:
        assert client.server_info().has_crop_gradients
        if over == "unary":
            there = client.score(frames, identity, options)
        else:
            there = client._score_over_stream(frames, identity, options, None)
    assert replace(there, frames=()) == replace(here, frames=(), value=there.value, components=there.components,
                                                motion=there.motion)  # fmt: skip
    for sent, received in zip(here.crop_gradients, there.crop_gradients, strict=True):
        assert sent.frame_index == received.frame_index
        assert np.linalg.norm(sent.values - received.values) <= cost * np.linalg.norm(sent.values)
        np.testing.assert_allclose(received.frame_from_crop, sent.frame_from_crop, rtol=1e-6)


def test_the_matrix_leads_from_the_crop_to_the_frame(toy_pack: Path) -> None:
    frames = painted(3, 1)
    scorer = EmbeddedScorer(toy_pack)
    reward = scorer.score(frames, other_person(scorer), OPTIONS)
    forward = estimate_similarity(reward.frames[0].observation.face.landmarks)
    matrix = reward.crop_gradients[0].frame_from_crop
    point = np.array([10.0, 80.0, 1.0])
    np.testing.assert_allclose(forward @ [*(matrix @ point), 1.0], point[:2], atol=1e-9)
