"""The requests that the clients send, blocking and asyncio alike."""

import uuid
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import reward_service_pb2, video_pb2
from likeness.reward.v1.reward_service_pb2 import StreamVideoScoresRequest as StreamRequest
from likeness_reward.domain import IdentityTemplate, Pooling, ScoreOptions, VideoMotion
from likeness_reward.errors import InvalidVideo
from likeness_reward.frames import crc32_of
from likeness_reward.images import encode_png
from likeness_reward.wire import identity_to_message, motion_to_message, options_to_message, pooling_to_message

FRAMES_PER_MESSAGE = 3
LENGTH_DELIMITED = 2
"""Protocol buffers' wire type of bytes and of messages."""


def embed_request(
    images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling
) -> reward_service_pb2.EmbedIdentityRequest:
    """Returns the request for the identity of encoded images, or RGB arrays uint8 [H, W, 3] which become PNG."""
    encoded = [image if isinstance(image, bytes) else encode_png(image) for image in images]
    return reward_service_pb2.EmbedIdentityRequest(images=encoded, pooling=pooling_to_message(pooling))


def score_request(
    frames_rgb: NDArray[np.uint8],
    identity: IdentityTemplate,
    options: ScoreOptions | None,
    reference_motion: VideoMotion | None,
) -> reward_service_pb2.ScoreVideoRequest:
    """Returns the request for the reward of a short video uint8 [T, H, W, 3]."""
    return reward_service_pb2.ScoreVideoRequest(
        request_id=str(uuid.uuid4()),
        identity=identity_to_message(identity),
        options=options_to_message(options or ScoreOptions()),
        spec=raw_spec(*frames_rgb.shape[:3]),
        frames=[frame.tobytes() for frame in frames_rgb],
        reference_motion=motion_to_message(reference_motion) if reference_motion is not None else None,
    )


def stream_config(
    options: ScoreOptions | None, identity: IdentityTemplate | None, expected_fingerprint: str | None
) -> StreamRequest:
    """Returns the first message of a stream."""
    config = reward_service_pb2.StreamConfig(
        request_id=str(uuid.uuid4()),
        identity=identity_to_message(identity) if identity is not None else None,
        options=options_to_message(options or ScoreOptions()),
        expected_model_fingerprint=expected_fingerprint or "",
    )
    return StreamRequest(config=config)


def video_start(
    video_id: str,
    shape: tuple[int, int, int],
    identity: IdentityTemplate | None,
    reference_motion: VideoMotion | None,
) -> StreamRequest:
    """Returns the message that opens a video of shape (frames, height, width)."""
    start = video_pb2.VideoStart(
        video_id=video_id,
        spec=raw_spec(*shape),
        identity=identity_to_message(identity) if identity is not None else None,
        reference_motion=motion_to_message(reference_motion) if reference_motion is not None else None,
    )
    return StreamRequest(video_start=start)


def video_frames(video_id: str, first_frame_index: int, frames_rgb: NDArray[np.uint8]) -> Iterator[bytes]:
    """Yields the messages of consecutive frames uint8 [T, H, W, 3], FRAMES_PER_MESSAGE in each but the last.

    They are encoded StreamRequests, joined here out of their parts: protobuf's own encoder copies the pixels several
    times over and takes longer than everything else on the way.
    """
    for start in range(0, len(frames_rgb), FRAMES_PER_MESSAGE):
        frames = [frame.tobytes() for frame in frames_rgb[start : start + FRAMES_PER_MESSAGE]]
        message = video_pb2.VideoFrames(
            video_id=video_id, first_frame_index=first_frame_index + start, crc32=crc32_of(frames)
        )
        parts = [message.SerializeToString()]  # fields of a message may come in any order
        for frame in frames:
            parts += [field_header(video_pb2.VideoFrames.FRAMES_FIELD_NUMBER, len(frame)), frame]
        header = field_header(StreamRequest.FRAMES_FIELD_NUMBER, sum(map(len, parts)))
        yield b"".join([header, *parts])


def field_header(field_number: int, length: int) -> bytes:
    """Returns what stands before `length` bytes of a field: its number and wire type, and the length, as varints."""
    header = bytearray()
    for number in (field_number << 3 | LENGTH_DELIMITED, length):
        while number > 0x7F:
            header.append(number & 0x7F | 0x80)
            number >>= 7
        header.append(number)
    return bytes(header)


def encoded(request: StreamRequest | bytes) -> bytes:
    """Returns a request of a stream as it crosses the wire."""
    return request if isinstance(request, bytes) else request.SerializeToString()


def video_end(video_id: str, *, cancelled: bool = False) -> StreamRequest:
    """Returns the message that closes a video."""
    return StreamRequest(video_end=video_pb2.VideoEnd(video_id=video_id, cancelled=cancelled))


def raw_spec(frame_count: int, height: int, width: int) -> video_pb2.VideoSpec:
    """Returns the description of raw RGB frames."""
    return video_pb2.VideoSpec(
        encoding=video_pb2.FRAME_ENCODING_RGB24, width=width, height=height, frame_count=frame_count
    )


def check_video(frames_rgb: NDArray[np.uint8]) -> None:
    """Raises InvalidVideo unless the array is uint8 [T, H, W, 3] with T > 0."""
    if frames_rgb.dtype != np.uint8 or frames_rgb.ndim != 4 or frames_rgb.shape[3] != 3 or len(frames_rgb) == 0:
        found = f"{frames_rgb.dtype} {list(frames_rgb.shape)}"
        raise InvalidVideo(f"expected frames uint8 [T, H, W, 3] with T > 0, found {found}", found=found)
