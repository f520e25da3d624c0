"""The similarity of five landmarks: exact where it must be, refused where there is none."""

import math

import numpy as np
import pytest

from likeness_reward.face.alignment import CROP_LANDMARKS, AlignmentImpossible, align_face, estimate_similarity


def test_landmarks_already_in_place_need_no_movement() -> None:
    np.testing.assert_allclose(estimate_similarity(CROP_LANDMARKS), [[1, 0, 0], [0, 1, 0]], atol=1e-9)


def test_a_known_rotation_scale_and_shift_is_undone() -> None:
    turn, scale, shift = math.radians(30), 2.5, np.array([40.0, -7.0])
    rotation = scale * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    landmarks = CROP_LANDMARKS @ rotation.T + shift
    matrix = estimate_similarity(landmarks)
    np.testing.assert_allclose(landmarks @ matrix[:, :2].T + matrix[:, 2], CROP_LANDMARKS, atol=1e-9)
    assert np.linalg.det(matrix[:, :2]) == pytest.approx(1 / scale**2)


def test_a_mirrored_face_is_fitted_without_a_reflection() -> None:
    mirrored = CROP_LANDMARKS * [-1, 1]
    assert np.linalg.det(estimate_similarity(mirrored)[:, :2]) > 0


def test_a_crop_of_twice_the_side_has_twice_the_scale() -> None:
    np.testing.assert_allclose(estimate_similarity(CROP_LANDMARKS, 224)[:, :2], 2 * np.eye(2), atol=1e-9)


@pytest.mark.parametrize(
    ("landmarks", "reason"),
    [
        (np.full((5, 2), 17.0), "coincide"),
        (np.where(np.arange(10).reshape(5, 2) == 3, np.nan, CROP_LANDMARKS), "finite"),
        (np.where(np.arange(10).reshape(5, 2) == 3, np.inf, CROP_LANDMARKS), "finite"),
        (CROP_LANDMARKS[:4], "finite"),
    ],
)
def test_landmarks_without_a_similarity_are_refused(landmarks: np.ndarray, reason: str) -> None:
    with pytest.raises(AlignmentImpossible, match=reason):
        estimate_similarity(landmarks)


def test_the_crop_shows_the_frame_where_the_landmarks_say_and_black_outside() -> None:
    frame = np.full((112, 112, 3), (10, 200, 30), np.uint8)
    np.testing.assert_array_equal(align_face(frame, CROP_LANDMARKS), frame)
    shifted = align_face(frame, CROP_LANDMARKS - [56, 0])
    assert (shifted[:, :56] == 0).all()
    assert (shifted[:, 57:] == (10, 200, 30)).all()
