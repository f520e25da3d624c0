"""How much a video moves, and what becomes of a frozen copy of its first frame."""

from dataclasses import replace

import numpy as np
import pytest

from likeness_reward.domain import FaceObservation, FrameScore, ScoreOptions, Thumbnails, Verdict, VideoMotion
from likeness_reward.errors import InvalidRequest
from likeness_reward.face.motion import (
    FACE_SIDE,
    LEAST_CONTRAST,
    NEGLIGIBLE,
    SCENE_SIDE,
    motion_component,
    motion_of,
    thumbnail,
    thumbnails_of,
)
from likeness_reward.face.scoring import check_reference_motion, reward_from_frames


def texture(shift: int = 0, height: int = 120, width: int = 160) -> np.ndarray:
    """A smooth colourful picture uint8 [H, W, 3], moved to the right by `shift` pixels."""
    x = (np.arange(width) - shift) / width
    y = np.arange(height)[:, None] / height
    planes = [np.sin(9 * x + phase) * np.cos(7 * y + phase) for phase in (0.0, 1.0, 2.0)]
    return (np.stack(planes, axis=-1) * 100 + 128).astype(np.uint8)


def video(shifts: list[int]) -> list[Thumbnails]:
    """The thumbnails of a video of that picture; the aligned face stays as it is."""
    return [thumbnails_of(texture(shift), texture(height=112, width=112)) for shift in shifts]


def test_a_thumbnail_has_zero_mean_and_unit_length_and_sees_neither_brightness_nor_contrast() -> None:
    picture = texture()
    plain = thumbnail(picture, SCENE_SIDE)
    assert plain.shape == (SCENE_SIDE**2,)
    assert float(plain.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(np.linalg.norm(plain)) == pytest.approx(1.0, abs=1e-6)
    dimmed = thumbnail((picture * 0.5 + 40).astype(np.uint8), SCENE_SIDE)
    assert float(np.linalg.norm(dimmed - plain)) < 0.01


def test_noise_on_a_flat_picture_stays_small() -> None:
    noise = np.random.default_rng(0).integers(127, 130, (64, 64, 3)).astype(np.uint8)
    assert float(np.linalg.norm(thumbnail(noise, SCENE_SIDE))) < 2 / LEAST_CONTRAST
    assert not thumbnail(np.full((64, 64, 3), 7, np.uint8), SCENE_SIDE).any()


def test_motion_is_the_mean_of_half_the_distances() -> None:
    moved = video([0, 8, 24])
    first, second, third = (frame.scene.astype(np.float64) for frame in moved)
    expected = (np.linalg.norm(second - first) + np.linalg.norm(third - second)) / 4
    assert motion_of(moved).scene == pytest.approx(float(expected))
    assert motion_of(moved).face == 0.0
    opposite = [Thumbnails(sign * moved[0].scene, None) for sign in (1, -1)]
    assert motion_of(opposite).scene == pytest.approx(1.0)
    assert motion_of(moved[:1]) == VideoMotion(0.0, None)


def test_the_face_moves_between_consecutive_frames_that_show_it() -> None:
    face = [thumbnail(texture(shift, 112, 112), FACE_SIDE) for shift in (0, 10, 20)]
    scene = np.zeros(SCENE_SIDE**2, np.float32)
    shown = [
        Thumbnails(scene, face[0]),
        Thumbnails(scene, face[1]),
        Thumbnails(scene, None),
        Thumbnails(scene, face[2]),
    ]
    assert motion_of(shown).face == pytest.approx(float(np.linalg.norm(face[1] - face[0])) / 2, rel=1e-6)
    assert motion_of(shown[1:]).face is None


def test_a_frozen_copy_has_next_to_nothing_of_the_motion_and_more_motion_gains_nothing() -> None:
    reference = motion_of(video([0, 8, 16, 24]))
    frozen = motion_component(motion_of(video([0, 0, 0, 0])), reference)
    assert frozen == pytest.approx(NEGLIGIBLE / (reference.scene + NEGLIGIBLE))
    assert frozen < 0.1
    assert motion_component(reference, reference) == 1.0
    assert motion_component(motion_of(video([0, 30, 60, 90])), reference) == 1.0


def test_the_lesser_of_scene_and_face_counts() -> None:
    reference = VideoMotion(0.2, 0.1)
    assert motion_component(VideoMotion(0.2, 0.0), reference) == pytest.approx(NEGLIGIBLE / (0.1 + NEGLIGIBLE))
    assert motion_component(VideoMotion(0.0, 0.1), reference) == pytest.approx(NEGLIGIBLE / (0.2 + NEGLIGIBLE))
    assert motion_component(VideoMotion(0.2, None), reference) == 1.0
    assert motion_component(VideoMotion(0.2, 0.0), VideoMotion(0.2, None)) == 1.0


def frames_of(thumbnails: list[Thumbnails]) -> list[FrameScore]:
    seen = FaceObservation(Verdict.EMBEDDED, 1, None)
    return [FrameScore(index, 0.5, seen, small) for index, small in enumerate(thumbnails)]


def test_motion_is_a_weighted_component_when_there_is_a_reference_and_absent_without_one() -> None:
    options = ScoreOptions(motion_weight=0.5)
    frames = frames_of(video([0, 0, 0]))
    reward = reward_from_frames(frames, options, "m", VideoMotion(0.1, 0.1))
    assert reward.component("motion") == pytest.approx(NEGLIGIBLE / (0.1 + NEGLIGIBLE))
    assert reward.value == pytest.approx(0.5 + 0.5 * reward.component("motion"))
    assert [part.name for part in reward_from_frames(frames, ScoreOptions(), "m").components] == [
        "identity",
        "coverage",
    ]
    assert all(frame.thumbnails is None for frame in reward.frames)
    assert reward.frames == tuple(replace(frame, thumbnails=None) for frame in frames)


def test_a_weight_without_a_reference_is_refused() -> None:
    check_reference_motion(ScoreOptions(), None)
    check_reference_motion(ScoreOptions(motion_weight=0.5), VideoMotion(0.1, None))
    with pytest.raises(InvalidRequest, match=r"weight of motion is 0\.5, but no reference_motion"):
        check_reference_motion(ScoreOptions(motion_weight=0.5), None)
