"""Local videos, folders of frames and images."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from likeness_reward.errors import UnreadableVideo
from likeness_reward.images import encode_png
from likeness_reward.videos import FOLDER_RATE, frame_rate, read_video


def write_video(path: Path, colours_rgb: list[tuple[int, int, int]]) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 16, (64, 48))
    assert writer.isOpened()
    for colour in colours_rgb:
        writer.write(np.full((48, 64, 3), colour[::-1], np.uint8))
    writer.release()


def test_a_video_is_read_in_rgb_and_in_order(tmp_path: Path) -> None:
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    write_video(tmp_path / "clip.mp4", colours)
    frames = read_video(tmp_path / "clip.mp4")
    assert frames.shape == (3, 48, 64, 3)
    np.testing.assert_allclose(frames.mean(axis=(1, 2)), colours, atol=12)


def test_a_folder_is_read_by_name_and_an_image_is_a_video_of_one_frame(tmp_path: Path) -> None:
    for name, value in (("b.png", 2), ("a.png", 1), ("notes.txt", 0)):
        (tmp_path / name).write_bytes(encode_png(np.full((4, 6, 3), value, np.uint8)))
    assert read_video(tmp_path)[:, 0, 0, 0].tolist() == [1, 2]
    assert read_video(tmp_path / "b.png").shape == (1, 4, 6, 3)


@pytest.mark.parametrize("name", ["missing.mp4", "text.mp4", "empty.mp4", "text.png", "folder"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnreadableVideo, match=name):
        read_video(tmp_path / name)


def test_frames_of_different_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode_png(np.zeros((4, 6, 3), np.uint8)))
    (tmp_path / "b.png").write_bytes(encode_png(np.zeros((6, 4, 3), np.uint8)))
    with pytest.raises(UnreadableVideo, match="frame 1 is 4x6, frame 0 is 6x4"):
        read_video(tmp_path)


CONTAINERS = [
    ("mp4", "libx264", "yuv444p"),
    ("mov", "libx264", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("gif", "gif", "rgb8"),
]


@pytest.mark.parametrize(("suffix", "codec", "pixels"), CONTAINERS)
def test_mp4_mov_webm_and_gif_are_read_with_their_rate(tmp_path: Path, suffix: str, codec: str, pixels: str) -> None:
    av = pytest.importorskip("av", reason="PyAV, which writes the videos of this test, is not installed")
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    path = tmp_path / f"clip.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        for colour in colours:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), colour, np.uint8), format="rgb24")
            container.mux(stream.encode(frame.reformat(format=pixels)))
        container.mux(stream.encode(None))
    frames = read_video(path)
    assert frames.shape == (3, 48, 64, 3)
    np.testing.assert_allclose(frames.mean(axis=(1, 2)), colours, atol=40)
    assert frame_rate(path) == pytest.approx(10, rel=0.01)


def test_a_folder_has_the_rate_of_wan(tmp_path: Path) -> None:
    assert frame_rate(tmp_path) == FOLDER_RATE
