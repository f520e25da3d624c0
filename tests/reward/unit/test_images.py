"""Reference photos of every kind, and files that are none."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from likeness_reward.errors import InvalidImage, LimitExceeded
from likeness_reward.images import decode_image, encode_png

TURNED_RIGHT = 6
ORIENTATION = 0x0112


def encoded(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "PNG"} | options))
    return buffer.getvalue()


def decoded(data: bytes, **options) -> np.ndarray:
    return decode_image(data, what="images[3]", **options)


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces its size and holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"")
    chunks = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, body))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_png_frames_survive_exactly() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    np.testing.assert_array_equal(decoded(encode_png(frame)), frame)


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (8, 6), 77), (77, 77, 77)),
        (Image.new("1", (8, 6), 1), (255, 255, 255)),
        (Image.new("LA", (8, 6), (200, 0)), (0, 0, 0)),
        (Image.new("RGBA", (8, 6), (200, 100, 50, 0)), (0, 0, 0)),
        (Image.new("RGBA", (8, 6), (200, 100, 50, 255)), (200, 100, 50)),
        (Image.new("RGB", (8, 6), (9, 80, 200)).convert("P", palette=Image.Palette.ADAPTIVE), (9, 80, 200)),
        (Image.fromarray(np.full((6, 8), 51400, np.uint16)), (200, 200, 200)),
    ],
    ids=["grey", "bilevel", "grey-transparent", "transparent", "opaque", "palette", "sixteen-bit"],
)
def test_every_kind_of_png_becomes_rgb(image: Image.Image, colour: tuple[int, int, int]) -> None:
    pixels = decoded(encoded(image))
    assert (pixels.shape, pixels.dtype) == ((6, 8, 3), np.uint8)
    assert pixels[3, 4].tolist() == list(colour)


def test_half_transparent_pixels_are_half_as_bright_because_the_ground_is_black() -> None:
    assert decoded(encoded(Image.new("RGBA", (8, 6), (200, 100, 50, 128))))[0, 0].tolist() == [100, 50, 25]


def test_cmyk_becomes_rgb() -> None:
    pixels = decoded(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), format="JPEG", quality=95))
    assert np.abs(pixels[8, 8].astype(int) - (255, 0, 0)).max() < 12


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (40, 20), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 10, 20))  # left edge as stored; turned right it is the top
    exif = Image.Exif()
    exif[ORIENTATION] = TURNED_RIGHT
    pixels = decoded(encoded(image, format="JPEG", quality=95, exif=exif))
    assert pixels.shape == (40, 20, 3)
    assert pixels[:8].min() > 200
    assert pixels[12:].max() < 55


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"images\[3\] is empty"),
        (b"not an image", r"images\[3\] is no JPEG, PNG, WEBP image \(12 bytes\)"),
        (encoded(Image.new("RGB", (8, 6)), format="BMP"), r"images\[3\] is no JPEG"),
        (encoded(Image.effect_noise((64, 64), 50))[:900], r"images\[3\] cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 50), format="JPEG")[:900], r"images\[3\] cannot be decoded"),
        (encoded(Image.new("RGB", (5000, 1))), r"images\[3\] is 5000x1; each side must be at least 2"),
    ],
    ids=["empty", "text", "other-format", "truncated-png", "truncated-jpeg", "sliver"],
)
def test_what_is_no_image_is_named_with_its_index(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidImage, match=reason):
        decoded(data)


@pytest.mark.parametrize("side", [9_000, 30_000, 60_000])
def test_a_bomb_is_refused_by_its_header_before_a_pixel_is_decoded(side: int) -> None:
    with pytest.raises(LimitExceeded, match=r"images\[3\]"):
        decoded(png_header(side, side))


def test_the_limit_is_inclusive() -> None:
    assert decoded(encoded(Image.new("RGB", (8, 6))), max_pixels=48).shape == (6, 8, 3)
    with pytest.raises(LimitExceeded, match="8x6 = 48 pixels; at most 47"):
        decoded(encoded(Image.new("RGB", (8, 6))), max_pixels=47)
