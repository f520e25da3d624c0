"""What each kind of work in a training step costs, measured by running the trainer's own code on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from likeness_trainer.config import TrainConfig
from likeness_trainer.learn.reward_feedback import window_in_graph
from likeness_trainer.learn.rollout import Trajectory, ode_step, run_branches
from likeness_trainer.learn.update import ScoredTrajectory, step_terms
from likeness_trainer.learn.window import Window, windows_of
from likeness_trainer.planning.meta_model import encode_first_frame, encode_prompt, meta_conditioning, parts_of
from likeness_trainer.planning.meter import Meter, as_on_a_gpu
from likeness_trainer.wan.decoding import decode_latent_frames
from likeness_trainer.wan.model_config import EXPERTS
from likeness_trainer.wan.module import Conditioning, WanModule

T = TypeVar("T")
Say = Callable[[str], None]
"""Takes what is being measured, for people who wait."""


@dataclass(frozen=True)
class Cost:
    """What a piece of work costs beyond what was there before it."""

    flops: int
    evaluations: int
    """Calls of the DiT, those that recompute a checkpointed one left out where only its blocks are checkpointed."""
    peak_bytes: int
    """Most memory at once on the device."""
    kept_bytes: int
    """Memory on the device that its result holds."""
    host_bytes: int
    """Most memory at once of the machine, for checkpoints that were moved there."""


@dataclass(frozen=True)
class Measurement:
    """Costs of one recipe's kinds of work."""

    forward: dict[str, Cost]
    """Expert to one deterministic step of one video."""
    sampling: Cost
    """The branches of one batch, from the shared latents to the latents of the videos."""
    decoding: Cost
    """The decoding of one batch."""
    update: dict[str, Cost]
    """Expert to one step of the window for one batch: forward, reference and backward."""
    graph_bytes: int
    """Memory that the graph of one step of the window holds before its backward pass."""
    feedback: Cost | None
    """The videos of one prompt whose reward is differentiated, with the backward pass; None without reward feedback."""
    encoding: Cost
    """Prompt and first frame of one row."""
    optimizer: Cost
    trajectory_bytes: int
    """What the update needs of one sample."""
    conditioning_bytes: int
    """What the DiT is told about one row."""


def measure(model: WanModule, config: TrainConfig, size: tuple[int, int, int], say: Say) -> Measurement:
    """Returns the costs of a recipe.

    Args:
        model: as `meta_module` gives it, of a recipe whose weights and adapters are the same.
        size: frames, height and width of the videos.
    """
    model.config = config.model.model_copy(update={"device": "meta"})
    for parameter in model.lora_parameters():
        parameter.grad = torch.zeros_like(parameter)
    conditioning = meta_conditioning(model, *size)
    bench = _Bench(model, config, conditioning, say)
    encoding = bench.encoding(size)
    forward = {expert: bench.forward(step) for expert, step in bench.first_steps(range(model.schedule.final + 1))}
    sampling, trajectory, latents = bench.sampling()
    decoding = bench.decoding(latents)
    update, graph_bytes = bench.update(trajectory)
    batch = len(trajectory.samples)
    return Measurement(
        forward, sampling, decoding, update, graph_bytes, bench.feedback(), encoding, bench.optimizer(),
        _bytes(_tensors_of(trajectory)) // batch, _bytes(_values(conditioning)),
    )  # fmt: skip


class _Bench:
    """The kinds of work, each run once."""

    def __init__(self, model: WanModule, config: TrainConfig, conditioning: Conditioning, say: Say) -> None:
        self.model = model
        self.config = config
        self.conditioning = conditioning
        self.say = say
        self.window = max(windows_of(model.schedule, config.algorithm.window), key=lambda w: len(w.stochastic))

    def first_steps(self, steps: Iterable[int]) -> list[tuple[str, int]]:
        """Returns each expert that some of the steps use, with the first that does."""
        found: dict[str, int] = {}
        for step in steps:
            found.setdefault(self.model.expert_name(step), step)
        return list(found.items())

    def encoding(self, size: tuple[int, int, int]) -> Cost:
        self.say("encoding of prompt and first frame")

        def encode() -> Any:
            prompts = [encode_prompt(self.model) for _ in range(2 if self.model.sampler.guided else 1)]
            return prompts, encode_first_frame(self.model, *size)

        with torch.no_grad():
            cost, _ = self._run(encode)
        self.model.pipe.vae.model.clear_cache()
        return cost

    def forward(self, step: int) -> Cost:
        self.say(f"one evaluation of {self.model.expert_name(step)}")
        latents = self._latents(1)
        with torch.no_grad():
            cost, _ = self._run(lambda: ode_step(self.model, latents, step, self.conditioning), latents)
        return cost

    def sampling(self) -> tuple[Cost, Trajectory, Tensor]:
        self.say("the branches of a group")
        batch = self.config.algorithm.branch_batch
        start = self._latents(1)
        noise = torch.empty(len(self.window.stochastic), batch, *self.conditioning.latent_shape)
        cost, (trajectory, latents) = self._run(
            lambda: run_branches(self.model, self.conditioning, start, noise, range(batch), self.window), start
        )
        return cost, trajectory, latents

    def decoding(self, latents: Tensor) -> Cost:
        self.say("decoding")

        def decode() -> None:
            for _ in decode_latent_frames(self.model.pipe.vae, latents):
                pass

        with torch.no_grad():
            cost, _ = self._run(decode, latents)
        return cost

    def update(self, trajectory: Trajectory) -> tuple[dict[str, Cost], int]:
        """Returns expert to cost, and the bytes that the largest graph held before its backward pass."""
        algorithm = self.config.algorithm
        advantages = torch.empty_like(trajectory.old_log_prob[0])
        scored = ScoredTrajectory(trajectory, self.conditioning, advantages)
        known = [*_tensors_of(trajectory), advantages]
        costs: dict[str, Cost] = {}
        held: list[int] = []
        for expert, step in self.first_steps(trained_steps(self.window, algorithm.kl_weight)):
            self.say(f"one step of the update of {expert}")

            def learn(meter: Meter, index: int = self.window.trained.index(step)) -> None:
                terms = step_terms(self.model, scored, index, algorithm)
                loss = terms.policy_loss + algorithm.kl_weight * terms.kl
                if loss.requires_grad:  # not at the steps of an expert that is not trained
                    held.append(meter.live_bytes)
                    loss.backward()

            costs[expert], _ = self._run_metered(learn, known)
        return costs, max(held)

    def feedback(self) -> Cost | None:
        algorithm = self.config.algorithm
        if algorithm.name == "policy_gradient":
            return None
        self.say("reward feedback of one prompt")
        noise = self._latents(algorithm.feedback.samples)
        vae = self.model.pipe.vae
        checkpointing = self.model.config.use_gradient_checkpointing
        offload = checkpointing and self.model.config.use_gradient_checkpointing_offload

        def learn() -> None:
            with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
                latents, kl = window_in_graph(self.model, self.conditioning, noise, algorithm.feedback)
            pixels = torch.cat(list(decode_latent_frames(vae, latents, checkpointing, offload)), dim=2)
            (pixels.sum() + kl.sum()).backward()

        cost, _ = self._run(learn, noise)
        return cost

    def optimizer(self) -> Cost:
        parameters = self.model.lora_parameters()
        optimizer = torch.optim.AdamW(parameters, foreach=self.config.model.device != "cpu")
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        cost, _ = self._run(optimizer.step, *moments)
        return cost

    def _latents(self, batch: int) -> Tensor:
        return torch.empty(batch, *self.conditioning.latent_shape, device=self.model.device)

    def _run(self, work: Callable[[], T], *known: Tensor) -> tuple[Cost, T]:
        return self._run_metered(lambda meter: work(), known)

    def _run_metered(self, work: Callable[[Meter], T], known: Iterable[Tensor]) -> tuple[Cost, T]:
        model = self.model
        gradients = (parameter.grad for parameter in model.lora_parameters())
        dits: list[Any] = [part for role, part in parts_of(model).items() if role in EXPERTS]
        positions = (position for dit in dits for position in dit.freqs)
        inputs = _values(self.conditioning)
        there = chain(model.pipe.parameters(), model.pipe.buffers(), positions, gradients, inputs, known)
        meter = Meter(model.device, (tensor for tensor in there if isinstance(tensor, Tensor)))
        evaluations = 0
        model_fn = model.pipe.model_fn

        def counted(**inputs: Any) -> Any:
            nonlocal evaluations
            evaluations += 1
            return model_fn(**inputs)

        model.pipe.model_fn = counted
        try:
            with as_on_a_gpu(meter), meter:
                result = work(meter)
        finally:
            model.pipe.model_fn = model_fn
        cost = Cost(meter.flops, evaluations, meter.peak_bytes, meter.live_bytes, meter.peak_host_bytes)
        return cost, result


def trained_steps(window: Window, kl_weight: float) -> tuple[int, ...]:
    """Returns the steps that the update evaluates: without a divergence the stochastic ones only."""
    return window.trained if kl_weight > 0 else window.stochastic


def _tensors_of(trajectory: Trajectory) -> list[Tensor]:
    return [*trajectory.inputs, *trajectory.old_mean, *trajectory.old_log_prob]


def _values(conditioning: Conditioning) -> list[Any]:
    return [*conditioning.inputs.values(), *conditioning.negative_inputs.values()]


def _bytes(values: Iterable[Any]) -> int:
    """Returns the bytes of the tensors among the values, each memory once."""
    storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor)}
    return sum(storages.values())
