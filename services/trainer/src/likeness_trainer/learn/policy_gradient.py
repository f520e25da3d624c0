"""The clipped policy-gradient objective and its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from likeness_trainer.learn.advantage import Credit


class PolicyGradientConfig(BaseModel):
    """Group-relative policy optimisation on the stochastic steps of the window."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: int = Field(8, ge=2)
    """Samples of one prompt that are compared with each other."""
    groups_per_step: int = Field(4, ge=1)
    """Prompts sampled for one optimizer update."""
    branch_batch: int = Field(1, ge=1)
    """Samples of a group that one DiT evaluation takes. Rollout and update use the same batches."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates made from one set of samples."""
    credit: Credit = "latent_frame"
    """Compare whole videos, or each latent frame with the same latent frame of the group."""
    clip_range: float = Field(1e-3, gt=0)
    """The ratio of densities is clipped to 1 +- this. Log-densities are means over elements, so ratios stay near 1."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to +- this."""
    kl_weight: float = Field(0.01, ge=0)
    """Weight of the divergence from the model without its adapter. 0 skips the reference evaluations."""


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the elements of one batch, so that batches add up to the mean over all of them."""

    loss: Tensor
    """Scalar with gradient, the mean over the batch."""
    ratio: Tensor
    """Detached ratios [B, T]."""
    clipped: Tensor
    """Whether the clipped branch was the active one, bool [B, T]."""


def clipped_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float) -> PolicyLoss:
    """Returns ``mean max(-A rho, -A clip(rho, 1-c, 1+c))`` with ``rho = exp(log p - log p_old)``.

    Args:
        log_prob: float32 [B, T] with gradient.
        old_log_prob, advantages: float32 [B, T].
    """
    ratio = torch.exp(log_prob - old_log_prob)
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return PolicyLoss(torch.maximum(plain, limited).mean(), ratio.detach(), (limited > plain).detach())
