"""The optimizer over the adapters, and the state that a checkpoint keeps of it."""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from likeness_trainer.config import OptimizerConfig
from likeness_trainer.errors import RunFolderError
from likeness_trainer.learn.ema import AdapterAverage
from likeness_trainer.learn.feedback_update import FeedbackUpdate
from likeness_trainer.learn.kl_controller import adapted_kl_weight
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.update import ScoredTrajectory, UpdateStatistics, accumulate_gradients, count_samples
from likeness_trainer.ranks import Ranks
from likeness_trainer.run.checkpoint import Checkpoint, LearnerState
from likeness_trainer.wan import lora
from likeness_trainer.wan.module import WanModule


class Learner:
    """Turns scored trajectories into optimizer steps on float32 adapters."""

    def __init__(
        self, model: WanModule, config: OptimizerConfig, algorithm: PolicyGradientConfig, ranks: Ranks | None = None
    ) -> None:
        self.model = model
        self.ranks = ranks or Ranks()
        self.config = config
        self.algorithm = algorithm
        self.optimizer = torch.optim.AdamW(
            model.lora_parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        self.average = None if config.ema_decay is None else AdapterAverage(model, config.ema_decay)
        self.kl_weight = algorithm.kl_weight
        self.skipped_in_a_row = 0

    def update(
        self,
        batches: list[ScoredTrajectory],
        step: int,
        fault: str | None = None,
        feedback: FeedbackUpdate | None = None,
    ) -> dict[str, Any]:
        """Makes the optimizer updates of one training step and returns their metrics.

        A loss or gradient that is not finite moves nothing: the step counts as skipped. Every rank brings its part of
        the batch; all decide alike, get the same metrics, and hold the same adapters afterwards.

        Args:
            batches: empty when no group is left to learn from; nothing moves when that is so on every rank.
            fault: what was not finite before the update, for example a reward; the step is skipped.
            feedback: this rank's gradients of the reward, which are added to those of the batches.

        Raises:
            RanksDivergedError: the adapters of the ranks differ after the update.
        """
        fault = fault or (feedback.fault if feedback is not None else None)
        faults, counts = zip(*self.ranks.gather((fault, count_samples(batches))), strict=True)
        fault, num_samples = next((f for f in faults if f is not None), None), sum(counts)
        if fault is not None:
            return self._skip(fault)
        if num_samples == 0 and (feedback is None or not feedback.gradients):
            return {"skipped": 0}
        learning_rate = self.config.learning_rate * min(1.0, (step + 1) / max(self.config.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        statistics: list[UpdateStatistics] = []
        norms: list[float] = []
        for _ in range(self.algorithm.updates_per_rollout):
            accumulated, norm = self._accumulate(batches, num_samples, feedback)
            fault = self._non_finite(accumulated.loss, norm.item())
            if fault is not None:
                return self._skip(fault)
            clip_grads_with_norm_(self.model.lora_parameters(), self.config.max_grad_norm, norm)
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
            statistics.append(accumulated)
            norms.append(norm.item())
        self.skipped_in_a_row = 0
        self.require_equal_adapters()
        return {
            "loss": statistics[0].loss,
            "kl": statistics[-1].divergence,
            "ratio_deviation_first": statistics[0].ratio_deviation,
            "ratio_deviation": statistics[-1].ratio_deviation,
            "clip_fraction": statistics[-1].clip_fraction,
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": learning_rate,
            **self._adapt_kl_weight(statistics[-1].divergence),
            "skipped": 0,
        }

    def _accumulate(
        self, batches: list[ScoredTrajectory], num_samples: int, feedback: FeedbackUpdate | None
    ) -> tuple[UpdateStatistics, Tensor]:
        """Computes the gradient of one update, summed over the ranks; returns its statistics and its norm, a scalar."""
        self.optimizer.zero_grad(set_to_none=True)
        algorithm = self.algorithm.model_copy(update={"kl_weight": self.kl_weight})
        statistics = accumulate_gradients(self.model, batches, algorithm, num_samples)
        if feedback is not None:
            feedback.add_to(self.model.lora_parameters(), statistics)
        statistics = statistics.over_ranks(self.ranks)
        self.ranks.sum_gradients(self.model.lora_parameters())
        gradients = [parameter.grad for parameter in self.model.lora_parameters() if parameter.grad is not None]
        return statistics, get_total_norm(gradients)

    def _adapt_kl_weight(self, kl: float) -> dict[str, float]:
        """Moves the weight of the divergence towards its target, if there is one; returns the weight that was used."""
        if self.algorithm.kl_target is None:
            return {}
        used = self.kl_weight
        self.kl_weight = adapted_kl_weight(used, kl, self.algorithm.kl_target)
        return {"kl_weight": used}

    def _non_finite(self, loss: float, norm: float) -> str | None:
        """Returns what of an accumulation is NaN or infinite, or None."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if math.isfinite(norm):
            return None
        for name in self.model.trained_experts:
            expert = getattr(self.model.pipe, name)
            for parameter_name, parameter in expert.named_parameters():
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                    return f"the gradient of {name}.{parameter_name} is not finite"
        return f"the gradient norm is {norm}"

    def _skip(self, fault: str) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row += 1
        return {"skipped": 1, "skipped_because": fault}

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, the model has the adapters that are evaluated and exported: the average when there is one."""
        return nullcontext() if self.average is None else self.average.applied()

    def require_equal_adapters(self) -> None:
        """Raises RanksDivergedError when the ranks do not hold the same adapters, bit for bit."""
        if self.ranks.world_size > 1:
            self.ranks.require_equal(self.checksum(), "the adapters")

    def checksum(self) -> str:
        """Returns one SHA-256 over the adapters of every trained expert."""
        parts = [lora.checksum(getattr(self.model.pipe, name)) for name in self.model.trained_experts]
        return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()

    def checkpoint(self, step: int) -> Checkpoint:
        """Returns the state after `step` optimizer steps."""
        adapters = {name: lora.lora_state(getattr(self.model.pipe, name)) for name in self.model.trained_experts}
        labels = {name: self.model.expert_label(name) for name in adapters}
        state = LearnerState(self.kl_weight, self.skipped_in_a_row, self.average.num_updates if self.average else 0)
        average = self.average.state() if self.average else {}
        return Checkpoint(
            step, adapters, self.optimizer.state_dict(), self.checksum(), labels, state, average, self.model.base_loras
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes the state of a checkpoint; raises RunFolderError when it is of another model or was damaged."""
        checkpoint.require_base(self.model.base_loras)
        if set(checkpoint.adapters) != set(self.model.trained_experts):
            raise RunFolderError(
                f"the checkpoint trains {sorted(checkpoint.adapters)}, this run {list(self.model.trained_experts)}"
            )
        for name, state in checkpoint.adapters.items():
            lora.load_lora_state(getattr(self.model.pipe, name), state)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        if self.checksum() != checkpoint.checksum:
            raise RunFolderError("the adapters of the checkpoint do not have the checksum they were saved with")
        self.kl_weight, self.skipped_in_a_row = checkpoint.state.kl_weight, checkpoint.state.skipped_in_a_row
        if self.average is not None:
            self.average.restore(checkpoint.average, checkpoint.state.average_updates)
