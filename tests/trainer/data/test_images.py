"""Every kind of picture becomes upright 8-bit RGB; sizes follow one rule."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from likeness_trainer.data.errors import UnusableMediaError
from likeness_trainer.data.images import on_black, read_image, to_rgb
from likeness_trainer.data.sizes import fill, target_size


def saved(tmp_path, image, name, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def test_rgb_is_read_exactly_and_in_rgb_order(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    read = read_image(saved(tmp_path, Image.fromarray(pixels), "i.png"))
    assert read.dtype == np.uint8
    assert np.array_equal(read, pixels)


@pytest.mark.parametrize(
    ("orientation", "corner"),
    [(1, (0, 0)), (2, (0, -1)), (3, (-1, -1)), (4, (-1, 0)), (5, (0, 0)), (6, (0, -1)), (7, (-1, -1)), (8, (-1, 0))],
)
def test_exif_orientation_is_applied(tmp_path, orientation, corner):
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[0, 0] = 255  # stored top left; EXIF says where it is seen
    exif = Image.Exif()
    exif[0x0112] = orientation
    read = read_image(saved(tmp_path, Image.fromarray(pixels), "i.png", exif=exif))
    assert read.shape == ((20, 30, 3) if orientation <= 4 else (30, 20, 3))
    assert tuple(read[corner]) == (255, 255, 255)
    assert int(read.sum()) == 3 * 255


def test_transparency_lies_on_black_and_hidden_colour_does_not_shine_through(tmp_path):
    pixels = np.full((4, 4, 4), (200, 100, 50, 0), np.uint8)
    pixels[0, 0, 3] = 255
    pixels[1, 1, 3] = 128
    read = read_image(saved(tmp_path, Image.fromarray(pixels), "i.png"))
    assert tuple(read[0, 0]) == (200, 100, 50)
    assert tuple(read[1, 1]) == (100, 50, 25)
    assert tuple(read[3, 3]) == (0, 0, 0)
    assert np.array_equal(read, on_black(pixels)), "images and videos composite alike"


def test_palette_with_transparent_entry(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    read = read_image(saved(tmp_path, image, "i.png", transparency=0))
    assert read.tolist() == [[[0, 0, 0], [40, 50, 60]]]


def test_16_bit_grey_is_scaled_not_clipped(tmp_path):
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    read = read_image(saved(tmp_path, Image.fromarray(grey), "i.png"))
    assert read[0, :, 0].tolist() == [0, 1, 128, 255]  # v / 257
    assert np.array_equal(read[..., 0], read[..., 2])


@pytest.mark.parametrize(("mode", "value", "expected"), [("L", 77, 77), ("1", 1, 255), ("LA", (77, 255), 77)])
def test_grey_modes_become_three_equal_channels(mode, value, expected):
    assert to_rgb(Image.new(mode, (2, 2), value)).tolist() == [[[expected] * 3] * 2] * 2


def test_cmyk_becomes_rgb(tmp_path):
    read = read_image(saved(tmp_path, Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "i.tif"))
    assert tuple(read[0, 0]) == (255, 0, 0)  # no cyan, full magenta and yellow: red


def test_pictures_of_unknown_range_are_refused():
    with pytest.raises(UnusableMediaError, match="floating-point"):
        to_rgb(Image.new("F", (2, 2), 0.5))
    with pytest.raises(UnusableMediaError, match="from 70000 to 70000, allowed are 0 to 65535"):
        to_rgb(Image.new("I", (2, 2), 70000))


def test_what_is_no_image_has_a_named_reason(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "png")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:2000])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_bytes(b"hello")
    saved(tmp_path, Image.new("1", (40000, 2000)), "bomb.png")
    reasons = {
        "cut.png": "is no readable image: ",
        "empty.png": "is empty (0 bytes)",
        "text.png": "is no readable image: no known image format",
        "bomb.png": "has 2000x40000 pixels (height x width), allowed are 64000000 in all",
        "missing.png": "does not exist",
    }
    for name, reason in reasons.items():
        with pytest.raises(UnusableMediaError) as caught:
            read_image(tmp_path / name)
        assert str(caught.value).startswith(reason), name


@pytest.mark.parametrize(
    ("source", "max_pixels", "expected"),
    [
        ((480, 480), 480 * 480, (480, 480)),
        ((64, 64), 480 * 480, (64, 64)),  # never enlarged
        ((70, 95), 480 * 480, (64, 80)),  # rounded down to multiples of 16
        ((720, 1280), 480 * 480, (352, 640)),  # scale .5: 360 -> 352
        ((1280, 720), 480 * 480, (640, 352)),
        ((1000, 1000), 480 * 480, (480, 480)),
        ((16, 16), 256, (16, 16)),
    ],
)
def test_target_size(source, max_pixels, expected):
    assert target_size(*source, max_pixels) == expected


def test_target_size_is_always_allowed():
    generator = np.random.default_rng(0)
    for height, width, max_pixels in generator.integers([200, 200, 4096], [3000, 3000, 500000], (500, 3)):
        target_height, target_width = target_size(int(height), int(width), int(max_pixels))
        assert target_height % 16 == target_width % 16 == 0
        assert target_height * target_width <= max_pixels


@pytest.mark.parametrize("source", [(15, 400), (5000, 1), (1, 5000), (20000, 20)])
def test_a_side_that_would_vanish_is_named(source):
    with pytest.raises(UnusableMediaError, match=rf"has {source[0]}x{source[1]} pixels .* a side below 16"):
        target_size(*source, 480 * 480)


def test_fill_cuts_the_longer_side_evenly():
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, 16:48] = 200  # the centred square
    assert np.array_equal(fill(picture, 32, 32), np.full((32, 32, 3), 200, np.uint8))
    assert np.array_equal(fill(picture.transpose(1, 0, 2), 32, 32), np.full((32, 32, 3), 200, np.uint8))
    assert fill(picture, 32, 64) is picture


def test_fill_averages_when_it_shrinks():
    checkerboard = (np.indices((64, 64)).sum(axis=0) % 2 * 200).astype(np.uint8)[..., None].repeat(3, axis=2)
    shrunk = fill(checkerboard, 16, 16).astype(int)
    assert abs(shrunk[4:-4, 4:-4].mean() - 100) < 3, "without antialiasing every fourth pixel would be 0 or 200"
    assert shrunk[4:-4, 4:-4].std() < 10
