"""Advantages: how much better a video, or one of its latent frames, is than the rest of its group."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Credit = Literal["video", "latent_frame"]
Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch"]


def latent_frame_of(num_frames: int) -> NDArray[np.int64]:
    """Returns the latent frame that carries each pixel frame: int64 [num_frames].

    Latent frame 0 is pixel frame 0; latent frame k carries pixel frames 4k-3 to 4k.
    """
    return (np.arange(num_frames) + 3) // 4


def latent_frame_scores(frame_scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean score of the pixel frames of each latent frame: float64 [G, T_latent].

    Args:
        frame_scores: float64 [G, T], one score a pixel frame, no-face frames already replaced by their value.
    """
    owner = latent_frame_of(frame_scores.shape[1])
    return np.stack([frame_scores[:, owner == k].mean(axis=1) for k in range(owner[-1] + 1)], axis=1)


def group_advantages(
    scores: NDArray[np.float64],
    baseline: Baseline = "mean",
    std: NDArray[np.float64] | None = None,
    clip: float = 5.0,
) -> NDArray[np.float64]:
    """Returns the advantages inside one group: ``(r - baseline) / (std + 1e-4)``, clipped to +-clip (GRPO,
    arXiv 2402.03300).

    Args:
        scores: float64 [G] or [G, T]; the group is axis 0 and every column is its own comparison.
        baseline: `mean` of the group, or `leave_one_out`: the mean of the other G - 1 samples, which does not depend on
            the sample itself and so leaves the policy gradient unbiased (RLOO, arXiv 2402.14740). The two differ by
            the factor G / (G - 1).
        std: [T], what to divide by; each group's own deviation when not given.

    A column whose scores are all equal says nothing about what to prefer: its advantages are exactly 0.
    """
    size = scores.shape[0]
    if size < 2:
        raise ValueError(f"a group needs at least 2 samples to compare, got {size}")
    if not np.isfinite(scores).all():
        raise ValueError(f"rewards must be finite, got {scores.tolist()}")
    centred = scores - scores.mean(axis=0, keepdims=True)
    if baseline == "leave_one_out":
        centred = centred * (size / (size - 1))
    constant = np.ptp(scores, axis=0, keepdims=True) == 0.0
    divisor = scores.std(axis=0, keepdims=True) if std is None else std
    advantages = np.where(constant, 0.0, centred / (divisor + 1e-4))
    return np.clip(advantages, -clip, clip)
