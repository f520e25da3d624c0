"""Embeddings to templates and rewards."""

import numpy as np
import pytest

from likeness_reward.domain import FaceObservation, FrameScore, ScoreOptions, Verdict
from likeness_reward.errors import InferenceFailed
from likeness_reward.face.scoring import cosine, pool_embeddings, reward_from_frames

SEEN = FaceObservation(Verdict.EMBEDDED, 1, None)
UNSEEN = FaceObservation(Verdict.NO_FACE, 0, None)


def frames_of(*similarities: float | None) -> list[FrameScore]:
    return [
        FrameScore(index, similarity, UNSEEN if similarity is None else SEEN)
        for index, similarity in enumerate(similarities)
    ]


def test_a_template_is_the_mean_and_is_not_scaled_back_so_it_gives_the_mean_cosine() -> None:
    references = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    template = pool_embeddings(references, [1.0, 1.0], "mean")
    assert np.linalg.norm(template) == pytest.approx(np.sqrt(0.5))
    embedding = np.array([0.8, 0.6, 0], np.float32)
    assert cosine(embedding, template) == pytest.approx(np.mean(references @ embedding))


def test_quality_weights_the_images() -> None:
    references = np.array([[1, 0], [0, 1]], np.float32)
    np.testing.assert_allclose(pool_embeddings(references, [3.0, 1.0], "quality_weighted"), [0.75, 0.25])
    np.testing.assert_allclose(pool_embeddings(references, [3.0, 1.0], "mean"), [0.5, 0.5])


def test_frames_without_a_face_count_so_hiding_the_face_does_not_pay() -> None:
    shown = reward_from_frames(frames_of(0.8, 0.8, 0.8, 0.8), ScoreOptions(), "m")
    hidden = reward_from_frames(frames_of(0.8, None, None, None), ScoreOptions(), "m")
    assert (shown.value, hidden.value) == (pytest.approx(0.8), pytest.approx(0.2))
    assert (shown.coverage, hidden.coverage) == (1.0, 0.25)
    assert hidden.similarities == [0.8, None, None, None]


def test_no_face_anywhere_is_a_reward_of_the_no_face_value() -> None:
    reward = reward_from_frames(frames_of(None, None), ScoreOptions(no_face_value=-0.25), "m")
    assert (reward.value, reward.embedded_frame_count, reward.frame_count) == (-0.25, 0, 2)


def test_the_least_frame_counts_with_min_also_one_without_a_face() -> None:
    options = ScoreOptions(aggregation="min", no_face_value=0.1)
    assert reward_from_frames(frames_of(0.9, 0.3, 0.5), options, "m").value == 0.3
    assert reward_from_frames(frames_of(0.9, None, 0.5), options, "m").value == 0.1


def test_the_value_is_the_weighted_sum_of_the_named_components() -> None:
    options = ScoreOptions(identity_weight=2.0, coverage_weight=0.5)
    reward = reward_from_frames(frames_of(0.6, None), options, "m")
    assert {part.name: (part.value, part.weight) for part in reward.components} == {
        "identity": (0.3, 2.0),
        "coverage": (0.5, 0.5),
    }
    assert reward.value == pytest.approx(2 * 0.3 + 0.5 * 0.5)
    assert reward.component("coverage") == 0.5
    with pytest.raises(KeyError, match="identity"):
        reward.component("motion")


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(InferenceFailed, match="not finite"):
        reward_from_frames(frames_of(float("nan")), ScoreOptions(), "m")


def test_frames_are_left_out_on_demand() -> None:
    assert reward_from_frames(frames_of(0.6), ScoreOptions(include_frames=False), "m").frames == ()
