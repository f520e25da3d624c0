"""The alignment warp as torch computes it, so that its adjoint takes gradients of crops back to frames."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


def aligned_crop(frame: Tensor, frame_from_crop: NDArray[np.float64], size: int) -> Tensor:
    """Returns the aligned face [3, size, size] of a frame [3, H, W], H and W above 1; 0 outside the frame.

    Bilinear like OpenCV's warpAffine, which samples the frame at ``frame_from_crop (x, y, 1)`` for the pixel (x, y) of
    the crop. Linear in the frame, so that backpropagating a gradient of the crop applies the adjoint.

    Args:
        frame_from_crop: float64 [2, 3], crop pixels to frame pixels.
    """
    height, width = frame.shape[1:]
    axis = np.arange(size, dtype=np.float64)
    x, y = np.meshgrid(axis, axis)
    places = np.stack([x, y, np.ones_like(x)], axis=-1) @ frame_from_crop.T
    unit = 2.0 * places / np.array([width - 1, height - 1]) - 1.0
    grid = torch.from_numpy(unit).to(frame.device, frame.dtype)
    return F.grid_sample(frame[None], grid[None], mode="bilinear", padding_mode="zeros", align_corners=True)[0]
