"""The frozen weights of the DiTs spread over the ranks with FSDP2; the adapters stay whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from likeness_trainer.wan.model_config import EXPERTS
from likeness_trainer.wan.module import WanModule


class _Evaluation(nn.Module):
    """DiffSynth's model function of one DiT as a module: FSDP2 gathers weights around the `forward` of modules only,
    and that function calls the parts of a DiT, never the DiT itself."""

    def __init__(self, model_fn: Any, dit: nn.Module) -> None:
        super().__init__()
        self.model_fn = model_fn
        self.dit = dit

    def forward(self, **inputs: Any) -> Tensor:
        velocity: Tensor = self.model_fn(dit=self.dit, **inputs)
        return velocity


def shard_experts(model: WanModule, mesh: DeviceMesh, device: str) -> None:
    """Spreads the weights of every DiT over the ranks, and moves the rest of the model to `device`, in place.

    Each block is gathered before its forward or backward pass and freed behind it. The adapters are left out
    (`ignored_params`), so that their gradients, files and checksum are those of one process. From here on a DiT must
    be evaluated by all ranks, equally often.

    Args:
        model: best loaded on the CPU, so that no GPU ever holds all weights.
        mesh: one-dimensional, all ranks.
    """
    pipe = model.pipe
    evaluations: dict[int, nn.Module] = {}
    adapters = set(model.lora_parameters())
    for dit in (getattr(pipe, name) for name in EXPERTS):
        if dit is None:
            continue
        for block in dit.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        evaluation = _Evaluation(pipe.model_fn, dit)
        fully_shard(evaluation, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        evaluations[id(dit)] = evaluation
    pipe.to(device)
    model.device = torch.device(device)

    def evaluate(dit: nn.Module, **inputs: Any) -> Tensor:
        return evaluations[id(dit)](**inputs)

    pipe.model_fn = evaluate
