"""Frames as they cross the wire: what a video announces, and whether what arrives fits."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import video_pb2
from likeness_reward.domain import Limits
from likeness_reward.errors import InvalidImage, InvalidVideo, LimitExceeded
from likeness_reward.images import decode_image

_FORMATS = {video_pb2.FRAME_ENCODING_PNG: "PNG", video_pb2.FRAME_ENCODING_JPEG: "JPEG"}
LEAST_SIDE = 2


@dataclass(frozen=True)
class FrameReader:
    """Turns the frames of one video into pixels, checking each against what the video announced."""

    width: int
    height: int
    frame_count: int
    encoding: int

    @staticmethod
    def of(spec: video_pb2.VideoSpec, limits: Limits) -> "FrameReader":
        """Returns the reader of a video. Raises InvalidVideo or LimitExceeded, before any frame is taken."""
        if spec.encoding != video_pb2.FRAME_ENCODING_RGB24 and spec.encoding not in _FORMATS:
            allowed = ", ".join(video_pb2.FrameEncoding.keys()[1:])
            raise InvalidVideo(f"spec.encoding is {spec.encoding}; allowed are {allowed}", field="spec.encoding")
        if min(spec.width, spec.height) < LEAST_SIDE:
            found = f"{spec.width}x{spec.height}"
            raise InvalidVideo(f"spec: frames of {found}; each side must be at least {LEAST_SIDE}", field="spec.width")
        if spec.frame_count < 1:
            raise InvalidVideo("spec.frame_count is 0; a video has at least one frame", field="spec.frame_count")
        if spec.frame_count > limits.max_frames_per_video:
            raise LimitExceeded(
                f"spec.frame_count is {spec.frame_count}; at most {limits.max_frames_per_video} are allowed",
                field="spec.frame_count",
                limit=limits.max_frames_per_video,
            )
        if spec.width * spec.height > limits.max_pixels_per_frame:
            raise LimitExceeded(
                f"spec: frames of {spec.width}x{spec.height} = {spec.width * spec.height} pixels; "
                f"at most {limits.max_pixels_per_frame} are allowed",
                field="spec.width",
                limit=limits.max_pixels_per_frame,
            )
        return FrameReader(spec.width, spec.height, spec.frame_count, spec.encoding)

    def read(self, index: int, data: bytes) -> NDArray[np.uint8]:
        """Returns the RGB pixels uint8 [H, W, 3] of frame `index`. Raises InvalidVideo or InvalidImage."""
        what = f"frame {index}"
        if self.encoding == video_pb2.FRAME_ENCODING_RGB24:
            self.check_byte_count(index, data)
            return np.frombuffer(data, np.uint8).reshape(self.height, self.width, 3)
        pixels = decode_image(data, what=what, max_pixels=self.width * self.height, formats=(_FORMATS[self.encoding],))
        if pixels.shape[:2] != (self.height, self.width):
            found = f"{pixels.shape[1]}x{pixels.shape[0]}"
            raise InvalidImage(f"{what} is {found}; the video announced {self.width}x{self.height}", frame_index=index)
        return pixels

    def check_byte_count(self, index: int, data: bytes) -> None:
        """Raises InvalidVideo when raw frame `index` has too few or too many bytes."""
        expected = self.width * self.height * 3
        if self.encoding == video_pb2.FRAME_ENCODING_RGB24 and len(data) != expected:
            message = f"frame {index} has {len(data)} bytes; {self.width}x{self.height} RGB24 has {expected}"
            raise InvalidVideo(message, frame_index=index, found=len(data), expected=expected)


def crc32_of(frames: Sequence[bytes]) -> int:
    """Returns the CRC-32 (IEEE 802.3) of the concatenated frames."""
    checksum = 0
    for frame in frames:
        checksum = zlib.crc32(frame, checksum)
    return checksum


def check_crc32(message: video_pb2.VideoFrames, frames: Sequence[bytes]) -> None:
    """Raises InvalidVideo when a message carries a checksum that its frames do not have."""
    if message.HasField("crc32") and message.crc32 != crc32_of(frames):
        first = message.first_frame_index
        raise InvalidVideo(f"frames from {first} arrived damaged: their CRC-32 is not {message.crc32:#010x}")
