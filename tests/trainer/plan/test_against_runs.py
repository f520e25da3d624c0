"""The plan's arithmetic against real runs of the toy: memory within 15 %, FLOPs within 5 %."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_support import SIZE, allocated_peak, toy_recipe, zero_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from likeness_trainer.config import TrainConfig
from likeness_trainer.learn.learner import Learner
from likeness_trainer.learn.reward_feedback import window_in_graph
from likeness_trainer.learn.rollout import run_branches, sample_group, send_decoded
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients, step_terms
from likeness_trainer.planning.measure import Measurement, measure
from likeness_trainer.planning.memory import memory_plan, model_bytes
from likeness_trainer.planning.meta_model import meta_conditioning, meta_module
from likeness_trainer.planning.work import step_work
from likeness_trainer.wan.decoding import decode_latent_frames
from likeness_trainer.wan.module import WanModule

PHASES = {
    "the recipe": (),
    "checkpointed, two at once": ("model.use_gradient_checkpointing=true", "algorithm.branch_batch=2"),
    "without divergence": ("algorithm.kl_weight=0", "algorithm.branch_batch=2"),
    "bfloat16": ("model.torch_dtype=bfloat16", "algorithm.branch_batch=3"),
    "both experts": ("sampler.mid_timestep=1", "algorithm.branch_batch=2"),
}


def planned(config: TrainConfig) -> tuple[WanModule, Measurement]:
    model = meta_module(config)
    return model, measure(model, config, SIZE, lambda what: None)


def loaded(config: TrainConfig) -> tuple[WanModule, Any]:
    """Returns the toy with its weights, and the conditioning of a grey picture."""
    model = WanModule(config.model, config.sampler)
    zero_gradients(model)
    return model, model.encode("a portrait", np.full((64, 64, 3), 99, np.uint8), *SIZE)


def test_the_conditioning_has_the_shapes_that_encoding_gives() -> None:
    config = toy_recipe("model.torch_dtype=bfloat16")
    _, real = loaded(config)
    meta = meta_conditioning(meta_module(config), *SIZE)
    assert meta.latent_shape == real.latent_shape
    assert meta.inputs.keys() == real.inputs.keys()
    for name, value in real.inputs.items():
        assert (meta.inputs[name].shape, meta.inputs[name].dtype) == (value.shape, value.dtype), name


@pytest.mark.parametrize("overrides", PHASES.values(), ids=PHASES.keys())
def test_each_phase_takes_the_planned_memory(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = toy_recipe(*overrides)
    _, costs = planned(config)
    model, conditioning = loaded(config)
    batch, stochastic = config.algorithm.branch_batch, len(model.schedule.stochastic_steps)
    start = torch.randn(1, *conditioning.latent_shape)
    noise = torch.randn(stochastic, batch, *conditioning.latent_shape)
    results: list[Any] = []

    def sample() -> None:
        results.append(run_branches(model, conditioning, start, noise, range(batch)))

    narrow = model.dtype != torch.float32  # then several operations of CPUs take scratch memory
    assert costs.sampling.peak_bytes == pytest.approx(allocated_peak(sample, tmp_path, narrow), rel=0.15)
    trajectory, latents = results.pop()
    with torch.no_grad():
        decoding = allocated_peak(lambda: list(map(id, decode_latent_frames(model.pipe.vae, latents))), tmp_path, True)
    assert costs.decoding.peak_bytes == pytest.approx(decoding, rel=0.15)

    scored = ScoredTrajectory(trajectory, conditioning, torch.ones_like(trajectory.old_log_prob[0]))

    def update() -> None:
        terms = step_terms(model, scored, stochastic - 1, config.algorithm)
        (terms.policy_loss + config.algorithm.kl_weight * terms.kl).backward()

    expert = model.expert_name(model.schedule.final - 1)
    assert costs.update[expert].peak_bytes == pytest.approx(allocated_peak(update, tmp_path, narrow), rel=0.15)


def test_two_whole_steps_take_the_planned_memory(tmp_path: Path) -> None:
    """Groups, latents, gradients and moments together, as they are from the second step on."""
    config = toy_recipe(
        "algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.branch_batch=2", "model.lora_rank=64"
    )
    meta, costs = planned(config)
    memory = memory_plan(config, model_bytes(meta), costs, 0, 1)
    model, conditioning = loaded(config)
    at_first = memory.parts["encoding"]
    weights = [at_first[part] for part in ("dit", "dit2", "text_encoder", "vae", "LoRA")]
    assert sum(weights) == sum(parameter.nbytes for parameter in model.pipe.parameters())
    model.drop_encoders()
    there_before = sum(memory.parts["update"][part] for part in ("dit", "dit2", "vae", "LoRA", "gradients"))
    assert there_before == sum(p.nbytes for p in model.pipe.parameters()) + memory.parts["update"]["gradients"]
    learner = Learner(model, config.optimizer, config.algorithm)

    def steps() -> None:
        for step in range(2):
            scored = []
            for group in range(2):
                for trajectory, latents in sample_group(model, conditioning, 2, 2, (step, group)):
                    send_decoded(model, latents, trajectory.samples, lambda *chunk: None)
                    scored.append(ScoredTrajectory(trajectory, conditioning, torch.randn(2, 3)))
            learner.update(scored, step)

    taken = allocated_peak(steps, tmp_path, without_scratch=True)
    assert memory.peak - there_before == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_reward_feedback_takes_the_planned_memory(checkpointing: bool, tmp_path: Path) -> None:
    setting = f"model.use_gradient_checkpointing={checkpointing}"
    config = toy_recipe("algorithm.name=reward_feedback", setting)
    _, costs = planned(config)
    assert costs.feedback is not None
    model, conditioning = loaded(config)
    noise = torch.randn(1, *conditioning.latent_shape)

    def learn() -> None:
        latents, kl = window_in_graph(model, conditioning, noise, config.algorithm.feedback)
        chunks = decode_latent_frames(model.pipe.vae, latents, checkpointing=checkpointing)
        (torch.cat(list(chunks), dim=2).sum() + kl.sum()).backward()

    taken = allocated_peak(learn, tmp_path, without_scratch=True)
    assert costs.feedback.peak_bytes == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.use_gradient_checkpointing=true", "algorithm.kl_weight=0"), ("sampler.mid_timestep=1",)],
    ids=["the recipe", "checkpointed without divergence", "both experts"],
)
def test_a_step_takes_the_planned_flops_and_evaluations(overrides: tuple[str, ...]) -> None:
    """torch's counter has no formula for the CPU's fused attention: the run uses the one that is made of products."""
    config = toy_recipe("algorithm.groups_per_step=1", "algorithm.branch_batch=3", *overrides)
    meta, costs = planned(config)
    work = step_work(config, meta, costs)
    model, conditioning = loaded(config)
    evaluated = 0
    model_fn = model.pipe.model_fn

    def counted(**inputs: Any) -> Any:
        nonlocal evaluated
        evaluated += inputs["latents"].shape[0]
        return model_fn(**inputs)

    model.pipe.model_fn = counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        scored = []
        for trajectory, latents in sample_group(model, conditioning, 8, 3, ("flops",)):
            send_decoded(model, latents, trajectory.samples, lambda *chunk: None)
            scored.append(ScoredTrajectory(trajectory, conditioning, torch.randn(len(trajectory.samples), 3)))
        rollout = counter.get_total_flops()
        accumulate_gradients(model, scored, config.algorithm)
    update = counter.get_total_flops() - rollout
    assert sum(work[name].flops for name in ("shared prefix", "branches", "decoding")) == pytest.approx(
        rollout, rel=0.05
    )
    assert work["update"].flops == pytest.approx(update, rel=0.05)
    assert sum(phase.evaluations for phase in work.values()) == evaluated
