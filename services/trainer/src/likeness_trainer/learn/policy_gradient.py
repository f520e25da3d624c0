"""The clipped policy-gradient objective and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from likeness_reward.domain import MOTION_COMPONENT
from likeness_trainer.learn.advantage import Baseline, Credit, Scale
from likeness_trainer.learn.feedback_config import AlgorithmName, RewardFeedbackConfig

RatioKind = Literal["standard", "guard"]
WindowKind = Literal["all", "one"]


class PolicyGradientConfig(BaseModel):
    """Group-relative policy optimisation on the stochastic steps of the window, and what stands beside or for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: AlgorithmName = "policy_gradient"
    """`policy_gradient`; `reward_feedback` backpropagates the reward instead; `hybrid` adds both gradients."""
    feedback: RewardFeedbackConfig = RewardFeedbackConfig()
    """Settings of reward feedback; read when `name` is reward_feedback or hybrid."""

    group_size: int = Field(8, ge=2)
    """Samples of one prompt that are compared with each other."""
    groups_per_step: int = Field(4, ge=1)
    """Prompts sampled for one optimizer update."""
    branch_batch: int = Field(1, ge=1)
    """Samples of a group that one DiT evaluation takes. Rollout and update use the same batches."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates made from one set of samples."""
    window: WindowKind = "all"
    """Sample and train every stochastic step of the window, or one drawn at random in each iteration."""
    reward_weights: dict[str, float] = Field({"identity": 1.0}, min_length=1)
    """Components of the reward and their weights; each is normalised in its group before it is weighted. `motion`
    is measured against the clip of the row; weight 0 logs it without training on it."""
    credit: Credit = "latent_frame"
    """Compare whole videos, or each latent frame with the same latent frame of the group."""
    baseline: Baseline = "mean"
    """What a reward is compared with: the mean of its group, or the mean of the others (`leave_one_out`)."""
    scale: Scale = "group"
    """Standard deviation that divides the advantages: of the group, or of all rewards of the step (`batch`)."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to +- this."""
    ratio: RatioKind = "standard"
    """Ratio of densities, or GRPO-Guard's (`guard`), which is centred on 1 whatever the policy's mean does."""
    clip_range: float = Field(1e-3, gt=0)
    """The ratio of densities is clipped to 1 +- this. Log-densities are means over elements, so ratios stay near 1."""
    kl_weight: float = Field(0.01, ge=0)
    """Weight of the divergence from the model without its adapter. 0 skips the reference evaluations."""
    kl_target: float | None = Field(None, gt=0)
    """Divergence to keep: the weight starts at kl_weight and is adapted after each step. Not set: it is constant."""

    @property
    def measures_motion(self) -> bool:
        """Whether videos are compared with the motion of their row's clip; with weight 0 it is measured only."""
        return MOTION_COMPONENT in self.reward_weights

    @model_validator(mode="after")
    def _a_target_needs_a_weight_to_adapt(self) -> PolicyGradientConfig:
        if self.kl_target is not None and self.kl_weight == 0:
            raise ValueError(f"kl_target is {self.kl_target}, but kl_weight is 0; it must be above 0 to be adapted")
        return self

    @model_validator(mode="after")
    def _feedback_fits(self) -> PolicyGradientConfig:
        if self.name == "policy_gradient":
            return self
        if self.updates_per_rollout != 1:
            raise ValueError(f"updates_per_rollout is {self.updates_per_rollout}; with name {self.name} it must be 1")
        if self.reward_weights.get(MOTION_COMPONENT, 0.0) != 0.0:
            raise ValueError(f"reward_weights weighs motion, which has no gradient: name {self.name} needs it to be 0")
        if self.name == "reward_feedback" and self.kl_target is not None:
            raise ValueError("kl_target adapts the policy gradient's kl_weight; reward_feedback has feedback.kl_weight")
        return self


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the elements of one batch, so that batches add up to the mean over all of them."""

    loss: Tensor
    """Scalar with gradient, the mean over the batch."""
    ratio: Tensor
    """Detached ratios [B, T]."""
    clipped: Tensor
    """Whether the clipped branch was the active one, bool [B, T]."""


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> PolicyLoss:
    """Returns ``mean max(-A rho, -A clip(rho, 1-c, 1+c))`` with ``rho = exp(log_ratio)``.

    The clipped objective of PPO (Eq. 7 of arXiv 1707.06347), group-relative as in GRPO (arXiv 2402.03300).

    Args:
        log_ratio: float32 [B, T] with gradient; see `standard_log_ratio` and `guard_log_ratio`.
        advantages: float32 [B, T].
    """
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return PolicyLoss(torch.maximum(plain, limited).mean(), ratio.detach(), (limited > plain).detach())


def standard_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Returns ``log p - log p_old``, float32 [B, T]; both are means over the elements of a latent frame."""
    return log_prob - old_log_prob


def guard_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, old_mean: Tensor, std: float) -> Tensor:
    """Returns GRPO-Guard's log-ratio ``(log p - log p_old + |mu - mu_old|^2 / (2 std^2)) std``, float32 [B, T].

    For a sample ``mu_old + std z`` the log-ratio is ``z d / std - d^2 / (2 std^2)`` with ``d = mu - mu_old``: its
    mean is below 0 and its scale depends on the step, so that one clip range is too tight at some steps and too wide at
    others.
    What is returned is ``z d``: mean 0, no dependence on std (RatioNorm of GRPO-Guard, arXiv 2510.22319; its weights of
    the steps' gradients are not part of this).

    Args:
        log_prob, old_log_prob: [B, T], means over the elements of a latent frame.
        mean, old_mean: [B, C, T, h, w] of the step now and when it was sampled.
        std: standard deviation of the step.
    """
    drift = ((mean - old_mean) ** 2).mean(dim=(1, 3, 4)) / (2.0 * std**2)
    return (log_prob - old_log_prob + drift) * std
