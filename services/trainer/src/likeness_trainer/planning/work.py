"""DiT evaluations and FLOPs of one training step, by phase, and what the shared prefix and the window save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from likeness_trainer.config import TrainConfig
from likeness_trainer.learn.window import Window, windows_of
from likeness_trainer.planning.measure import Measurement, trained_steps
from likeness_trainer.wan.module import WanModule


@dataclass(frozen=True)
class PhaseWork:
    """Work of one phase of a step, over all GPUs."""

    evaluations: float
    """Forward passes of a DiT for one video; a fraction where the window is drawn at random. The recomputation of
    checkpointed blocks counts as FLOPs only."""
    flops: float


@dataclass(frozen=True)
class Savings:
    """What the algorithm does not compute."""

    rollout_evaluations: float
    """DiT evaluations that the rollout of one group takes."""
    independent_evaluations: float
    """The same without a shared prefix: every sample from noise."""
    trained_evaluations: float
    """Evaluations with gradient that one sample takes in an update."""
    whole_chain_evaluations: float
    """The same if every step of the chain was trained."""
    graph_bytes: int
    """Graph that is held before a backward pass: that of one step of the window."""
    window_graph_bytes: int
    """The same if the steps of the window were backpropagated at once."""


def step_work(config: TrainConfig, model: WanModule, measured: Measurement) -> dict[str, PhaseWork]:
    """Returns phase to work of one training step, groups without variance included."""
    algorithm = config.algorithm
    work: dict[str, PhaseWork] = {}
    if algorithm.name != "reward_feedback":
        groups, samples = algorithm.groups_per_step, algorithm.groups_per_step * algorithm.group_size
        windows = windows_of(model.schedule, algorithm.window)
        batch = algorithm.branch_batch

        def forward(steps: Callable[[Window], Iterable[int]], videos: int) -> PhaseWork:
            costs = [[measured.forward[model.expert_name(step)] for step in steps(window)] for window in windows]
            return PhaseWork(
                videos * fmean(sum(cost.evaluations for cost in window) for window in costs),
                videos * fmean(sum(cost.flops for cost in window) for window in costs),
            )

        work["shared prefix"] = forward(lambda window: range(window.start), groups)
        work["branches"] = forward(lambda window: range(window.start, model.schedule.final + 1), samples)
        work["decoding"] = PhaseWork(0, measured.decoding.flops * samples / batch)
        learned = [
            [measured.update[model.expert_name(step)] for step in trained_steps(window, algorithm.kl_weight)]
            for window in windows
        ]
        passes = samples * algorithm.updates_per_rollout
        work["update"] = PhaseWork(
            passes * fmean(sum(cost.evaluations for cost in window) for window in learned),
            passes * fmean(sum(cost.flops for cost in window) for window in learned) / batch,
        )
    if measured.feedback is not None:
        feedback, prompts = measured.feedback, algorithm.groups_per_step
        work["feedback"] = PhaseWork(
            prompts * algorithm.feedback.samples * feedback.evaluations, prompts * feedback.flops
        )
    return work


def savings(config: TrainConfig, model: WanModule, measured: Measurement) -> Savings | None:
    """Returns what the shared prefix, the window and the backward pass step by step save; None for reward feedback."""
    algorithm = config.algorithm
    if algorithm.name == "reward_feedback":
        return None
    windows = windows_of(model.schedule, algorithm.window)

    def evaluations(steps: Iterable[int]) -> int:
        return sum(measured.forward[model.expert_name(step)].evaluations for step in steps)

    chain = range(model.schedule.final + 1)
    rollout = fmean(
        evaluations(chain[: window.start]) + algorithm.group_size * evaluations(chain[window.start :])
        for window in windows
    )
    trained = fmean(evaluations(trained_steps(window, algorithm.kl_weight)) for window in windows)
    steps = fmean(len(trained_steps(window, algorithm.kl_weight)) for window in windows)
    return Savings(
        rollout, algorithm.group_size * evaluations(chain), trained, evaluations(chain),
        measured.graph_bytes, round(measured.graph_bytes * steps),
    )  # fmt: skip
