"""Weights that are not on every GPU all the time: what two real processes, and a swap of the experts, hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from plan_support import SIZE, allocated_peak, toy_recipe, zero_gradients

from likeness_trainer.config import TrainConfig
from likeness_trainer.learn.rollout import run_branches
from likeness_trainer.learn.update import ScoredTrajectory, step_terms
from likeness_trainer.planning.measure import measure
from likeness_trainer.planning.memory import MemoryPlan, memory_plan, model_bytes
from likeness_trainer.planning.meta_model import meta_module
from likeness_trainer.ranks import Ranks
from likeness_trainer.wan.module import WanModule
from likeness_trainer.wan.sharding import shard_experts

BATCH_1 = (
    "algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.branch_batch=1",
    "model.use_gradient_checkpointing=true",
)  # fmt: skip
SHARDED = (*BATCH_1, "parallel.sharding=fsdp2")
SWAPPED = (*BATCH_1, "memory.swap_idle_expert=true")


def planned(config: TrainConfig, gpus: int) -> MemoryPlan:
    model = meta_module(config)
    return memory_plan(config, model_bytes(model), measure(model, config, SIZE, lambda what: None), 0, gpus)


def measured(model: WanModule, config: TrainConfig, conditioning: Any, folder: Path) -> dict[str, int]:
    """Returns phase to the most bytes allocated in it, beyond those that were there before."""
    start = torch.randn(1, *conditioning.latent_shape)
    noise = torch.randn(3, 1, *conditioning.latent_shape)
    results = [run_branches(model, conditioning, start, noise, range(1))]
    sampling = allocated_peak(
        lambda: results.append(run_branches(model, conditioning, start, noise, range(1))), folder, without_scratch=True
    )
    trajectory = results[0][0]
    scored = ScoredTrajectory(trajectory, conditioning, torch.ones_like(trajectory.old_log_prob[0]))

    def learn() -> None:
        terms = step_terms(model, scored, 0, config.algorithm)
        (terms.policy_loss + terms.kl).backward()

    learn()
    return {"sampling": sampling, "update": allocated_peak(learn, folder, without_scratch=True)}


def _process(rank: int, store: str, results: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = toy_recipe(*SHARDED)
    model = WanModule(config.model, config.sampler)
    conditioning = model.encode("a portrait", np.zeros((64, 64, 3), np.uint8), *SIZE)
    model.drop_encoders()
    shard_experts(model, Ranks(rank=rank, world_size=2).mesh(), "cpu")
    zero_gradients(model)
    folder = Path(results) / str(rank)
    folder.mkdir()
    weights = sum(getattr(p, "_local_tensor", p).nbytes for p in model.pipe.parameters())
    torch.save({"weights": weights, **measured(model, config, conditioning, folder)}, folder / "bytes.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def test_each_of_two_sharded_processes_takes_the_planned_memory(tmp_path: Path) -> None:
    plan = planned(toy_recipe(*SHARDED), 2)
    multiprocessing.spawn(_process, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        real = torch.load(tmp_path / str(rank) / "bytes.pt")
        for phase in ("sampling", "update"):
            parts = plan.parts[phase]
            weights = sum(parts[name] for name in ("dit", "dit2", "vae", "LoRA"))
            assert weights == pytest.approx(real["weights"], rel=0.01)  # a last shard may be padded
            total = real["weights"] + real[phase]
            assert weights + parts["gathered"] + parts["activations"] == pytest.approx(total, rel=0.15), phase


def test_a_swap_holds_one_expert(tmp_path: Path) -> None:
    config = toy_recipe(*SWAPPED)
    plan = planned(config, 1)
    model = WanModule(config.model, config.sampler, memory=config.memory)
    conditioning = model.encode("a portrait", np.zeros((64, 64, 3), np.uint8), *SIZE)
    noise = torch.randn(1, *conditioning.latent_shape)

    def evaluate_both() -> None:
        with torch.no_grad():
            for step in (0, 7, 0):
                model.velocity(noise, step, conditioning)

    taken = allocated_peak(evaluate_both, tmp_path, without_scratch=True)
    parts = plan.parts["sampling"]
    assert parts["dit or dit2"] + parts["activations"] == pytest.approx(taken, rel=0.15)
    assert (
        plan.weights_on_host
        == sum(plan.parts["encoding"][name] for name in ("text_encoder", "vae")) + 2 * (parts["dit or dit2"])
    )
