"""Composed training pictures for the detector: zero to several painted faces on one canvas, with exact annotations."""

import dataclasses

import cv2
import numpy as np

from likeness_toyworld.face_pack import pictures
from likeness_toyworld.face_pack.pictures import Picture, Points, Portraits

SMALLEST_FACE = 13.0
"""Faces whose box has a smaller geometric mean side, in pixels, are not annotated."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """picture_rgb: uint8 [H, W, 3]; boxes: float32 [F, 4]; landmarks: float32 [F, 5, 2], pixels."""

    picture_rgb: Picture
    boxes: Points
    landmarks: Points


@dataclasses.dataclass(frozen=True)
class _Paste:
    """One warped portrait. area: where it covers the canvas, float32 [H, W, 1] in 0..1."""

    warped: Picture
    area: Points
    box: Points
    landmarks: Points


class ScenePainter:
    """Draws scenes from pools of portraits of several picture sizes."""

    def __init__(self, pools: list[Portraits], rng: np.random.Generator) -> None:
        self._pools = pools
        self._rng = rng

    def scene(self, side: int) -> Scene:
        """A square scene: mostly one whole frame, else a canvas with zero to four faces, else no face at all."""
        kind = self._rng.random()
        if kind < 0.45:
            return self._whole_frame(side)
        if kind < 0.78:
            return self._canvas(side)
        return self._faceless(side)

    def _portrait(self) -> tuple[Picture, Points, Points]:
        pool = self._pools[int(self._rng.integers(len(self._pools)))]
        index = int(self._rng.integers(len(pool.frames_rgb)))
        return pool.frames_rgb[index], pool.landmarks[index], pool.boxes[index]

    def _seen_portrait(self) -> tuple[Picture, Points, Points]:
        """A degraded portrait, sometimes with one feature covered, which still is a face."""
        picture, landmarks, box = self._portrait()
        if self._rng.random() < 0.08:
            picture = pictures.cover(picture, landmarks, [int(self._rng.integers(5))], self._rng)
        if self._rng.random() < 0.85:
            picture = pictures.degrade(picture, self._rng)
        if self._rng.random() < 0.5:
            picture, landmarks, box = _mirror(picture, landmarks, box)
        return picture, landmarks, box

    def _whole_frame(self, side: int) -> Scene:
        """A frame enlarged to the canvas, as the letterbox of a video frame is, moved and turned a little."""
        rng = self._rng
        picture, landmarks, box = self._seen_portrait()
        scale = side / picture.shape[0] * float(np.exp(rng.uniform(-0.28, 0.28)))
        center = side * (0.5 + rng.uniform(-0.12, 0.12, 2))
        paste = _warp(picture, landmarks, box, (side, side), scale, float(rng.normal(0, 9)), center)
        inside = paste.landmarks.min() > 0 and paste.landmarks.max() < side
        if not inside:
            return self._whole_frame(side)
        return Scene(paste.warped, paste.box[None], paste.landmarks[None])

    def _canvas(self, side: int) -> Scene:
        rng = self._rng
        canvas = pictures.faceless_background(side, side, rng)
        boxes: list[Points] = []
        landmarks: list[Points] = []
        for _ in range(int(rng.integers(1, 6))):
            portrait, points, box = self._seen_portrait()
            face_side = float(np.exp(rng.uniform(np.log(11), np.log(0.8 * side))))
            scale = face_side / _mean_side(box)
            center = rng.uniform(0.4 * face_side, side - 0.4 * face_side, 2)
            paste = _warp(portrait, points, box, (side, side), scale, float(rng.normal(0, 14)), center)
            if paste.landmarks.min() < 1 or paste.landmarks.max() > side - 1 or _overlaps(paste, boxes):
                continue
            canvas = (canvas * (1 - paste.area) + paste.warped * paste.area).astype(np.uint8)
            boxes.append(paste.box)
            landmarks.append(paste.landmarks)
        if rng.random() < 0.3:
            canvas = pictures.compress(canvas, rng)
        return Scene(canvas, *_stack(boxes, landmarks))

    def _faceless(self, side: int) -> Scene:
        """Background only, or heads that lost their features, or heads on their side or upside down."""
        rng = self._rng
        canvas = pictures.faceless_background(side, side, rng)
        if rng.random() < 0.65:
            portrait, points, box = self._portrait()
            angle = float(rng.normal(0, 10))
            if rng.random() < 0.8:
                parts = [0, 1, 2, 3] if rng.random() < 0.6 else [0, 1, 3] if rng.random() < 0.6 else [0, 1]
                portrait = pictures.cover(portrait, points, parts, rng)
            else:
                angle = float(rng.uniform(85, 275))
            portrait = pictures.degrade(portrait, rng)
            share = 1.0 if rng.random() < 0.6 else float(rng.uniform(0.15, 1))
            scale = share * side / portrait.shape[0]
            center = side * (0.5 + (1.1 - share) * rng.uniform(-0.4, 0.4, 2))
            paste = _warp(portrait, points, box, (side, side), scale, angle, center)
            canvas = (canvas * (1 - paste.area) + paste.warped * paste.area).astype(np.uint8)
        return Scene(canvas, *_stack([], []))


def _mean_side(box: Points) -> float:
    return float(np.sqrt((box[2] - box[0]) * (box[3] - box[1])))


def _stack(boxes: list[Points], landmarks: list[Points]) -> tuple[Points, Points]:
    if not boxes:
        return np.zeros((0, 4), np.float32), np.zeros((0, 5, 2), np.float32)
    return np.stack(boxes), np.stack(landmarks)


def _mirror(picture: Picture, landmarks: Points, box: Points) -> tuple[Picture, Points, Points]:
    width = picture.shape[1]
    flipped = landmarks[[1, 0, 2, 4, 3]].copy()
    flipped[:, 0] = width - flipped[:, 0]
    turned = np.array([width - box[2], box[1], width - box[0], box[3]], np.float32)
    return np.ascontiguousarray(picture[:, ::-1]), flipped, turned


def _warp(
    picture: Picture, landmarks: Points, box: Points, shape: tuple[int, int], scale: float, angle: float, center: Points
) -> _Paste:
    """The portrait scaled, turned by `angle` degrees, its face's centre moved to `center` (x, y)."""
    middle = (box[:2] + box[2:]) / 2
    matrix: Points = cv2.getRotationMatrix2D((float(middle[0]), float(middle[1])), angle, scale)
    matrix[:, 2] += center - middle
    # Pixel i covers [i, i + 1) in annotations, while warpAffine puts its centre at i.
    shifted = matrix.copy()
    shifted[:, 2] += matrix[:, :2] @ (0.5, 0.5) - 0.5
    height, width = shape
    interpolation = cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR
    if scale < 0.7:
        picture = cv2.GaussianBlur(picture, (0, 0), 0.35 / scale)
    warped = cv2.warpAffine(picture, shifted, (width, height), flags=interpolation, borderMode=cv2.BORDER_REPLICATE)
    area = cv2.warpAffine(np.ones(picture.shape[:2], np.float32), shifted, (width, height))[..., None]
    moved = landmarks @ matrix[:, :2].T + matrix[:, 2]
    half = (box[2:] - box[:2]) / 2 * scale
    placed = np.concatenate([center - half, center + half])
    return _Paste(warped, area, placed.astype(np.float32), moved.astype(np.float32))


def _overlaps(paste: _Paste, boxes: list[Points]) -> bool:
    """Whether the whole pasted portrait, not just its face, reaches into an earlier face."""
    ys, xs = np.nonzero(paste.area[..., 0] > 0.01)
    if len(xs) == 0:
        return True
    left, top, right, bottom = xs.min(), ys.min(), xs.max(), ys.max()
    return any(left < b[2] and right > b[0] and top < b[3] and bottom > b[1] for b in boxes)
