"""The painter: the same seed paints the same picture, and its annotations point at what it painted."""

import dataclasses

import numpy as np
import pytest

from likeness_toyworld.painter import (
    Identity,
    Motion,
    blend,
    paint_clip,
    paint_drifting_clip,
    paint_frames,
    render,
    sample_identity,
    sample_motion,
)

STILL = Motion(center=(0, 0, 0, 0.3), amplitude=(0,) * 4, rate=(0,) * 4, phase=(0,) * 4)


@pytest.fixture
def person() -> Identity:
    return sample_identity(7)


def test_the_same_seed_paints_the_same_clip() -> None:
    first, _ = paint_clip(sample_identity(3), sample_motion(4))
    second, _ = paint_clip(sample_identity(3), sample_motion(4))
    other, _ = paint_clip(sample_identity(5), sample_motion(4))
    assert first.shape == (9, 64, 64, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, second)
    assert np.abs(first.astype(float) - other).mean() > 5


def test_a_frame_does_not_depend_on_its_neighbours_in_the_batch(person: Identity) -> None:
    poses = np.array([[0.02, 0.0, 0.4, 0.1], [-0.03, 0.01, -0.5, 0.6]], np.float32)
    together, _ = paint_frames([person, sample_identity(8)], poses)
    alone = render(person, dx=0.02, dy=0.0, yaw=0.4, mouth_open=0.1)
    assert np.abs(together[0].astype(int) - alone).max() <= 1


def test_landmarks_point_at_the_pupils_and_the_mouth(person: Identity) -> None:
    marked = dataclasses.replace(person, iris=(0.0, 255.0, 0.0), lips=(0.0, 0.0, 255.0), beard=0.0)
    frames, marks = paint_clip(
        marked, dataclasses.replace(STILL, center=(0.02, -0.01, 0.3, 0.0)), num_frames=1, size=256
    )
    picture = frames[0].astype(float)
    greenness = picture[..., 1] - picture[..., [0, 2]].max(-1)
    rows, columns = np.nonzero(greenness > 60)
    left = columns < columns.mean()
    found = np.array([[columns[left].mean(), rows[left].mean()], [columns[~left].mean(), rows[~left].mean()]]) + 0.5
    # the irises turn a little further than the head (0.3 * yaw * 0.22 * scale * 256 pixels, about 1.8)
    assert marks.landmarks[0, :2] == pytest.approx(found, abs=2.5)
    blueness = picture[..., 2] - picture[..., [0, 1]].max(-1)
    rows, columns = np.nonzero(blueness > 60)
    corners = marks.landmarks[0, 3:]
    assert columns.min() == pytest.approx(corners[0, 0], abs=4)
    assert columns.max() == pytest.approx(corners[1, 0], abs=4)
    assert rows.mean() == pytest.approx(corners[:, 1].mean(), abs=3)


def test_annotations_scale_with_the_picture_and_move_with_the_head(person: Identity) -> None:
    _, small = paint_clip(person, STILL, num_frames=1, size=64)
    _, large = paint_clip(person, STILL, num_frames=1, size=128)
    assert large.landmarks == pytest.approx(2 * small.landmarks, abs=1e-4)
    assert large.boxes == pytest.approx(2 * small.boxes, abs=1e-4)
    moved = dataclasses.replace(STILL, center=(0.1, 0.05, 0, 0.3))
    _, shifted = paint_clip(person, moved, num_frames=1, size=64)
    assert shifted.landmarks - small.landmarks == pytest.approx(np.broadcast_to([6.4, 3.2], (1, 5, 2)), abs=1e-4)


def test_boxes_hold_the_landmarks_and_are_wide_enough_for_a_detector() -> None:
    for seed in range(50):
        _, marks = paint_clip(sample_identity(seed), sample_motion(seed))
        low, high = marks.boxes[:, None, :2], marks.boxes[:, None, 2:]
        assert bool(np.all((marks.landmarks > low) & (marks.landmarks < high)))
        assert float((marks.boxes[:, 2] - marks.boxes[:, 0]).min()) > 30
        assert marks.boxes.min() >= -1
        assert marks.boxes.max() <= 65


def test_blend_goes_from_one_person_to_the_other(person: Identity) -> None:
    other = sample_identity(8)
    assert blend(person, other, 0.0) == person
    assert blend(person, other, 1.0).face_width == pytest.approx(other.face_width)
    half = blend(person, other, 0.5)
    assert half.skin == pytest.approx((np.array(person.skin) + np.array(other.skin)) / 2)


def test_a_drifting_clip_starts_as_one_person_and_ends_as_the_other(person: Identity) -> None:
    other = sample_identity(8)
    drifting, _ = paint_drifting_clip(person, other, 1.0, STILL)
    first, _ = paint_clip(person, STILL)
    last, _ = paint_clip(other, STILL)
    assert np.array_equal(drifting[0], first[0])
    assert np.abs(drifting[-1].astype(int) - last[-1]).max() <= 1
    steps = np.abs(np.diff(drifting.astype(float), axis=0)).mean((1, 2, 3))
    assert steps.max() < 3 * steps.min()  # the change is even, not a jump


def test_poses_of_the_wrong_shape_are_refused(person: Identity) -> None:
    with pytest.raises(ValueError, match=r"poses has shape \(3, 4\); 2 identities need \(2, 4\)"):
        paint_frames([person, person], np.zeros((3, 4), np.float32))
