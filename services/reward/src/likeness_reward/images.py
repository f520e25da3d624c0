"""Encoded images to RGB arrays, with every size checked before memory is spent on pixels."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from likeness_reward.errors import InvalidImage, LimitExceeded

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
"""Default limit on width times height."""
LEAST_SIDE = 2


def decode_image(
    data: bytes, *, what: str, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = IMAGE_FORMATS
) -> NDArray[np.uint8]:
    """Returns the RGB pixels uint8 [H, W, 3] of a JPEG, PNG or WebP file, upright, alpha composited on black.

    16 bits are scaled to 8; greyscale, palette and CMYK are converted; of an animation the first frame is taken.
    `what` names the image in errors ("images[3]"). Raises InvalidImage, or LimitExceeded before decoding.
    """
    if not data:
        raise InvalidImage(f"{what} is empty", what=what)
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            check_size(image.size, what, max_pixels)
            return pixels_of(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise LimitExceeded(f"{what}: {error}", what=what, limit=max_pixels) from error
    except UnidentifiedImageError as error:
        message = f"{what} is no {', '.join(formats)} image ({len(data)} bytes)"
        raise InvalidImage(message, what=what) from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow's decoders raise on damaged files
        raise InvalidImage(f"{what} cannot be decoded: {error}", what=what) from error


def encode_png(frame_rgb: NDArray[np.uint8]) -> bytes:
    """Returns the PNG file (lossless, least compression) of RGB pixels uint8 [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(frame_rgb).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def check_size(size: tuple[int, int], what: str, max_pixels: int) -> None:
    """Raises InvalidImage for a sliver and LimitExceeded for more pixels than allowed. `size` is (width, height)."""
    width, height = size
    if min(size) < LEAST_SIDE:
        raise InvalidImage(f"{what} is {width}x{height}; each side must be at least {LEAST_SIDE}", what=what)
    if width * height > max_pixels:
        message = f"{what} is {width}x{height} = {width * height} pixels; at most {max_pixels} are allowed"
        raise LimitExceeded(message, what=what, limit=max_pixels)


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """Returns the RGB pixels uint8 [H, W, 3] of an image in any of Pillow's modes."""
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64)
        grey = np.clip((wide + 128) // 257, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        black = Image.new("RGBA", colour.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, colour)
    return np.ascontiguousarray(np.asarray(image.convert("RGB"), np.uint8))
