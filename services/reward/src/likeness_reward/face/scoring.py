"""Embeddings to identities and rewards: pure arithmetic."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import (
    COVERAGE_COMPONENT,
    IDENTITY_COMPONENT,
    FrameScore,
    Pooling,
    RewardComponent,
    ScoreOptions,
    VideoReward,
)
from likeness_reward.errors import InferenceFailed


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


def reward_from_frames(frames: Sequence[FrameScore], options: ScoreOptions, model_fingerprint: str) -> VideoReward:
    """Returns the reward of a video's frame scores (at least one). Raises InferenceFailed when it is not finite.

    identity = mean (or least) over ALL frames of the similarity, where a frame without a face counts with
    options.no_face_value; coverage = share of frames with a face; value = weighted sum of the two.
    """
    similarities = [options.no_face_value if frame.similarity is None else frame.similarity for frame in frames]
    identity = min(similarities) if options.aggregation == "min" else math.fsum(similarities) / len(similarities)
    embedded = sum(frame.similarity is not None for frame in frames)
    components = (
        RewardComponent(IDENTITY_COMPONENT, identity, options.identity_weight),
        RewardComponent(COVERAGE_COMPONENT, embedded / len(frames), options.coverage_weight),
    )
    value = math.fsum(component.value * component.weight for component in components)
    if not math.isfinite(value):
        raise InferenceFailed(f"the reward of a video of {len(frames)} frames is not finite: {value}")
    kept = tuple(frames) if options.include_frames else ()
    return VideoReward(value, components, len(frames), embedded, model_fingerprint, kept)
