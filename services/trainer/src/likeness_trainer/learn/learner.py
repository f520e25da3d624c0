"""The optimizer over the adapters, and the state that a checkpoint keeps of it."""

from __future__ import annotations

import hashlib

import torch

from likeness_trainer.config import OptimizerConfig
from likeness_trainer.errors import RunFolderError
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.update import ScoredTrajectory, UpdateStatistics, accumulate_gradients
from likeness_trainer.run.checkpoint import Checkpoint
from likeness_trainer.wan import lora
from likeness_trainer.wan.module import WanModule


class Learner:
    """Turns scored trajectories into optimizer steps on float32 adapters."""

    def __init__(self, model: WanModule, config: OptimizerConfig, algorithm: PolicyGradientConfig) -> None:
        self.model = model
        self.config = config
        self.algorithm = algorithm
        self.optimizer = torch.optim.AdamW(
            model.lora_parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    def update(self, batches: list[ScoredTrajectory], step: int) -> dict[str, float]:
        """Makes the optimizer updates of one training step and returns their metrics."""
        learning_rate = self.config.learning_rate * min(1.0, (step + 1) / max(self.config.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        statistics: list[UpdateStatistics] = []
        norms = []
        for _ in range(self.algorithm.updates_per_rollout):
            self.optimizer.zero_grad(set_to_none=True)
            statistics.append(accumulate_gradients(self.model, batches, self.algorithm))
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.lora_parameters(), self.config.max_grad_norm, error_if_nonfinite=True
            )
            norms.append(float(norm))
            self.optimizer.step()
        return {
            "loss": statistics[0].loss,
            "kl": statistics[-1].kl,
            "ratio_deviation_first": statistics[0].ratio_deviation,
            "ratio_deviation": statistics[-1].ratio_deviation,
            "clip_fraction": statistics[-1].clip_fraction,
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": learning_rate,
        }

    def checksum(self) -> str:
        """Returns one SHA-256 over the adapters of every trained expert."""
        parts = [lora.checksum(getattr(self.model.pipe, name)) for name in self.model.trained_experts]
        return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()

    def checkpoint(self, step: int) -> Checkpoint:
        """Returns the state after `step` optimizer steps."""
        adapters = {name: lora.lora_state(getattr(self.model.pipe, name)) for name in self.model.trained_experts}
        labels = {name: self.model.expert_label(name) for name in adapters}
        return Checkpoint(step, adapters, self.optimizer.state_dict(), self.checksum(), labels)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes the state of a checkpoint; raises RunFolderError when it is of another model or was damaged."""
        if set(checkpoint.adapters) != set(self.model.trained_experts):
            raise RunFolderError(
                f"the checkpoint trains {sorted(checkpoint.adapters)}, this run {list(self.model.trained_experts)}"
            )
        for name, state in checkpoint.adapters.items():
            lora.load_lora_state(getattr(self.model.pipe, name), state)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        if self.checksum() != checkpoint.checksum:
            raise RunFolderError("the adapters of the checkpoint do not have the checksum they were saved with")
