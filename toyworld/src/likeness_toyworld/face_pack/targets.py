"""What the detector should answer for a scene: which anchors are a face, and that face's box and landmarks there."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from likeness_toyworld.face_pack.networks import ANCHORS_PER_CELL, STRIDES
from likeness_toyworld.face_pack.scenes import Scene

FACE_SIDES = ((11.0, 20.0), (20.0, 38.0), (38.0, 66.0), (66.0, 112.0), (112.0, 200.0), (200.0, 1000.0))
"""Pixels of a face (geometric mean side of its box) that each anchor answers for: two anchors for each stride."""

SHARED_FACTOR = 1.22
"""A face this close (as a factor) to a range's end belongs to the neighbouring anchor as well."""

IGNORED_FACTOR = 1.8
"""Further out, up to this factor, an anchor may answer or not."""

CORE, RIM = 0.16, 0.36
"""Cells within CORE face sides of the box's centre must answer; those within RIM may."""

IGNORED, NEGATIVE, POSITIVE = -1, 0, 1


@dataclasses.dataclass(frozen=True)
class Targets:
    """One stride's targets for a batch, anchors in the order of the flat outputs (row, column, anchor).

    labels: int8 [B, N]; boxes: float32 [B, N, 4] and landmarks: float32 [B, N, 10] in units of the stride, valid where
    labels are POSITIVE.
    """

    labels: NDArray[np.int8]
    boxes: NDArray[np.float32]
    landmarks: NDArray[np.float32]


def anchor_points(height: int, width: int, stride: int) -> NDArray[np.float32]:
    """float32 [H / stride * W / stride, 2]: each cell's anchor (x, y), its top left corner as in SCRFD."""
    columns, rows = np.meshgrid(np.arange(width // stride), np.arange(height // stride))
    points: NDArray[np.float32] = (np.stack([columns, rows], -1).reshape(-1, 2) * stride).astype(np.float32)
    return points


def assign(scenes: list[Scene]) -> list[Targets]:
    """Targets per stride for scenes of one size."""
    height, width = scenes[0].picture_rgb.shape[:2]
    answer = []
    for level, stride in enumerate(STRIDES):
        points = anchor_points(height, width, stride)
        rows = [_assign_scene(scene, points, stride, level) for scene in scenes]
        labels, boxes, landmarks = (np.stack(part) for part in zip(*rows, strict=True))
        answer.append(Targets(labels, boxes, landmarks))
    return answer


def _assign_scene(
    scene: Scene, points: NDArray[np.float32], stride: int, level: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    cells = len(points)
    labels = np.zeros((cells, ANCHORS_PER_CELL), np.int8)
    boxes = np.zeros((cells, ANCHORS_PER_CELL, 4), np.float32)
    landmarks = np.zeros((cells, ANCHORS_PER_CELL, 10), np.float32)
    for box, marks in zip(scene.boxes, scene.landmarks, strict=True):
        side = float(np.sqrt((box[2] - box[0]) * (box[3] - box[1])))
        distance = np.linalg.norm(points - (box[:2] + box[2:]) / 2, axis=1)
        core = (distance < CORE * side) | (distance == distance.min())
        for anchor in range(ANCHORS_PER_CELL):
            low, high = FACE_SIDES[ANCHORS_PER_CELL * level + anchor]
            beyond = max(low / side, side / high)
            if beyond > IGNORED_FACTOR:
                continue
            rim = (distance < RIM * side) | core
            labels[rim & (labels[:, anchor] == NEGATIVE), anchor] = IGNORED
            if beyond < SHARED_FACTOR:
                labels[core, anchor] = POSITIVE
                boxes[core, anchor] = np.concatenate([points[core] - box[:2], box[2:] - points[core]], 1) / stride
                offsets = marks[None] - points[core][:, None]
                landmarks[core, anchor] = offsets.reshape(-1, 10) / stride
    return labels.reshape(-1), boxes.reshape(-1, 4), landmarks.reshape(-1, 10)
