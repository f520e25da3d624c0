"""Videos come out upright, at the steady rate, in true colours; what cannot be read is a named reason."""

from __future__ import annotations

import os
import subprocess
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest

from likeness_trainer.data.errors import UnusableMediaError
from likeness_trainer.data.video import probe, read_frames, steady_rate

from .conftest import numbered_frames


def shown_numbers(path, fps, num_frames=1000):
    return [int(frame[0, 0, 0]) // 10 for frame in read_frames(path, fps, num_frames)]


def test_a_video_of_the_wanted_rate_is_passed_through_exactly(tmp_path, write_video):
    frames = numbered_frames(9)
    frames[3][:, :24] = (200, 30, 60)
    path = write_video(tmp_path / "v.mp4", frames)
    decoded = list(read_frames(path, 16, 9))
    assert np.array_equal(np.stack(decoded), np.stack(frames))
    assert decoded[0].dtype == np.uint8


def test_decoding_stops_at_the_wanted_number(tmp_path, write_video):
    assert shown_numbers(write_video(tmp_path / "v.mp4", numbered_frames(9)), 16, 5) == [0, 1, 2, 3, 4]


def test_half_rate_shows_each_frame_twice_and_double_rate_drops_each_second(tmp_path, write_video):
    slow = write_video(tmp_path / "slow.mp4", numbered_frames(4), rate=8)
    # At 16 a second frame n lasts from tick 2n to 2n+2.
    assert shown_numbers(slow, 16) == [0, 0, 1, 1, 2, 2, 3, 3]
    fast = write_video(tmp_path / "fast.mp4", numbered_frames(8), rate=32)
    # Frame n lies at tick n/2, halves round up: ticks 0, 1, 1, 2, 2, 3, 3, 4; the later of two is shown.
    assert shown_numbers(fast, 16) == [0, 2, 4, 6]


def test_a_varying_rate_is_resampled_by_time(tmp_path, write_video):
    # Frames at ticks 0, 1, 8, 9 and 10 of 1/16 s: between 1 and 8 the second one stands still.
    times = [Fraction(tick, 16) for tick in (0, 1, 8, 9, 10)]
    path = write_video(tmp_path / "v.mp4", numbered_frames(5), times=times, rate=240)
    assert shown_numbers(path, 16)[:10] == [0, 1, 1, 1, 1, 1, 1, 1, 2, 3]


def test_a_start_time_that_is_not_zero_is_taken_as_the_start(tmp_path, write_video):
    times = [Fraction(10) + Fraction(index, 16) for index in range(5)]
    path = write_video(tmp_path / "v.mkv", numbered_frames(5), times=times, rate=240)
    assert shown_numbers(path, 16)[:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rate", [10, 12, 24, 25, 30, 48, 60])
def test_resampling_equals_ffmpegs_fps_filter(tmp_path, write_video, rate):
    path = write_video(tmp_path / "v.mp4", numbered_frames(25), rate=rate)
    with av.open(str(path)) as container:
        graph = av.filter.Graph()
        stream = container.streams.video[0]
        source, limit, sink = graph.add_buffer(template=stream), graph.add("fps", "16"), graph.add("buffersink")
        source.link_to(limit)
        limit.link_to(sink)
        graph.configure()
        for frame in container.decode(stream):
            graph.push(frame)
        graph.push(None)
        expected = []
        while True:
            try:
                expected.append(int(graph.pull().to_ndarray(format="rgb24")[0, 0, 0]) // 10)
            except (av.error.EOFError, av.error.BlockingIOError):
                break
    shown = shown_numbers(path, 16)
    assert shown[: len(expected)] == expected
    assert shown[len(expected) :] in ([], [24]), "only the very last frame may be added"


def test_a_last_frame_that_is_hardly_shown_is_not_lost():
    timed = [(Fraction(tick, 16), Fraction(1, 1000), tick) for tick in range(5)]
    assert list(steady_rate(timed, 16)) == [0, 1, 2, 3, 4]
    assert list(steady_rate([(Fraction(0), Fraction(1, 1000), "only")], 16)) == ["only"]
    assert list(steady_rate([], 16)) == []


@pytest.mark.parametrize(
    ("options", "expected_corner", "expected_shape"),
    [
        # The green mark is in the top left corner as stored; ffmpeg turns anticlockwise.
        (["-display_rotation", "90"], "bottom left", (48, 32)),
        (["-display_rotation", "180"], "bottom right", (32, 48)),
        (["-display_rotation", "270"], "top right", (48, 32)),
        (["-display_hflip"], "top right", (32, 48)),
        (["-display_vflip"], "bottom left", (32, 48)),
        (["-display_rotation", "90", "-display_hflip"], "bottom right", (48, 32)),
        (["-display_rotation", "270", "-display_hflip"], "top left", (48, 32)),
    ],
)
def test_rotation_metadata_is_applied(tmp_path, write_video, options, expected_corner, expected_shape):
    green = (20, 200, 40)
    frames = [np.full((32, 48, 3), (200, 30, 60), np.uint8) for _ in range(5)]
    for frame in frames:
        frame[:8, :8] = green
    stored = write_video(tmp_path / "stored.mp4", frames)
    turned = tmp_path / "turned.mp4"
    program = imageio_ffmpeg.get_ffmpeg_exe()
    subprocess.run([program, "-v", "error", *options, "-i", stored, "-c", "copy", turned], check=True)
    frame = next(read_frames(turned, 16, 1))
    corners = {"top left": frame[2, 2], "top right": frame[2, -3]}
    corners |= {"bottom left": frame[-3, 2], "bottom right": frame[-3, -3]}
    assert frame.shape[:2] == expected_shape
    assert [name for name, pixel in corners.items() if tuple(pixel) == green] == [expected_corner]
    assert probe(turned, 16, 5) == (5, *expected_shape)
    # ffmpeg itself, which turns pictures on its own, says the same.
    subprocess.run([program, "-v", "error", "-i", turned, "-frames:v", "1", tmp_path / "o.png"], check=True)
    with av.open(str(tmp_path / "o.png")) as container:
        assert np.array_equal(next(container.decode(video=0)).to_ndarray(format="rgb24"), frame)


def test_transparency_lies_on_black(tmp_path, write_video):
    frame = np.zeros((32, 48, 4), np.uint8)
    frame[:] = (200, 100, 50, 128)
    frame[:, 24:, 3] = 0
    path = write_video(tmp_path / "v.mov", [frame] * 5, codec="qtrle", pixel_format="argb")
    decoded = next(read_frames(path, 16, 1))
    assert tuple(decoded[0, 0]) == (100, 50, 25)  # 200 * 128 / 255 = 100.4, 50.2, 25.1
    assert tuple(decoded[0, 40]) == (0, 0, 0)


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p", "yuv420p10le", "gray"])
def test_other_pixel_formats_keep_their_colours(tmp_path, write_video, pixel_format):
    colour = (90, 90, 90) if pixel_format == "gray" else (200, 30, 60)
    frames = [np.full((32, 48, 3), colour, np.uint8)] * 5
    path = write_video(tmp_path / "v.mkv", frames, codec="ffv1", pixel_format=pixel_format)
    decoded = next(read_frames(path, 16, 1)).astype(int)
    assert np.abs(decoded - colour).max() <= 4, "YUV rounding only; swapped channels would differ by 140"


def test_a_path_with_a_colon_is_a_file_and_not_a_protocol(tmp_path, write_video, monkeypatch):
    write_video(tmp_path / "v.mp4", numbered_frames(5)).rename(tmp_path / "http:v.mp4")
    monkeypatch.chdir(tmp_path)
    assert probe(Path("http:v.mp4"), 16, 5) == (5, 32, 48)


def _sound_only(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_what_is_no_video_has_a_named_reason(tmp_path, write_video):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "text.mp4").write_bytes(b"not a video at all")
    (tmp_path / "folder.mp4").mkdir()
    _sound_only(tmp_path / "sound.mkv")
    whole = write_video(tmp_path / "whole.mp4", numbered_frames(9)).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe.mp4")
    reasons = {
        "missing.mp4": "does not exist",
        "whole.mp4/inside.mp4": "does not exist",
        "x" * 300 + ".mp4": "cannot be opened: File name too long",
        "empty.mp4": "is empty (0 bytes)",
        "folder.mp4": "is a folder",
        "pipe.mp4": "is no regular file",
        "noise.mp4": "is no readable video: Invalid data found",
        "text.mp4": "is no readable video: Invalid data found",
        "cut.mp4": "is no readable video: Invalid data found",
        "sound.mkv": "holds no video stream",
    }
    for name, reason in reasons.items():
        with pytest.raises(UnusableMediaError) as caught:
            probe(tmp_path / name, 16, 9)
        assert str(caught.value).startswith(reason), name


def test_a_file_cut_off_after_its_header_has_fewer_frames(tmp_path, write_video):
    noise = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    whole = write_video(tmp_path / "whole.mkv", list(noise)).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) * 2 // 3])
    assert 0 < probe(tmp_path / "cut.mkv", 16, 9)[0] < 9
