"""Video files as upright RGB frames at a steady rate, whatever the file's own rate, rotation and pixel format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from likeness_trainer.data.errors import UnusableMediaError
from likeness_trainer.data.images import on_black, require_file
from likeness_trainer.data.sizes import require_source_size

Frame = TypeVar("Frame")


def read_frames(path: Path, fps: int, num_frames: int) -> Iterator[NDArray[np.uint8]]:
    """Yields up to `num_frames` upright frames, each uint8 RGB [H, W, 3], at `fps` frames a second from the start.

    A frame that the steady rate shows twice is yielded twice as the same array. Raises UnusableMediaError with the
    reason where the file is no readable video.
    """
    previous: av.VideoFrame | None = None
    picture = np.empty((0, 0, 3), np.uint8)
    for frame in _steady_frames(path, fps, num_frames):
        if frame is not previous:
            picture = _upright_rgb(frame)
            previous = frame
        yield picture


def probe(path: Path, fps: int, num_frames: int) -> tuple[int, int, int]:
    """Returns (frames at `fps`, counted up to `num_frames`; height; width of the upright first frame), by decoding.

    The numbers that a file tells about itself are not believed: a truncated file keeps its header.
    """
    count, height, width = 0, 0, 0
    for frame in _steady_frames(path, fps, num_frames):
        if count == 0:
            height, width = _upright_rgb(frame).shape[:2]
        count += 1
    if count == 0:
        raise UnusableMediaError("holds no frame")
    return count, height, width


def steady_rate(timed: Iterable[tuple[Fraction, Fraction, Frame]], fps: int) -> Iterator[Frame]:
    """Yields the frames of (time in s from the start, duration in s, frame) triples resampled to `fps`.

    As ffmpeg's `fps` filter with rounding "near": a frame moves to the nearest tick, the last one that moves to a tick
    is shown there, and a tick without one repeats the frame before. Unlike there, a last frame shorter than half a
    tick is still shown if it covers its tick.
    """
    shown: Frame | None = None
    tick, first_tick = 0, 0
    end = Fraction(0)
    for time, duration, frame in timed:
        first_tick = _nearest(time * fps)
        while shown is not None and tick < first_tick:
            yield shown
            tick += 1
        shown, end = frame, time + duration
    while shown is not None and (tick < _nearest(end * fps) or first_tick == tick < end * fps):
        yield shown
        tick += 1


def _nearest(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


def _steady_frames(path: Path, fps: int, num_frames: int) -> Iterator[av.VideoFrame]:
    """Yields the decoder's frames at `fps`, at most `num_frames`; decoding stops when they are complete."""
    require_file(path)
    try:
        # A playlist inside the data must not reach for other addresses.
        with av.open(f"file:{path}", options={"protocol_whitelist": "file"}) as container:
            if not container.streams.video:
                raise UnusableMediaError("holds no video stream")
            for count, frame in enumerate(steady_rate(_timed_frames(container, fps), fps), start=1):
                yield frame
                if count == num_frames:
                    return
    except FFmpegError as error:
        raise UnusableMediaError(f"is no readable video: {error.strerror}") from error


def _timed_frames(
    container: av.container.InputContainer, fps: int
) -> Iterator[tuple[Fraction, Fraction, av.VideoFrame]]:
    """Yields (time from the first frame, duration, frame), both in exact seconds."""
    stream = container.streams.video[0]
    period = Fraction(1) / (stream.average_rate or stream.guessed_rate or fps)
    start: Fraction | None = None
    time = -period
    for index, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise UnusableMediaError(f"is damaged at frame {index}")
        require_source_size(frame.height, frame.width)
        stamp = time + period if frame.pts is None else frame.pts * Fraction(frame.time_base)
        start = stamp if start is None else start
        time = stamp
        duration = frame.duration * Fraction(frame.time_base) if frame.duration else period
        yield stamp - start, duration, frame


def _upright_rgb(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """Returns uint8 RGB [H, W, 3] with transparency on black, turned as the file's display matrix says."""
    if any(component.is_alpha for component in frame.format.components) or frame.format.has_palette:
        picture = on_black(frame.to_ndarray(format="rgba"))
    else:
        picture = frame.to_ndarray(format="rgb24")
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return picture
    return turn(picture, np.frombuffer(bytes(matrix), np.int32))


def turn(picture: NDArray[np.uint8], matrix: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Returns `picture: uint8 [H, W, 3]` under FFmpeg's display matrix, rounded to quarter turns and mirrors.

    `matrix: int32 [9]`, 16.16 fixed point, rows (a, b, u), (c, d, v), (x, y, w): a pixel (x, y) is shown at
    (a x + c y, b x + d y).
    """
    a, b, _, c, d = (int(value) for value in matrix[:5])
    if abs(a) + abs(d) >= abs(b) + abs(c):
        turned = picture[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    else:
        turned = picture.transpose(1, 0, 2)[:: -1 if b < 0 else 1, :: -1 if c < 0 else 1]
    return np.ascontiguousarray(turned)
