"""SCRFD (arXiv 2105.04714): frames to faces, with InsightFace's letterbox, decoding and suppression.

InsightFace places every frame on a canvas of one size, much of it black for a frame of another shape: 640x640 for the
640x369 pixels of a frame of 832x480. The letterbox "fit" leaves out rows or columns that hold nothing and gives the
same faces: scale and anchors stay where they are, and only what lies near the cut sees the zeros that convolutions
assume beyond it instead of black. A frame in which something that may be a face reaches so far is looked at again on
the whole canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from likeness_reward.domain import Face
from likeness_reward.errors import InferenceFailed
from likeness_reward.inference.session import InferenceSession

INPUT_MEAN, INPUT_STD = 127.5, 128.0
SIZE_STEP = 32
BATCH_SIZE = 8
STRIDES_BY_OUTPUT_COUNT: dict[int, tuple[tuple[int, ...], int]] = {9: ((8, 16, 32), 2), 15: ((8, 16, 32, 64, 128), 1)}
"""Number of outputs of an SCRFD with landmarks -> its strides and its anchors a cell."""

MOST_AREA_CUT_TO = 0.75
"""Share of the whole canvas above which nothing is left out: a second look would cost more than is saved."""
CUT_REACH = 96.0
"""Distance to the cut, canvas pixels, within which the end of a face may depend on it. Of 1417 painted and photographed
faces 86 moved by more than a pixel or to a cosine below 0.999, the furthest of them 95 pixels away (SCRFD 2.5G)."""
PERHAPS_A_FACE = 0.1
"""Confidence below the threshold from which something near the cut counts as perhaps a face."""

LetterboxKind = Literal["fit", "full"]


class DetectorConfig(BaseModel):
    """How faces are detected. Part of the fingerprint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: tuple[int, int] = (640, 640)
    """Width and height of the detector's canvas, pixels; multiples of 32."""
    letterbox: LetterboxKind = "fit"
    """fit: rows and columns of the canvas that a frame leaves empty are left out; full: they are not, as in
    InsightFace. The faces are the same to within a pixel."""
    score_threshold: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Least confidence of a face."""
    overlap_threshold: float = Field(default=0.4, gt=0.0, lt=1.0)
    """Intersection over union above which the less confident of two faces is dropped."""
    close_up_pass: bool = True
    """Whether a frame without a face is looked at again at half the scale, where a face that fills it can be found."""

    @field_validator("size")
    @classmethod
    def _multiples(cls, size: tuple[int, int]) -> tuple[int, int]:
        if any(side < SIZE_STEP or side > 4096 or side % SIZE_STEP for side in size):
            raise ValueError(f"detector size {size[0]}x{size[1]}: sides must be multiples of {SIZE_STEP} up to 4096")
        return size


@dataclass(frozen=True)
class Letterbox:
    """A frame, resized and placed on a black canvas."""

    canvas: NDArray[np.uint8]
    """uint8 RGB [H, W, 3]."""
    scale: float
    """Canvas pixels per frame pixel."""
    offset: tuple[int, int]
    """(x, y) of the frame's top left corner on the canvas."""
    certain: tuple[float, float] = (np.inf, np.inf)
    """(x, y) on the canvas up to which a face may reach without depending on what was left out."""


@dataclass(frozen=True)
class _Detections:
    """What one canvas shows."""

    faces: list[Face]
    depends_on_cut: bool
    """Whether something that may be a face reaches beyond Letterbox.certain."""


class FaceDetector:
    """Finds the faces of frames."""

    def __init__(self, session: InferenceSession, config: DetectorConfig) -> None:
        self._session = session
        self.config = config
        self._strides, self._anchors = STRIDES_BY_OUTPUT_COUNT[len(session.outputs)]
        self._batched = session.input.shape[0] is None and len(session.outputs[0].shape) == 3

    @property
    def takes_batches(self) -> bool:
        """Whether one run of the network can take several images."""
        return self._batched

    def detect(self, frames: Sequence[NDArray[np.uint8]]) -> list[list[Face]]:
        """Returns the faces of each RGB frame uint8 [H, W, 3], most confident first. Raises InferenceFailed."""
        faces = self.first_pass(frames)
        missed = [index for index, found in enumerate(faces) if not found]
        if self.config.close_up_pass and missed:
            boxes = [close_up_letterbox(frames[index], self._canvas_of(frames[index])) for index in missed]
            for index, found in zip(missed, self._detect_letterboxed(boxes), strict=True):
                faces[index] = found.faces
        return faces

    def first_pass(self, frames: Sequence[NDArray[np.uint8]]) -> list[list[Face]]:
        """Returns what InsightFace's own detector finds: `detect` without the close-up pass."""
        boxes = [letterbox(frame, self.config.size, self._canvas_of(frame)) for frame in frames]
        found = self._detect_letterboxed(boxes)
        again = [index for index, detections in enumerate(found) if detections.depends_on_cut]
        whole = [letterbox(frames[index], self.config.size) for index in again]
        for index, detections in zip(again, self._detect_letterboxed(whole), strict=True):
            found[index] = detections
        return [detections.faces for detections in found]

    def _canvas_of(self, frame: NDArray[np.uint8]) -> tuple[int, int]:
        """Returns width and height of a frame's canvas."""
        if self.config.letterbox == "full":
            return self.config.size
        return fitted_canvas((frame.shape[1], frame.shape[0]), self.config.size, self._strides[-1])

    def _detect_letterboxed(self, boxes: list[Letterbox]) -> list[_Detections]:
        step = BATCH_SIZE if self._batched else 1
        found: dict[int, _Detections] = {}
        for indices in by_canvas(boxes):
            for start in range(0, len(indices), step):
                batch = indices[start : start + step]
                found |= zip(batch, self._detect_batch([boxes[index] for index in batch]), strict=True)
        return [found[index] for index in range(len(boxes))]

    def _detect_batch(self, boxes: list[Letterbox]) -> list[_Detections]:
        outputs = self._session.run(np.stack([box.canvas for box in boxes]))
        found = []
        for index, box in enumerate(boxes):
            levels = [output[index] if output.ndim == 3 else output for output in outputs]
            found.append(self._decode(levels, box))
        return found

    def _decode(self, levels: list[NDArray[np.float32]], box: Letterbox) -> _Detections:
        """Returns the faces in one image's outputs: scores [K, 1], boxes [K, 4], landmarks [K, 10] of each stride."""
        height, width = box.canvas.shape[:2]
        count = len(self._strides)
        found = [
            decode_level(
                (width // stride, height // stride, stride),
                (levels[level], levels[level + count], levels[level + 2 * count]),
                self._anchors,
                max(self.config.score_threshold - PERHAPS_A_FACE, self.config.score_threshold / 2),
            )
            for level, stride in enumerate(self._strides)
        ]
        scores, edges, landmarks = (np.concatenate(parts) for parts in zip(*found, strict=True))
        depends_on_cut = bool((edges[:, 2:] > box.certain).any())
        sure = scores >= self.config.score_threshold
        scores, edges, landmarks = scores[sure], edges[sure], landmarks[sure]
        offset = np.array(box.offset, np.float32)
        edges = ((edges - np.tile(offset, 2)) / np.float32(box.scale)).astype(np.float32, copy=False)
        landmarks = ((landmarks - offset) / np.float32(box.scale)).astype(np.float32, copy=False)
        order = np.argsort(-scores, kind="stable")
        scores, edges, landmarks = scores[order], edges[order], landmarks[order]
        keep = suppress_overlaps(edges, self.config.overlap_threshold)
        faces = [Face(edges[index], float(scores[index]), landmarks[index]) for index in keep]
        return _Detections(faces, depends_on_cut)


def by_canvas(boxes: Sequence[Letterbox]) -> list[list[int]]:
    """Returns the indices of the letterboxes of each canvas size."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, box in enumerate(boxes):
        groups.setdefault(box.canvas.shape, []).append(index)
    return list(groups.values())


def letterbox(frame: NDArray[np.uint8], size: tuple[int, int], canvas_size: tuple[int, int] | None = None) -> Letterbox:
    """Returns the frame [H, W, 3] fitted into `size` (w, h), in the top left corner of a canvas; aspect kept.

    Sides are truncated, and the scale is that of the height, exactly as InsightFace's SCRFD does it. The canvas has
    `size` unless another (w, h) is given.
    """
    height, width = frame.shape[:2]
    new_width, new_height = fitted_size((width, height), size)
    canvas_width, canvas_height = canvas_size or size
    canvas = np.zeros((canvas_height, canvas_width, 3), np.uint8)
    canvas[:new_height, :new_width] = cv2.resize(frame, (new_width, new_height))
    certain = (
        canvas_width - CUT_REACH if canvas_width < size[0] else np.inf,
        canvas_height - CUT_REACH if canvas_height < size[1] else np.inf,
    )
    return Letterbox(canvas, new_height / height, (0, 0), certain)


def fitted_canvas(frame_size: tuple[int, int], size: tuple[int, int], step: int) -> tuple[int, int]:
    """Returns the least canvas (w, h) in multiples of `step` for a frame (w, h) fitted into `size`.

    It is `size` itself when hardly anything would be left out.
    """
    width, height = (
        min(-(-side // step) * step, whole) for side, whole in zip(fitted_size(frame_size, size), size, strict=True)
    )
    return (width, height) if width * height <= MOST_AREA_CUT_TO * size[0] * size[1] else size


def close_up_letterbox(frame: NDArray[np.uint8], size: tuple[int, int]) -> Letterbox:
    """Returns the frame at half of `letterbox`'s scale in the middle of a canvas (w, h), with black all around it."""
    half = letterbox(frame, (size[0] // 2, size[1] // 2))
    height, width = half.canvas.shape[:2]
    left, top = size[0] // 4, size[1] // 4
    canvas = np.zeros((size[1], size[0], 3), np.uint8)
    canvas[top : top + height, left : left + width] = half.canvas
    return Letterbox(canvas, half.scale, (left, top))


def anchor_counts(output_count: int, size: tuple[int, int]) -> tuple[int, ...]:
    """Returns the rows of each output of an SCRFD for an image of `size` (w, h): scores, boxes, landmarks by stride."""
    strides, anchors = STRIDES_BY_OUTPUT_COUNT[output_count]
    return tuple((size[0] // stride) * (size[1] // stride) * anchors for stride in strides) * 3


def fitted_size(frame_size: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Returns width and height of a frame scaled to fit into `size`; at least 1, so that slivers stay legal."""
    frame_ratio = frame_size[1] / frame_size[0]
    if frame_ratio > size[1] / size[0]:
        width, height = int(size[1] / frame_ratio), size[1]
    else:
        width, height = size[0], int(size[0] * frame_ratio)
    return max(width, 1), max(height, 1)


def decode_level(
    grid: tuple[int, int, int],
    outputs: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    anchors: int,
    threshold: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Returns scores [M], boxes [M, 4] and landmarks [M, 5, 2] in canvas pixels of one stride's confident anchors.

    `grid` is (columns, rows, stride). Boxes are distances left, top, right, bottom from the anchor's centre, and
    landmarks are offsets from it, all in strides. Landmarks that are not finite are left to the alignment to refuse.
    """
    columns, rows, stride = grid
    scores, edges, landmarks = outputs
    if len(scores) != columns * rows * anchors:
        expected = f"{columns}x{rows}x{anchors} = {columns * rows * anchors}"
        raise InferenceFailed(f"the detector gave {len(scores)} anchors at stride {stride}, expected {expected}")
    chosen = np.nonzero(scores[:, 0] >= threshold)[0]
    cell = chosen // anchors
    centres = np.stack([cell % columns, cell // columns], axis=1).astype(np.float32) * np.float32(stride)
    distances = edges[chosen] * np.float32(stride)
    boxes = np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)
    points = centres[:, None] + (landmarks[chosen] * np.float32(stride)).reshape(-1, 5, 2)
    if not (np.isfinite(scores).all() and np.isfinite(boxes).all()):
        raise InferenceFailed(f"the detector's scores or boxes at stride {stride} are not finite")
    return scores[chosen, 0], boxes, points


def suppress_overlaps(boxes: NDArray[np.float32], threshold: float) -> list[int]:
    """Returns indices of the boxes [N, 4] to keep, given most confident first.

    Sides count both end pixels (+ 1), as in InsightFace.
    """
    left, top, right, bottom = boxes.T
    areas = (right - left + 1) * (bottom - top + 1)
    remaining = np.arange(len(boxes))
    keep: list[int] = []
    while remaining.size > 0:
        best, others = remaining[0], remaining[1:]
        keep.append(int(best))
        width = np.maximum(0.0, np.minimum(right[best], right[others]) - np.maximum(left[best], left[others]) + 1)
        height = np.maximum(0.0, np.minimum(bottom[best], bottom[others]) - np.maximum(top[best], top[others]) + 1)
        shared = width * height
        remaining = others[shared / (areas[best] + areas[others] - shared) <= threshold]
    return keep
