"""How much a video moves, so that a frozen copy of the first frame can be told from a video. Pure arithmetic.

A frame becomes a thumbnail u: its grey values, averaged over a coarse grid, less their mean, divided by their length
(at least LEAST_CONTRAST grey levels of standard deviation, so that noise on a flat picture stays small). The motion of
a video is m = mean over t of |u[t] - u[t-1]| / 2, in 0..1; brightness and contrast have no part in it. It is taken of
the whole frame, and of the aligned face, in which only expression, gaze and head pose move.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import Thumbnails, VideoMotion

SCENE_SIDE, FACE_SIDE = 32, 28
LEAST_CONTRAST = 4.0
"""Standard deviation of a thumbnail, grey levels, below which it is not scaled up any more."""
NEGLIGIBLE = 0.005
"""Motion that codecs and rounding cause; added to both sides of the comparison."""


def thumbnails_of(frame: NDArray[np.uint8], crop: NDArray[np.uint8] | None) -> Thumbnails:
    """Returns the thumbnails of an RGB frame uint8 [H, W, 3] and of its aligned face uint8 [S, S, 3]."""
    return Thumbnails(thumbnail(frame, SCENE_SIDE), None if crop is None else thumbnail(crop, FACE_SIDE))


def thumbnail(picture: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Returns an RGB picture uint8 [H, W, 3] as float32 [side * side], of zero mean and at most unit length."""
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY).astype(np.float32)
    small = cv2.resize(grey, (side, side), interpolation=cv2.INTER_AREA).ravel()
    small -= small.mean()
    return small / np.float32(max(float(np.linalg.norm(small)), LEAST_CONTRAST * side))


def motion_of(frames: Sequence[Thumbnails]) -> VideoMotion:
    """Returns the motion of a video's frames; a single frame does not move."""
    scene = [distance(before.scene, after.scene) for before, after in pairwise(frames)]
    face = [
        distance(before.face, after.face)
        for before, after in pairwise(frames)
        if before.face is not None and after.face is not None
    ]
    return VideoMotion(mean(scene) if scene else 0.0, mean(face) if face else None)


def motion_component(motion: VideoMotion, reference: VideoMotion) -> float:
    """Returns how much of the reference's motion a video has, in 0..1: the lesser of scene and face.

    Each is min(1, (m + NEGLIGIBLE) / (reference + NEGLIGIBLE)): more motion than the reference's gains nothing. The
    face counts when both have one; a video that hides it pays in identity and coverage.
    """
    shares = [share(motion.scene, reference.scene)]
    if motion.face is not None and reference.face is not None:
        shares.append(share(motion.face, reference.face))
    return min(shares)


def share(value: float, reference: float) -> float:
    """Returns a motion as a share of the reference's, at most 1."""
    return min(1.0, (value + NEGLIGIBLE) / (reference + NEGLIGIBLE))


def distance(before: NDArray[np.float32], after: NDArray[np.float32]) -> float:
    """Returns half the distance between two thumbnails, 0 to 1."""
    return float(np.linalg.norm(after.astype(np.float64) - before)) / 2


def mean(values: Sequence[float]) -> float:
    """Returns the mean, rounded once."""
    return math.fsum(values) / len(values)
