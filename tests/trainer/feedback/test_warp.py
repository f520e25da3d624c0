"""The warp in torch is OpenCV's, and its adjoint takes the reward's gradient to the frame's pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch

from likeness_reward.domain import ScoreOptions, VideoReward
from likeness_reward.errors import InvalidGradients
from likeness_reward.face.alignment import align_face
from likeness_trainer.learn.face_warp import aligned_crop
from likeness_trainer.learn.reward_feedback import reward_with_gradient


@pytest.fixture(scope="module")
def scorer():
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    from likeness_reward.embedded import EmbeddedScorer

    return EmbeddedScorer(Path(toyworld.face_pack_path()))


def scored(scorer, frames: np.ndarray) -> VideoReward:
    from likeness_toyworld import painter

    motion = painter.sample_motion(np.random.default_rng(8))
    other = scorer.embed_identity(list(painter.paint_clip(painter.sample_identity(8), motion, 3, 64)[0]))
    return scorer.score(frames, other, ScoreOptions(include_crop_gradients=True))


def test_the_crop_is_that_of_the_service(scorer, person_frames) -> None:
    """OpenCV rounds the result to whole grey levels, so half a level is what may lie between, and a little rounding."""
    reward = scored(scorer, person_frames[:1])
    expected = align_face(person_frames[0], reward.frames[0].observation.face.landmarks)
    frame = torch.from_numpy(person_frames[0]).permute(2, 0, 1).float()
    crop = aligned_crop(frame, reward.crop_gradients[0].frame_from_crop, 112).permute(1, 2, 0).numpy()
    assert np.abs(crop - expected).max() <= 1.0
    assert np.abs(crop - expected).mean() <= 0.3


def test_the_adjoint_is_the_transpose() -> None:
    """<A f, g> = <f, A* g> for a matrix that leaves the frame on all sides."""
    generator = torch.Generator().manual_seed(0)
    frame = torch.rand(3, 40, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 112, 112, generator=generator, dtype=torch.float64)
    matrix = np.array([[0.4, 0.1, -5.0], [-0.1, 0.4, -3.0]])
    forward = (aligned_crop(frame, matrix, 112) * weights).sum()
    (adjoint,) = torch.autograd.grad(forward, frame)
    assert (adjoint * frame).sum().item() == pytest.approx(forward.item(), rel=1e-12)


def test_the_gradient_predicts_finite_differences_by_frame_pixels(scorer, person_frames) -> None:
    """Detection and alignment are constants: the landmarks of the first pass are used for every other one."""
    frame = person_frames[0].astype(np.int64)
    reward = scored(scorer, person_frames[:1])
    pixels = (torch.from_numpy(person_frames[:1]).permute(3, 0, 1, 2) / 127.5 - 1).requires_grad_()
    value = reward_with_gradient(pixels, reward)
    assert value.item() == pytest.approx(reward.value, abs=1e-6)
    (gradient,) = torch.autograd.grad(value, pixels)
    by_level = gradient[:, 0].permute(1, 2, 0).numpy() / 127.5
    landmarks = reward.frames[0].observation.face.landmarks

    def similarity(picture: np.ndarray) -> np.ndarray:
        return scorer.analyzer.recognizer.embed([align_face(picture.astype(np.uint8), landmarks)])[0]

    rng = np.random.default_rng(0)
    found, predicted = [], []
    from likeness_toyworld import painter

    motion = painter.sample_motion(np.random.default_rng(8))
    other = scorer.embed_identity(list(painter.paint_clip(painter.sample_identity(8), motion, 3, 64)[0])).embedding
    for share in np.linspace(-0.3, 0.3, 24):
        signs = np.sign(by_level * share).astype(np.int64)
        step = np.where(rng.random(frame.shape) < abs(share), signs, rng.integers(-1, 2, frame.shape))
        low, high = np.clip(frame - step, 0, 255), np.clip(frame + step, 0, 255)
        found.append(float((similarity(high) - similarity(low)) @ other))
        predicted.append(float((by_level * (high - low)).sum()))
    assert np.corrcoef(predicted, found)[0, 1] > 0.98
    assert np.polyfit(predicted, found, 1)[0] == pytest.approx(1.0, abs=0.1)


def test_a_gradient_of_no_frame_or_not_finite_is_refused(scorer, person_frames) -> None:
    from dataclasses import replace

    reward = scored(scorer, person_frames[:1])
    pixels = torch.zeros(3, 1, 64, 64)
    (good,) = reward.crop_gradients
    for broken in (replace(good, frame_index=1), replace(good, values=good.values * np.float32(np.nan))):
        with pytest.raises(InvalidGradients):
            reward_with_gradient(pixels, replace(reward, crop_gradients=(broken,)))
