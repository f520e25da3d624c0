"""Still images as upright RGB: EXIF orientation applied, every colour mode converted, transparency on black."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from likeness_trainer.data.errors import UnusableMediaError
from likeness_trainer.data.sizes import require_source_size

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})

_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def read_image(path: Path) -> NDArray[np.uint8]:
    """Returns uint8 RGB [H, W, 3] of the image at `path`, upright.

    Raises UnusableMediaError with the reason: no such file, a folder, empty, no image, truncated, too many pixels.
    """
    require_file(path)
    try:
        with Image.open(path) as image:
            require_source_size(image.height, image.width)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except UnusableMediaError:
        raise
    except _UNREADABLE as error:
        reason = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)
        raise UnusableMediaError(f"is no readable image: {reason}") from error


def require_file(path: Path) -> None:
    """Raises UnusableMediaError where `path` is no file, cannot be opened or has no bytes."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableMediaError("does not exist") from error
    except OSError as error:
        raise UnusableMediaError(f"cannot be opened: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise UnusableMediaError("is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise UnusableMediaError("is no regular file")
    if status.st_size == 0:
        raise UnusableMediaError("is empty (0 bytes)")


def to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Returns uint8 RGB [H, W, 3]; 16-bit grey is scaled, transparency lies on black, CMYK and palettes are converted.

    Raises UnusableMediaError for floating-point images and 32-bit integers beyond 16 bits: their range is unknown.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit_grey(np.asarray(image))
    if image.mode == "F":
        raise UnusableMediaError("is a floating-point image, whose range is unknown; convert it to 8 or 16 bits")
    if image.has_transparency_data:
        foreground = image.convert("RGBA")
        black = Image.new("RGBA", foreground.size, (0, 0, 0, 255))
        return np.array(Image.alpha_composite(black, foreground).convert("RGB"))
    return np.array(image.convert("RGB"))


def on_black(frame_rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns uint8 RGB [H, W, 3] of `frame_rgba: uint8 [H, W, 4]` (straight alpha) over black."""
    alpha = frame_rgba[..., 3:].astype(np.uint16)
    return ((frame_rgba[..., :3] * alpha + 127) // 255).astype(np.uint8)


def _from_16_bit_grey(grey: NDArray[np.generic]) -> NDArray[np.uint8]:
    wide = grey.astype(np.int64)
    if wide.min() < 0 or wide.max() > 65535:
        raise UnusableMediaError(f"has grey values from {wide.min()} to {wide.max()}, allowed are 0 to 65535")
    return np.repeat(((wide * 255 + 32767) // 65535).astype(np.uint8)[..., None], 3, axis=2)
