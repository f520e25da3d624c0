"""A video as TensorBoard shows it: an animated GIF in the place of a picture.

`SummaryWriter.add_video` does the same through moviepy, which brings ffmpeg; Pillow is here already.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary

LONGEST_SIDE = 256
"""Pixels of the longer side that a video is scaled down to: event files are read as a whole."""


def video_summary(tag: str, frames_rgb: NDArray[np.uint8], frames_per_second: int) -> Summary:
    """Returns the event of a video, uint8 RGB [T, H, W, 3], that plays in TensorBoard's tab for images."""
    height, width = frames_rgb.shape[1:3]
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    first, *others = (Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS) for frame in frames_rgb)
    encoded = io.BytesIO()
    duration = round(1000 / frames_per_second)
    first.save(encoded, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    image = Summary.Image(height=size[1], width=size[0], colorspace=3, encoded_image_string=encoded.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=image)])
