"""Gradients that Triton computes are those of networks in this process, with no torch on either side."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate, ScoreOptions
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.errors import FeatureUnavailable, InferenceFailed, InvalidRepository
from likeness_reward.triton_scorer import TritonScorer

WANTED = ScoreOptions(include_crop_gradients=True, gradient_encoding="float32")


@pytest.fixture(scope="module")
def toy_triton(
    start_triton: Callable, export_pack: Callable[..., Path], toy_pack: Path,
    tmp_path_factory: pytest.TempPathFactory,
):  # fmt: skip
    """A Triton with the toy's pack and its gradients; batches are smaller than the service's own."""
    folder = tmp_path_factory.mktemp("gradients") / "models"
    return start_triton(export_pack(toy_pack, folder, max_batch=3, gradients=True))


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    """Nine frames of one person, the last two black."""
    painter = pytest.importorskip("likeness_toyworld.painter", reason="the toy world is not installed")
    motion = painter.sample_motion(np.random.default_rng(5))
    frames = painter.paint_clip(painter.sample_identity(5), motion, 9, 96)[0]
    frames[7:] = 0
    return frames


def other_person(scorer: EmbeddedScorer) -> IdentityTemplate:
    from likeness_toyworld import painter

    motion = painter.sample_motion(np.random.default_rng(8))
    return scorer.embed_identity(list(painter.paint_clip(painter.sample_identity(8), motion, 3, 96)[0]))


@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_gradients_equal_the_embedded_ones(toy_triton, toy_pack: Path, clip: np.ndarray, shared_memory: str) -> None:
    """Batches of three here and of eight there: sums in another order."""
    embedded, scorer = EmbeddedScorer(toy_pack), TritonScorer(toy_triton.url, shared_memory=shared_memory)
    identity = other_person(embedded)
    expected, found = embedded.score(clip, identity, WANTED), scorer.score(clip, identity, WANTED)
    assert found.value == expected.value
    assert [each.frame_index for each in found.crop_gradients] == list(range(7))
    for ours, theirs in zip(found.crop_gradients, expected.crop_gradients, strict=True):
        assert np.linalg.norm(ours.values - theirs.values) <= 1e-5 * np.linalg.norm(theirs.values)
        np.testing.assert_array_equal(ours.frame_from_crop, theirs.frame_from_crop)
    scorer.connection.close()


def test_a_gateway_offers_them_over_grpc(toy_triton, serve, toy_pack: Path, clip: np.ndarray) -> None:
    embedded, scorer = EmbeddedScorer(toy_pack), TritonScorer(toy_triton.url)
    identity = other_person(embedded)
    expected = embedded.score(clip, identity, WANTED)
    with RewardClient(serve(scorer).endpoint, timeout_s=20) as client:
        assert client.server_info().has_crop_gradients
        found = client.score(clip, identity, WANTED)
    for ours, theirs in zip(found.crop_gradients, expected.crop_gradients, strict=True):
        assert np.linalg.norm(ours.values - theirs.values) <= 1e-5 * np.linalg.norm(theirs.values)
    scorer.connection.close()


def test_a_triton_without_the_model_says_what_to_do(
    start_triton, export_pack: Callable[..., Path], written_pack: Path, colours, tmp_path: Path
) -> None:
    triton = start_triton(export_pack(written_pack, tmp_path / "models"))
    scorer = TritonScorer(triton.url)
    assert not scorer.has_crop_gradients
    identity = scorer.embed_identity([colours.frame()])
    with pytest.raises(FeatureUnavailable, match="has no model face_gradient; export the pack with --gradients"):
        scorer.score(colours.frame()[None], identity, WANTED)
    scorer.connection.close()
    triton.kill()


def test_gradients_of_another_pack_are_refused_at_the_start(
    start_triton, export_pack: Callable[..., Path], written_pack: Path, onnx_writer, tmp_path: Path
) -> None:
    repository = export_pack(written_pack, tmp_path / "models")
    onnx_writer.recognizer(written_pack / "recognizer.onnx", last="Relu")
    export_pack(written_pack, tmp_path / "other", gradients=True)
    (tmp_path / "other" / "face_gradient").rename(repository / "face_gradient")
    triton = start_triton(repository)
    with pytest.raises(InvalidRepository, match="model face_gradient on Triton .* export the pack again"):
        TritonScorer(triton.url)
    triton.kill()


def test_a_derivative_that_fails_in_triton_fails_the_gradients_and_the_health_alone(
    start_triton, export_pack: Callable[..., Path], written_pack: Path, colours, tmp_path: Path
) -> None:
    repository, flag = export_pack(written_pack, tmp_path / "models", gradients=True), tmp_path / "fail"
    path = repository / "face_gradient" / "1" / "model.py"
    before = "            joined = {"
    assert before in path.read_text()
    failure = f"            if Path({str(flag)!r}).exists():\n                raise RuntimeError('no memory')\n"
    path.write_text(path.read_text().replace(before, failure + before))
    triton = start_triton(repository)
    scorer = TritonScorer(triton.url)
    identity = scorer.embed_identity([colours.frame()])
    good = scorer.score(colours.frame()[None], identity, WANTED)
    assert len(good.crop_gradients) == 1
    flag.touch()
    with pytest.raises(InferenceFailed, match="model face_gradient: .*onnxruntime: no memory"):
        scorer.score(colours.frame()[None], identity, WANTED)
    with pytest.raises(InferenceFailed, match="model face_gradient"):
        scorer.check_networks()
    without = scorer.score(colours.frame()[None], identity)
    assert replace(good, crop_gradients=(), frames=()) == replace(without, frames=())
    scorer.connection.close()
    triton.kill()
