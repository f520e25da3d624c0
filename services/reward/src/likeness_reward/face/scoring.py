"""Embeddings to identities and rewards: pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import (
    COVERAGE_COMPONENT,
    IDENTITY_COMPONENT,
    MOTION_COMPONENT,
    FrameScore,
    Pooling,
    RewardComponent,
    ScoreOptions,
    VideoMotion,
    VideoReward,
)
from likeness_reward.errors import InferenceFailed, InvalidRequest
from likeness_reward.face.crop_gradients import value_gradients
from likeness_reward.face.motion import motion_component, motion_of


def cosine(embedding: NDArray[np.float32], template: NDArray[np.float32]) -> float:
    """Returns the dot product of a unit embedding [D] and a template [D], clipped to -1..1.

    The template is a mean of unit embeddings and shorter than 1, so this is the mean cosine to its images.
    """
    return float(np.clip(np.dot(embedding.astype(np.float64), template.astype(np.float64)), -1.0, 1.0))


def pool_embeddings(
    embeddings: NDArray[np.float32], qualities: Sequence[float], pooling: Pooling
) -> NDArray[np.float32]:
    """Returns the template [D] of unit embeddings [N, D]: their mean, NOT scaled back to length 1.

    `qualities` [N] weigh them when pooling is "quality_weighted": detector score times face width.
    """
    weights = np.asarray(qualities, np.float64) if pooling == "quality_weighted" else np.ones(len(embeddings))
    return np.average(embeddings.astype(np.float64), axis=0, weights=weights).astype(np.float32)


def reward_from_frames(
    frames: Sequence[FrameScore],
    options: ScoreOptions,
    model_fingerprint: str,
    reference_motion: VideoMotion | None = None,
) -> VideoReward:
    """Returns the reward of a video's frame scores (at least one). Raises InferenceFailed when it is not finite.

    identity = mean (or least) over ALL frames of the similarity, where a frame without a face counts with
    options.no_face_value; coverage = share of frames with a face; motion, with a reference, as in face/motion.py;
    value = weighted sum of them.
    """
    similarities = [options.no_face_value if frame.similarity is None else frame.similarity for frame in frames]
    identity = min(similarities) if options.aggregation == "min" else math.fsum(similarities) / len(similarities)
    embedded = sum(frame.similarity is not None for frame in frames)
    motion = motion_of([frame.thumbnails for frame in frames if frame.thumbnails is not None])
    components = [
        RewardComponent(IDENTITY_COMPONENT, identity, options.identity_weight),
        RewardComponent(COVERAGE_COMPONENT, embedded / len(frames), options.coverage_weight),
    ]
    if reference_motion is not None:
        moves = motion_component(motion, reference_motion)
        components.append(RewardComponent(MOTION_COMPONENT, moves, options.motion_weight))
    value = math.fsum(component.value * component.weight for component in components)
    if not math.isfinite(value):
        raise InferenceFailed(f"the reward of a video of {len(frames)} frames is not finite: {value}")
    bare = [replace(frame, thumbnails=None, gradient=None) for frame in frames] if options.include_frames else []
    gradients = value_gradients(frames, options) if options.include_crop_gradients else ()
    return VideoReward(
        value, tuple(components), len(frames), embedded, model_fingerprint, tuple(bare), motion, gradients
    )


def check_reference_motion(options: ScoreOptions, reference_motion: VideoMotion | None) -> None:
    """Raises InvalidRequest when motion has a weight and nothing to be measured by."""
    if options.motion_weight != 0.0 and reference_motion is None:
        raise InvalidRequest(
            f"the weight of motion is {options.motion_weight:g}, but no reference_motion says how much to move",
            field="reference_motion",
        )
