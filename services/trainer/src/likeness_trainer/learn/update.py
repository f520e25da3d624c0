"""From trajectories and advantages to gradients, one step of the window at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from likeness_trainer.learn.policy_gradient import (
    PolicyGradientConfig,
    clipped_policy_loss,
    guard_log_ratio,
    standard_log_ratio,
)
from likeness_trainer.learn.rollout import Trajectory
from likeness_trainer.learn.stochastic_step import gaussian_log_prob, next_latents_distribution, velocity_kl
from likeness_trainer.ranks import Ranks
from likeness_trainer.wan.module import Conditioning, WanModule


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory with what the reward said of it."""

    trajectory: Trajectory
    conditioning: Conditioning
    advantages: Tensor
    """float32 [B, T_latent]; equal columns when credit goes to whole videos."""
    counted: bool = True
    """False: evaluated to keep step with the other ranks of a sharded model; adds nothing to the objective."""


@dataclass(frozen=True)
class StepTerms:
    """The part of the objective that one step of the window contributes for one batch of branches."""

    policy_loss: Tensor
    """Mean over the batch; exactly 0 without gradient at the deterministic last step."""
    kl: Tensor
    """Mean divergence over the batch, with gradient."""
    ratio: Tensor | None = None
    clipped: Tensor | None = None


@dataclass
class UpdateStatistics:
    """Means over everything one accumulation went through."""

    loss: float = 0.0
    kl: float = 0.0
    feedback_kl: float = 0.0
    """Divergence over the videos of reward feedback."""
    ratios: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)

    @property
    def divergence(self) -> float:
        """That of the policy gradient, or of reward feedback where there was nothing else."""
        return self.kl if self.ratios else self.kl + self.feedback_kl

    @property
    def ratio_deviation(self) -> float:
        """Largest |ratio - 1|; 0 before the first update."""
        return max((float((ratio - 1.0).abs().max()) for ratio in self.ratios), default=0.0)

    @property
    def clip_fraction(self) -> float:
        """Share of ratios whose clipped branch was active."""
        return float(torch.cat([c.flatten() for c in self.clipped]).float().mean()) if self.clipped else 0.0

    def over_ranks(self, ranks: Ranks) -> UpdateStatistics:
        """Returns the statistics of the whole batch, of which each rank went through a part."""
        if ranks.world_size == 1:
            return self
        mine = replace(self, ratios=[r.cpu() for r in self.ratios], clipped=[c.cpu() for c in self.clipped])
        parts = ranks.gather(mine)
        return UpdateStatistics(
            loss=sum(part.loss for part in parts),
            kl=sum(part.kl for part in parts),
            feedback_kl=sum(part.feedback_kl for part in parts),
            ratios=list(chain.from_iterable(part.ratios for part in parts)),
            clipped=list(chain.from_iterable(part.clipped for part in parts)),
        )


def step_terms(model: WanModule, scored: ScoredTrajectory, index: int, config: PolicyGradientConfig) -> StepTerms:
    """Returns the objective's terms of the window's step number `index`, with their graph."""
    trajectory, conditioning = scored.trajectory, scored.conditioning
    step = trajectory.window.trained[index]
    latents = trajectory.inputs[index]
    velocity = model.velocity(latents, step, conditioning)
    kl = velocity.new_zeros(())
    if config.kl_weight > 0:
        reference = model.reference_velocity(latents, step, conditioning)
        kl = velocity_kl(velocity, reference, model.schedule.sigmas[step]).mean()
    if step not in trajectory.window.stochastic:
        return StepTerms(velocity.new_zeros(()), kl)
    sampler = model.sampler
    mean, std = next_latents_distribution(
        sampler.stochastic_step, latents, velocity, model.schedule.sigmas, step, sampler.noise_level
    )
    log_prob, old_log_prob = gaussian_log_prob(trajectory.inputs[index + 1], mean, std), trajectory.old_log_prob[index]
    if config.ratio == "guard":
        log_ratio = guard_log_ratio(log_prob, old_log_prob, mean, trajectory.old_mean[index], std)
    else:
        log_ratio = standard_log_ratio(log_prob, old_log_prob)
    # Latent frames that the model holds fixed carry no decision and are left out.
    free = slice(None) if conditioning.first_frame_latents is None else slice(1, None)
    loss = clipped_policy_loss(log_ratio[:, free], scored.advantages[:, free].to(log_ratio), config.clip_range)
    return StepTerms(loss.loss, kl, loss.ratio, loss.clipped)


def count_samples(batches: list[ScoredTrajectory]) -> int:
    """Returns how many samples the objective is a mean over."""
    return sum(len(batch.trajectory.samples) for batch in batches if batch.counted)


def objective_terms(
    model: WanModule, batches: list[ScoredTrajectory], config: PolicyGradientConfig, num_samples: int | None = None
) -> Iterator[tuple[Tensor, Tensor, StepTerms]]:
    """Yields (weighted loss, weighted KL, terms) of every batch and step; the sums are the objective and the mean KL.

    The policy term is a mean over samples and stochastic steps, the KL a mean over samples and all trained steps.

    Args:
        num_samples: of all ranks, whose sums then add up to the objective; those of `batches` when not given.
    """
    num_samples = count_samples(batches) if num_samples is None else num_samples
    for batch in batches:
        share = len(batch.trajectory.samples) / num_samples if batch.counted else 0.0
        window = batch.trajectory.window
        num_stochastic, num_trained = len(window.stochastic), len(window.trained)
        for index in range(num_trained if config.kl_weight > 0 else num_stochastic):
            terms = step_terms(model, batch, index, config)
            kl = terms.kl * share / num_trained
            loss = terms.policy_loss * share / num_stochastic + config.kl_weight * kl
            yield loss, kl, terms if batch.counted else StepTerms(terms.policy_loss, terms.kl)


def accumulate_gradients(
    model: WanModule, batches: list[ScoredTrajectory], config: PolicyGradientConfig, num_samples: int | None = None
) -> UpdateStatistics:
    """Adds the objective's gradient to the adapters and returns statistics; `num_samples` as in `objective_terms`.

    Every step of the window is an independent term, so each is backpropagated before the next is computed: memory does
    not grow with the number of steps.
    """
    statistics = UpdateStatistics()
    for loss, kl, terms in objective_terms(model, batches, config, num_samples):
        if loss.requires_grad:
            loss.backward()
        statistics.loss += loss.item()
        statistics.kl += kl.item()
        if terms.ratio is not None and terms.clipped is not None:
            statistics.ratios.append(terms.ratio)
            statistics.clipped.append(terms.clipped)
    return statistics
