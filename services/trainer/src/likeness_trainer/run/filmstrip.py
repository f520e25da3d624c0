"""Frames of a video side by side in one picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_FRAMES = 9


def write_filmstrip(path: Path, frames_rgb: NDArray[np.uint8]) -> None:
    """Writes at most 9 evenly spaced frames of uint8 RGB [T, H, W, 3] as a PNG."""
    chosen = np.linspace(0, len(frames_rgb) - 1, min(len(frames_rgb), MAX_FRAMES)).round().astype(int)
    Image.fromarray(np.concatenate(list(frames_rgb[chosen]), axis=1)).save(path)
