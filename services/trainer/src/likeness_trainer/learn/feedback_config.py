"""Settings of reward feedback learning. Apart from reward_feedback.py, because importing DiffSynth takes seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AlgorithmName = Literal["policy_gradient", "reward_feedback", "hybrid"]


class RewardFeedbackConfig(BaseModel):
    """Backpropagation of the reward through decoding and the last steps of the chain.

    loss = -scale (R - offset) / spread + kl_weight KL, with the constants published for identity (IPRO, arXiv
    2510.14255) as defaults; offset and spread normalise that work's own scorer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(0.1, gt=0)
    """Weight of the normalised reward."""
    offset: float = 0.54
    """Reward that counts as 0. It moves the loss and no gradient."""
    spread: float = Field(0.16, gt=0)
    """What the reward is divided by."""
    kl_weight: float = Field(1.0, ge=0)
    """Weight of the divergence from the model without its adapter. 0 skips the reference evaluations."""
    samples: int = Field(1, ge=1)
    """Videos sampled of each prompt of a step, each from noise of its own; their graphs live at the same time."""
    last_steps: int | None = Field(None, ge=1)
    """Steps of the window, counted from its end, that are backpropagated through. Not set: all of them."""
    weight: float = Field(1.0, gt=0)
    """With algorithm.name hybrid: weight of this loss beside that of the policy gradient, which is 1."""
