"""Aligned 112x112 face crops from five landmarks, as ArcFace networks expect them."""

import cv2
import numpy as np
from numpy.typing import NDArray

from likeness_toyworld.face_pack.networks import CROP_SIDE
from likeness_toyworld.face_pack.pictures import Picture, Points

TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]], np.float32
)
"""Where InsightFace puts the five landmarks in a 112x112 crop, pixels (x, y)."""


def similarity(landmarks: Points) -> NDArray[np.float64]:
    """float64 [2, 3]: the least-squares scaling, rotation and shift of landmarks [5, 2] onto TEMPLATE.

    In the plane, with points as complex numbers, that fit is an ordinary regression with one complex slope.
    """
    source = landmarks[:, 0].astype(np.float64) + 1j * landmarks[:, 1]
    target = TEMPLATE[:, 0].astype(np.float64) + 1j * TEMPLATE[:, 1]
    centered = source - source.mean()
    slope = np.vdot(centered, target - target.mean()) / np.vdot(centered, centered)
    shift = target.mean() - slope * source.mean()
    return np.array([[slope.real, -slope.imag, shift.real], [slope.imag, slope.real, shift.imag]])


def align(picture: Picture, landmarks: Points) -> Picture:
    """uint8 [112, 112, 3]: the picture's face at its standard place; black beyond the picture, as in InsightFace."""
    crop: Picture = cv2.warpAffine(picture, similarity(landmarks), (CROP_SIDE, CROP_SIDE), borderValue=0.0)
    return crop
