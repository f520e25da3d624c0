"""Which face counts, and what a frame is told when none does."""

import numpy as np
import pytest

from likeness_reward.domain import Face, ScoreOptions, Verdict
from likeness_reward.errors import InferenceFailed
from likeness_reward.face.analysis import by_size


def face(left: float, top: float, side: float, score: float = 0.9, landmarks: np.ndarray | None = None) -> Face:
    box = np.array([left, top, left + side, top + side], np.float32)
    if landmarks is None:
        landmarks = np.array([[0.3, 0.4], [0.7, 0.4], [0.5, 0.6], [0.35, 0.8], [0.65, 0.8]]) * side + [left, top]
    return Face(box, score, landmarks.astype(np.float32))


def two_people() -> np.ndarray:
    """A green-0 person of 60 pixels on the left, a green-255 person of 40 pixels on the right."""
    frame = np.zeros((100, 200, 3), np.uint8)
    frame[:, 100:, 1] = 255
    return frame


def analyzer_seeing(colours, faces: list[Face]):
    analyzer = colours.scorer().analyzer

    class Seen:
        def detect(self, frames):
            return [faces for _ in frames]

    analyzer.detector = Seen()
    return analyzer


def test_the_largest_face_counts_by_default_and_the_most_similar_on_demand(colours) -> None:
    analyzer = analyzer_seeing(colours, [face(120, 30, 40, 0.95), face(20, 20, 60)])
    identity = colours.identity(green=255).embedding
    (largest,) = analyzer.analyze([two_people()], ScoreOptions(), identity)
    (similar,) = analyzer.analyze([two_people()], ScoreOptions(face_choice="most_similar"), identity)
    assert largest.observation.face is not None
    assert similar.observation.face is not None
    assert (largest.observation.face.width, similar.observation.face.width) == (60, 40)
    np.testing.assert_allclose(largest.embedding, [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(similar.embedding, [0, 1, 0, 0], atol=1e-6)
    assert largest.observation.face_count == 2


def test_equal_faces_are_ordered_by_confidence_then_from_left_then_from_top() -> None:
    faces = [face(50, 0, 10), face(0, 9, 10), face(0, 5, 10), face(70, 0, 10, score=0.95), face(0, 0, 20)]
    expected = [faces[4], faces[3], faces[2], faces[1], faces[0]]
    assert by_size(faces) == expected
    assert by_size(faces[::-1]) == expected


def test_a_face_below_the_least_width_is_too_small(colours) -> None:
    analyzer = analyzer_seeing(colours, [face(20, 20, 15.9)])
    (analysis,) = analyzer.analyze([two_people()], ScoreOptions(min_face_pixels=16))
    assert (analysis.observation.verdict, analysis.embedding) == (Verdict.FACE_TOO_SMALL, None)
    (analysis,) = analyzer.analyze([two_people()], ScoreOptions(min_face_pixels=15))
    assert analysis.observation.verdict == Verdict.EMBEDDED


@pytest.mark.parametrize("landmarks", [np.full((5, 2), 40.0), np.full((5, 2), np.nan)])
def test_landmarks_that_coincide_or_are_nan_are_a_verdict(colours, landmarks: np.ndarray) -> None:
    analyzer = analyzer_seeing(colours, [face(20, 20, 60, landmarks=landmarks)])
    (analysis,) = analyzer.analyze([two_people()], ScoreOptions())
    assert analysis.observation.verdict == Verdict.ALIGNMENT_FAILED
    assert analysis.observation.face is None
    assert analysis.observation.face_count == 1


def test_frames_with_and_without_a_face_keep_their_places(colours) -> None:
    frames = [colours.frame(red) for red in (0, 255, 0, 255)]
    verdicts = [analysis.observation.verdict for analysis in colours.scorer().analyzer.analyze(frames, ScoreOptions())]
    assert verdicts == [Verdict.NO_FACE, Verdict.EMBEDDED, Verdict.NO_FACE, Verdict.EMBEDDED]


def test_an_embedding_that_is_not_finite_is_an_error(colours) -> None:
    with pytest.raises(InferenceFailed, match="not finite"):
        colours.scorer().analyzer.analyze([colours.frame(blue=255)], ScoreOptions())
