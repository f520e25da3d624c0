"""Crop gradients to protocol buffer messages and back. What comes is checked: nothing wrong is ever applied.

The values of a frame are divided by a power of two near the largest of them, so that float16 spends its range on them
and not on their scale, which falls with the number of frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import reward_pb2
from likeness_reward.domain import CropGradient, GradientEncoding, VideoReward
from likeness_reward.errors import InvalidGradients

FRAMES_PER_MESSAGE = 8
_NUMBERS: dict[GradientEncoding, np.dtype] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


def encoding_to_message(encoding: GradientEncoding) -> reward_pb2.GradientEncoding:
    """Returns the enum value of an encoding."""
    return {
        "float16": reward_pb2.GRADIENT_ENCODING_FLOAT16,
        "float32": reward_pb2.GRADIENT_ENCODING_FLOAT32,
    }[encoding]


def encoding_from_message(value: int) -> GradientEncoding:
    """Returns the encoding of an enum value; float16 when it is unspecified."""
    return "float32" if value == reward_pb2.GRADIENT_ENCODING_FLOAT32 else "float16"


def gradients_to_messages(
    gradients: Sequence[CropGradient], encoding: GradientEncoding, video_id: str
) -> Iterator[reward_pb2.CropGradients]:
    """Yields messages of at most FRAMES_PER_MESSAGE frames."""
    for start in range(0, len(gradients), FRAMES_PER_MESSAGE):
        yield gradients_to_message(gradients[start : start + FRAMES_PER_MESSAGE], encoding, video_id)


def gradients_to_message(
    gradients: Sequence[CropGradient], encoding: GradientEncoding, video_id: str = ""
) -> reward_pb2.CropGradients:
    """Returns one message of all gradients."""
    return reward_pb2.CropGradients(
        video_id=video_id,
        encoding=encoding_to_message(encoding),
        crop_size=gradients[0].values.shape[1] if gradients else 0,
        gradients=[_to_message(gradient, encoding) for gradient in gradients],
    )


def _to_message(gradient: CropGradient, encoding: GradientEncoding) -> reward_pb2.CropGradient:
    largest = float(np.abs(gradient.values).max())
    scale = float(np.exp2(np.ceil(np.log2(largest)))) if largest > 0 else 0.0
    values = gradient.values / np.float32(scale) if scale > 0 else np.zeros_like(gradient.values)
    return reward_pb2.CropGradient(
        frame_index=gradient.frame_index,
        values=values.astype(_NUMBERS[encoding]).tobytes(),
        frame_from_crop=gradient.frame_from_crop.ravel().tolist(),
        scale=scale,
    )


def gradients_from_messages(messages: Iterable[reward_pb2.CropGradients]) -> list[CropGradient]:
    """Returns the gradients of a video's messages. Raises InvalidGradients naming the frame and what is wrong."""
    return [
        _from_message(gradient, message.crop_size, encoding_from_message(message.encoding))
        for message in messages
        for gradient in message.gradients
    ]


def _from_message(message: reward_pb2.CropGradient, crop_size: int, encoding: GradientEncoding) -> CropGradient:
    frame, numbers = message.frame_index, _NUMBERS[encoding]
    expected = 3 * crop_size * crop_size * numbers.itemsize
    if crop_size == 0 or len(message.values) != expected:
        raise InvalidGradients(
            f"the gradient of frame {frame} has {len(message.values)} bytes; {encoding} [3, {crop_size}, {crop_size}] "
            f"has {expected}",
            frame=frame,
        )
    matrix = np.array(message.frame_from_crop, np.float64)
    if matrix.shape != (6,):
        raise InvalidGradients(f"frame_from_crop of frame {frame} has {matrix.size} numbers; it has 6", frame=frame)
    stored = np.frombuffer(message.values, numbers).astype(np.float32)
    values: NDArray[np.float32] = (stored * np.float32(message.scale)).reshape(3, crop_size, crop_size)
    if not (np.isfinite(values).all() and np.isfinite(matrix).all()):
        raise InvalidGradients(f"the gradient of frame {frame} is not finite", frame=frame)
    return CropGradient(frame, values, matrix.reshape(2, 3))


def with_gradients(reward: VideoReward, messages: Iterable[reward_pb2.CropGradients]) -> VideoReward:
    """Returns the reward with the gradients of its video's messages. Raises InvalidGradients."""
    complete = replace(reward, crop_gradients=tuple(gradients_from_messages(messages)))
    check_gradients(complete)
    return complete


def check_gradients(reward: VideoReward) -> None:
    """Raises InvalidGradients unless a reward has one gradient for each embedded frame, of a frame that exists."""
    indices = [gradient.frame_index for gradient in reward.crop_gradients]
    if len(indices) != reward.embedded_frame_count or len(set(indices)) != len(indices):
        raise InvalidGradients(
            f"{len(indices)} gradients, of {len(set(indices))} frames; {reward.embedded_frame_count} frames show a face"
        )
    if any(index >= reward.frame_count for index in indices):
        raise InvalidGradients(f"a gradient of frame {max(indices)}; the video has {reward.frame_count}")
    if reward.frames and set(indices) != {f.frame_index for f in reward.frames if f.similarity is not None}:
        raise InvalidGradients("the gradients are not those of the frames that show a face")
