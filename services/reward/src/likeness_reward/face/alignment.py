"""The similarity that takes five landmarks to where ArcFace expects them (Umeyama, IEEE TPAMI 13(4), 1991)."""

import cv2
import numpy as np
from numpy.typing import NDArray

CROP_SIZE = 112
"""Side of an aligned crop at which CROP_LANDMARKS are given, pixels."""

CROP_LANDMARKS = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]], np.float64
)
"""Eyes, nose, mouth corners (x, y) in a 112x112 crop: InsightFace's ArcFace template."""

LEAST_SPREAD = 1e-3
"""Root mean square distance from their centre, in pixels, below which landmarks count as one point."""


class AlignmentImpossible(ValueError):
    """Landmarks that are not finite or coincide."""


def estimate_similarity(landmarks: NDArray[np.floating], size: int = CROP_SIZE) -> NDArray[np.float64]:
    """Returns the 2x3 matrix, frame pixels to crop pixels, that fits the landmarks [5, 2] best by least squares.

    Umeyama's Eq. 39 to 43: rotation, one scale and a translation, never a reflection. `size` is the side of the crop.
    Raises AlignmentImpossible.
    """
    source = np.asarray(landmarks, np.float64)
    if source.shape != CROP_LANDMARKS.shape or not np.isfinite(source).all():
        raise AlignmentImpossible(f"landmarks are not {CROP_LANDMARKS.shape} finite numbers: {source.tolist()}")
    target = CROP_LANDMARKS * (size / CROP_SIZE)
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    source_centred, target_centred = source - source_mean, target - target_mean
    variance = float(np.mean(np.sum(source_centred**2, axis=1)))
    if variance < LEAST_SPREAD**2:
        raise AlignmentImpossible(f"landmarks coincide: {source.tolist()}")
    left, singular, right = np.linalg.svd(target_centred.T @ source_centred / len(source))
    signs = np.array([1.0, 1.0 if np.linalg.det(left) * np.linalg.det(right) >= 0 else -1.0])
    rotation = left @ np.diag(signs) @ right
    scale = float(singular @ signs) / variance
    translation = target_mean - scale * rotation @ source_mean
    matrix = np.hstack([scale * rotation, translation[:, None]])
    if scale <= 0 or not np.isfinite(matrix).all():
        raise AlignmentImpossible(f"landmarks admit no similarity: {source.tolist()}")
    return matrix


def align_face(frame: NDArray[np.uint8], landmarks: NDArray[np.floating], size: int = CROP_SIZE) -> NDArray[np.uint8]:
    """Returns the crop uint8 [size, size, 3] of a frame [H, W, 3]; black outside it. Raises AlignmentImpossible."""
    matrix = estimate_similarity(landmarks, size)
    return cv2.warpAffine(frame, matrix, (size, size), borderValue=0.0).astype(np.uint8, copy=False)
