"""Writers of small videos whose every pixel is known: lossless codecs, flat colours, chosen timestamps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

Writer = Callable[..., Path]


def numbered_frames(count: int, height: int = 32, width: int = 48) -> list[np.ndarray]:
    """Returns frames whose grey value is 10 x their number, so a decoded frame tells which one it was."""
    return [np.full((height, width, 3), 10 * index, np.uint8) for index in range(count)]


@pytest.fixture
def write_video() -> Writer:
    """Returns a function that writes frames (uint8 [H, W, 3] or [H, W, 4]) losslessly and returns the path."""

    def write(
        path: Path,
        frames: Sequence[np.ndarray],
        rate: int = 16,
        times: Sequence[Fraction] | None = None,
        codec: str = "libx264rgb",
        pixel_format: str = "rgb24",
    ) -> Path:
        time_base = Fraction(1, 240)
        options = {"crf": "0", "bf": "0"} if codec == "libx264rgb" else {}
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=rate, options=options)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = pixel_format
            if times is not None:
                stream.codec_context.time_base = time_base
            for index, array in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(array, format="rgb24" if array.shape[2] == 3 else "rgba")
                if times is not None:
                    frame.pts, frame.time_base = int(times[index] / time_base), time_base
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture
def write_metadata(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that writes metadata.csv next to the media and returns its path."""

    def write(text: str, name: str = "metadata.csv") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
