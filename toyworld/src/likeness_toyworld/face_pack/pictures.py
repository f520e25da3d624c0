"""Training pictures for the face pack: painted people in many poses, and what a small video model does to a frame.

Only people with a seed below HELD_OUT_SEED appear here.
"""

import dataclasses
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from likeness_toyworld.painter import HELD_OUT_SEED, Identity, paint_frames, sample_identity

# OpenCV's type stubs do not know the element type of what they return.
Picture = NDArray[Any]
"""uint8 RGB [height, width, 3]."""
Points = NDArray[Any]
"""float32 or float64."""

PAINT_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Portraits:
    """frames_rgb: uint8 [N, S, S, 3]. landmarks: float32 [N, 5, 2] and boxes: float32 [N, 4], pixels."""

    frames_rgb: Picture
    landmarks: Points
    boxes: Points


def training_person(rng: np.random.Generator) -> Identity:
    """A person that evaluation never uses."""
    return sample_identity(int(rng.integers(HELD_OUT_SEED)))


def redress(person: Identity, rng: np.random.Generator) -> Identity:
    """The same face before another background and in other clothes, so that neither becomes part of who it is."""
    gray = rng.uniform(50, 215)
    red, green, blue = np.clip(gray + rng.uniform(-55, 55, 3), 0, 255)
    clothes = rng.uniform(20, 220, 3)
    return dataclasses.replace(
        person,
        background=(float(red), float(green), float(blue)),
        clothes=(float(clothes[0]), float(clothes[1]), float(clothes[2])),
    )


def random_poses(rng: np.random.Generator, count: int) -> Points:
    """Poses wider than the world's own motion: float32 [N, 4], x, y, yaw, mouth as in Motion.poses."""
    return rng.uniform((-0.07, -0.04, -0.85, 0.0), (0.07, 0.04, 0.85, 0.8), (count, 4)).astype(np.float32)


def paint_portraits(people: list[Identity], rng: np.random.Generator, size: int) -> Portraits:
    """One portrait of each person, redressed, in a random pose."""
    frames, landmarks, boxes = [], [], []
    for start in range(0, len(people), PAINT_BATCH):
        some = [redress(person, rng) for person in people[start : start + PAINT_BATCH]]
        painted, annotations = paint_frames(some, random_poses(rng, len(some)), size)
        frames.append(painted)
        landmarks.append(annotations.landmarks)
        boxes.append(annotations.boxes)
    return Portraits(np.concatenate(frames), np.concatenate(landmarks), np.concatenate(boxes))


def recolor(picture: Picture, rng: np.random.Generator, strength: float = 1.0) -> Picture:
    """The picture with another brightness, contrast, gamma and white balance; uint8 RGB, same shape."""
    gain = (1 + strength * rng.uniform(-0.12, 0.12)) * (1 + strength * rng.uniform(-0.05, 0.05, 3))
    offset = strength * rng.uniform(-14, 14)
    levels = np.arange(256, dtype=np.float32)[:, None] / 255
    gamma = np.exp(strength * rng.uniform(-0.15, 0.15))
    table = np.clip(255 * levels**gamma * gain + offset, 0, 255).astype(np.uint8)
    recolored: Picture = cv2.LUT(picture, table.reshape(1, 256, 3))
    return recolored


def coarsen(picture: Picture, rng: np.random.Generator, smallest: float = 0.42) -> Picture:
    """The picture shrunk to a random share of its side (down to `smallest`) and enlarged again."""
    height, width = picture.shape[:2]
    share = rng.uniform(smallest, 1)
    small = cv2.resize(picture, (round(width * share), round(height * share)), interpolation=cv2.INTER_AREA)
    coarse: Picture = cv2.resize(
        small, (width, height), interpolation=int(rng.choice((cv2.INTER_LINEAR, cv2.INTER_CUBIC)))
    )
    return coarse


def wobble(picture: Picture, rng: np.random.Generator, pixels: float) -> Picture:
    """The picture under a smooth random displacement of about `pixels`: features that drift a little, as in samples."""
    height, width = picture.shape[:2]
    field = rng.normal(0, pixels, (2, 5, 5)).astype(np.float32)
    dx, dy = (cv2.resize(plane, (width, height), interpolation=cv2.INTER_CUBIC) for plane in field)
    columns, rows = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    moved: Picture = cv2.remap(picture, columns + dx, rows + dy, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return moved


def ghost(picture: Picture, rng: np.random.Generator) -> Picture:
    """The mean of the picture and itself moved a little: the double image of an undecided model."""
    dx, dy = rng.uniform(-0.025, 0.025, 2) * picture.shape[1]
    shift = np.array([[1, 0, dx], [0, 1, dy]], np.float32)
    moved = cv2.warpAffine(picture, shift, picture.shape[1::-1], borderMode=cv2.BORDER_REPLICATE)
    share = float(rng.uniform(0.25, 0.5))
    doubled: Picture = cv2.addWeighted(picture, 1 - share, moved, share, 0)
    return doubled


def add_noise(picture: Picture, rng: np.random.Generator, deviation: float) -> Picture:
    """The picture with Gaussian noise, sometimes of a coarse grain."""
    height, width = picture.shape[:2]
    grain = int(rng.choice((1, 1, 2, 4)))
    noise: Picture = rng.normal(0, deviation, (-(-height // grain), -(-width // grain), 3)).astype(np.float32)
    if grain > 1:
        noise = cv2.resize(noise, (width, height), interpolation=cv2.INTER_LINEAR)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def compress(picture: Picture, rng: np.random.Generator) -> Picture:
    """The picture after JPEG of a random quality."""
    _, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(25, 96))])
    decoded = cv2.imdecode(data, cv2.IMREAD_COLOR)
    assert decoded is not None, "OpenCV reads what it wrote"
    return decoded


def degrade(picture: Picture, rng: np.random.Generator) -> Picture:
    """What cameras, codecs and a tiny VAE do to a frame; every effect comes with its own probability."""
    side = picture.shape[1]
    if rng.random() < 0.3:
        picture = wobble(picture, rng, 0.009 * side)
    if rng.random() < 0.25:
        picture = ghost(picture, rng)
    if rng.random() < 0.45:
        picture = coarsen(picture, rng)
    if rng.random() < 0.45:
        picture = cv2.GaussianBlur(picture, (0, 0), side * float(rng.uniform(0.006, 0.028)))
    if rng.random() < 0.35:
        picture = add_noise(picture, rng, float(rng.uniform(2, 14)))
    if rng.random() < 0.25:
        picture = compress(picture, rng)
    return recolor(picture, rng)


def cover(picture: Picture, landmarks: Points, parts: list[int], rng: np.random.Generator) -> Picture:
    """The face without the features around landmarks `parts` (0, 1 eyes, 2 nose, 3, 4 mouth), in its own colour."""
    eye_distance = float(np.linalg.norm(landmarks[1] - landmarks[0]))
    between = landmarks[:2].mean(0) + (0, 0.28 * eye_distance)
    column, row = np.clip(np.rint(between), 0, picture.shape[0] - 1).astype(int)
    skin = picture[row, column].astype(np.float32)
    mask = np.zeros(picture.shape[:2], np.float32)
    for part in parts:
        x, y = landmarks[part] if part not in (3, 4) else landmarks[3:5].mean(0)
        rise = 0.22 * eye_distance if part < 2 else 0.0
        width, height = (0.46, 0.5) if part < 2 else (0.36, 0.26) if part == 2 else (0.72, 0.36)
        axes = (max(1, round(width * eye_distance)), max(1, round(height * eye_distance)))
        cv2.ellipse(mask, (round(float(x)), round(float(y - rise))), axes, 0, 0, 360, 1.0, -1)
    mask = cv2.GaussianBlur(mask, (0, 0), 0.05 * eye_distance + 0.3)[..., None] * float(rng.uniform(0.92, 1.0))
    return (picture * (1 - mask) + skin * mask).astype(np.uint8)


def faceless_background(height: int, width: int, rng: np.random.Generator) -> Picture:
    """A picture without a face: plain, a gradient, noise of any grain, or soft shapes; uint8 RGB [height, width, 3]."""
    kind = rng.random()
    base = rng.uniform(20, 235) + rng.uniform(-50, 50, 3)
    canvas = np.broadcast_to(base, (height, width, 3)).astype(np.float32)
    if kind > 0.25:
        slope = rng.uniform(-60, 60, (2, 3))
        canvas = canvas + np.linspace(-0.5, 0.5, height)[:, None, None] * slope[0]
        canvas = canvas + np.linspace(-0.5, 0.5, width)[None, :, None] * slope[1]
    if kind > 0.5:
        for _ in range(int(rng.integers(1, 4))):
            grain = float(rng.choice((1, 2, 4, 8, 16, 32)))
            shape = (max(2, round(height / grain)), max(2, round(width / grain)), 3)
            noise = rng.normal(0, rng.uniform(4, 45), shape).astype(np.float32)
            canvas = canvas + cv2.resize(noise, (width, height), interpolation=cv2.INTER_LINEAR)
    picture = np.clip(canvas, 0, 255).astype(np.uint8)
    if kind > 0.4 or rng.random() < 0.3:
        picture = _scatter_shapes(picture, rng)
    return picture


def _scatter_shapes(picture: Picture, rng: np.random.Generator) -> Picture:
    height, width = picture.shape[:2]
    picture = picture.copy()
    for _ in range(int(rng.integers(1, 14))):
        color = tuple(int(v) for v in rng.uniform(0, 255, 3))
        center = (int(rng.integers(width)), int(rng.integers(height)))
        axes = (int(rng.integers(1, max(2, width // 4))), int(rng.integers(1, max(2, height // 4))))
        if rng.random() < 0.7:
            cv2.ellipse(picture, center, axes, float(rng.uniform(0, 180)), 0, 360, color, -1, cv2.LINE_AA)
        else:
            corner = (center[0] + axes[0], center[1] + axes[1])
            cv2.rectangle(picture, center, corner, color, -1 if rng.random() < 0.7 else 2)
    return cv2.GaussianBlur(picture, (0, 0), float(rng.uniform(0.4, 4))) if rng.random() < 0.7 else picture
