"""Advantages: how much better a video, or one of its latent frames, is than the rest of its group."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Credit = Literal["video", "latent_frame"]


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


def group_advantages(scores: NDArray[np.float64], clip: float = 5.0) -> NDArray[np.float64]:
    """Returns the advantages inside one group: ``(r - mean) / (std + 1e-4)``, clipped to +-clip.

    Args:
        scores: float64 [G] or [G, T]; the group is axis 0 and every column is its own comparison.

    A column whose scores are all equal says nothing about what to prefer: its advantages are exactly 0.
    """
    if scores.shape[0] < 2:
        raise ValueError(f"a group needs at least 2 samples to compare, got {scores.shape[0]}")
    if not np.isfinite(scores).all():
        raise ValueError(f"rewards must be finite, got {scores.tolist()}")
    centred = scores - scores.mean(axis=0, keepdims=True)
    constant = np.ptp(scores, axis=0, keepdims=True) == 0.0
    advantages = np.where(constant, 0.0, centred / (scores.std(axis=0, keepdims=True) + 1e-4))
    return np.clip(advantages, -clip, clip)
