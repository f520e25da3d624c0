"""Sizes that a Wan model accepts: sides multiples of 16, area bounded, aspect ratio kept."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from likeness_trainer.data.errors import UnusableMediaError

SIDE_MULTIPLE = 16
"""The VAE divides both sides by 8 and the DiT's patches by 2 again."""
MAX_SOURCE_PIXELS = 64_000_000
"""Larger pictures are refused before they are decoded; 8K video has 33 million pixels."""


def target_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Returns (height, width) for a source of this size: never enlarged, at most `max_pixels`, multiples of 16.

    Each side is scaled by the same factor and rounded down. Raises UnusableMediaError where a side would become 0.
    """
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    target = tuple(int(side * scale + 1e-6) // SIDE_MULTIPLE * SIDE_MULTIPLE for side in (height, width))
    if 0 in target:
        raise UnusableMediaError(
            f"has {height}x{width} pixels (height x width), which leaves a side below {SIDE_MULTIPLE} "
            f"within {max_pixels} pixels"
        )
    return target[0], target[1]


def require_source_size(height: int, width: int) -> None:
    """Raises UnusableMediaError for a picture without area or of more than MAX_SOURCE_PIXELS."""
    if height < 1 or width < 1:
        raise UnusableMediaError(f"has {height}x{width} pixels (height x width)")
    if height * width > MAX_SOURCE_PIXELS:
        raise UnusableMediaError(
            f"has {height}x{width} pixels (height x width), allowed are {MAX_SOURCE_PIXELS} in all"
        )


def fill(image_rgb: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Returns uint8 [height, width, 3]: the largest centred part of that aspect ratio, resampled (bicubic).

    `image_rgb: uint8 [H, W, 3]`; an image that has the size already is returned as it is.
    """
    source_height, source_width = image_rgb.shape[:2]
    if (source_height, source_width) == (height, width):
        return image_rgb
    scale = min(source_height / height, source_width / width)
    top, left = (source_height - height * scale) / 2, (source_width - width * scale) / 2
    right, bottom = min(left + width * scale, source_width), min(top + height * scale, source_height)
    box = (max(left, 0.0), max(top, 0.0), right, bottom)
    return np.array(Image.fromarray(image_rgb).resize((width, height), Image.Resampling.BICUBIC, box=box))
