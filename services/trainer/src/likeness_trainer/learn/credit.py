"""From the rewards of a group to the advantages of its latent frames: components, weights, who gets the credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from likeness_reward.domain import COVERAGE_COMPONENT, IDENTITY_COMPONENT, VideoReward
from likeness_trainer.learn.advantage import Credit, group_advantages, latent_frame_of, latent_frame_scores
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig

GroupScores = Mapping[str, NDArray[np.float64]]
"""Component name to float64 [G, T_latent]; equal columns where the credit goes to whole videos."""


def group_scores(rewards: Sequence[VideoReward], algorithm: PolicyGradientConfig, no_face_value: float) -> GroupScores:
    """Returns what is compared inside a group, for each component that `algorithm.reward_weights` weighs.

    With credit for latent frames, identity and coverage are split by frame; a component that is known for the whole
    video only has the same score in every latent frame.
    """
    return {
        name: _scores(rewards, name, algorithm.credit, no_face_value)
        for name, weight in algorithm.reward_weights.items()
        if weight != 0.0
    }


def non_finite_component(scores: GroupScores) -> str | None:
    """Returns the name of a component that holds NaN or infinity, or None."""
    return next((name for name, values in scores.items() if not np.isfinite(values).all()), None)


def batch_deviations(groups: Sequence[GroupScores]) -> dict[str, NDArray[np.float64]]:
    """Returns the standard deviation of each component over every sample of all groups: name to float64 [T_latent].

    Dividing by it instead of each group's own deviation keeps a group of nearly equal rewards from counting as much as
    one of very different rewards (arXiv 2508.08221).
    """
    return {name: np.concatenate([group[name] for group in groups]).std(axis=0) for name in groups[0]}


def weighted_advantages(
    scores: GroupScores, algorithm: PolicyGradientConfig, deviations: Mapping[str, NDArray[np.float64]] | None = None
) -> Tensor:
    """Returns ``A = sum_c w_c A_c``, float32 [G, T_latent], clipped to +- `algorithm.advantage_clip`.

    Each component is compared within its group, ``A_c``, before it is weighted: so a weight says how much a component
    counts, whatever its scale is. All zero means that the group has nothing to learn from.

    Args:
        deviations: as `batch_deviations` returns them; each group's own when not given.
    """
    clip = algorithm.advantage_clip
    total = sum(
        algorithm.reward_weights[name]
        * group_advantages(values, algorithm.baseline, None if deviations is None else deviations[name], clip)
        for name, values in scores.items()
    )
    return torch.from_numpy(np.clip(total, -clip, clip).astype(np.float32))


def weighted_value(reward: VideoReward, algorithm: PolicyGradientConfig) -> float:
    """Returns ``sum_c w_c r_c`` of one video: the number that training raises."""
    return float(sum(weight * reward.component(name) for name, weight in algorithm.reward_weights.items()))


def _scores(rewards: Sequence[VideoReward], name: str, credit: Credit, no_face_value: float) -> NDArray[np.float64]:
    if credit == "latent_frame" and name == IDENTITY_COMPONENT:
        return latent_frame_scores(
            _by_frame(rewards, lambda similarity: no_face_value if similarity is None else similarity)
        )
    if credit == "latent_frame" and name == COVERAGE_COMPONENT:
        return latent_frame_scores(_by_frame(rewards, lambda similarity: float(similarity is not None)))
    values = np.array([reward.component(name) for reward in rewards], np.float64)
    num_latent_frames = int(latent_frame_of(rewards[0].frame_count)[-1]) + 1
    return np.repeat(values[:, None], num_latent_frames, axis=1)


def _by_frame(rewards: Sequence[VideoReward], score: Callable[[float | None], float]) -> NDArray[np.float64]:
    return np.array([[score(similarity) for similarity in reward.similarities] for reward in rewards], np.float64)
