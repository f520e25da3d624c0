"""One training run, from the recipe to the LoRA. Reads top to bottom.

A step: sample a group of videos for each prompt (shared prefix, stochastic branches), stream the decoded frames to the
reward service, turn the rewards into advantages inside each group, backpropagate the steps of the window one by one,
and let AdamW move the adapters. What this leaves out of GRPO: no value network, no length normalisation, no per-token
anything; a video is one decision per stochastic step and latent frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from likeness_reward.domain import VideoReward
from likeness_trainer.config import TrainConfig, dump_config
from likeness_trainer.errors import NonFiniteRunError, RewardUnavailableError
from likeness_trainer.evaluate import Evaluation
from likeness_trainer.learn.batch import rows_of_step
from likeness_trainer.learn.credit import (
    GroupScores,
    batch_deviations,
    group_scores,
    non_finite_component,
    weighted_advantages,
    weighted_value,
)
from likeness_trainer.learn.feedback_update import backpropagate_rewards
from likeness_trainer.learn.learner import Learner
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.prompts import PreparedPrompt, prepare_prompts
from likeness_trainer.learn.rollout import Trajectory, sample_group, send_decoded
from likeness_trainer.learn.update import ScoredTrajectory
from likeness_trainer.learn.window import Window, window_of
from likeness_trainer.preflight import Preflight
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import GroupDroppedError, GroupScoring, RewardLink
from likeness_trainer.run.checkpoint import Checkpoint, Retention, load_checkpoint, save_checkpoint
from likeness_trainer.run.environment import write_environment
from likeness_trainer.run.export import export_run_lora
from likeness_trainer.run.filmstrip import write_filmstrip
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.metrics import MetricsWriter, NoMetrics
from likeness_trainer.run.phase_clock import REWARD, PhaseClock
from likeness_trainer.run.progress import RunProgress
from likeness_trainer.run.report import write_report
from likeness_trainer.run.stop_signals import StopSignals
from likeness_trainer.run.trackers import open_trackers
from likeness_trainer.wan.decoding import NonFiniteFramesError
from likeness_trainer.wan.module import WanModule
from likeness_trainer.wan.sharding import shard_experts


def train(config: TrainConfig, ready: Preflight, resume: bool, progress: RunProgress) -> RunFolder:
    """Runs, or goes on with, the run that a recipe describes, and returns its folder.

    Raises:
        TrainerError, ModelLoadError: something the user can mend; nothing half-written stays.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder, link, server, ranks = ready.folder, ready.link, ready.server, ready.ranks
    progress.say(f"reward server {config.reward.endpoint}: pack {server.pack_name}, models {server.model_fingerprint}")

    model = load_model(config, ranks)
    if ranks.is_first:
        write_environment(folder.path, model.device)
    learner = Learner(model, config.optimizer, config.algorithm, ranks)
    start = restore(folder, learner, resume, progress)
    with progress.counting("preparing prompts", len(ranks.even_share(len(ready.dataset)))) as advance:
        prompts = prepare_prompts(model, link, ready.dataset, None, advance, ranks)
    evaluation = Evaluation(config, folder, link, model, ready.held_out, server.pack_name, progress, ranks)
    evaluation.prepare()
    if config.memory.drop_encoders:
        model.drop_encoders()
    evaluation.before(start)

    retention = Retention(config.keep_checkpoints, config.keep_every)

    def checkpoint(step: int) -> None:
        if ranks.is_first:
            state = learner.checkpoint(step)
            save_checkpoint(folder.checkpoints, state, retention, server.model_fingerprint, dump_config(config))
        ranks.barrier()

    with (
        open_metrics(config, folder, start if resume else None, ranks) as writer,
        progress.training(start, config.steps) as report_step,
        StopSignals() as stop,
    ):

        def show(step: int, frames: NDArray[np.uint8]) -> None:
            write_filmstrip(folder.samples / f"step-{step:06d}.png", frames)
            writer.show(step, frames, config.data.fps)

        for step in range(start, config.steps):
            try:
                metrics = train_step(config, step, model, learner, link, prompts, show)
            except RewardUnavailableError:
                checkpoint(step)
                raise
            done = step + 1
            writer.write(metrics)
            report_step(done, metrics)
            if learner.skipped_in_a_row >= config.max_skipped_steps:
                checkpoint(done - learner.skipped_in_a_row)
                raise NonFiniteRunError(non_finite_message(folder, learner.skipped_in_a_row, done, metrics))
            stop.requested = max(ranks.gather(stop.received))
            due = done % config.checkpoint_every == 0 and not learner.skipped_in_a_row
            if due or done == config.steps or stop.requested:
                checkpoint(done)
            stop.raise_if_requested(done, config.steps)

    with learner.evaluated():
        held_out = evaluation.after()
    link.close()
    if not ranks.is_first:
        return folder
    summary = {
        "steps": config.steps, "seed": config.seed, "lora_checksum": learner.checksum(),
        "reward_fingerprint": server.model_fingerprint, **held_out,
    }  # fmt: skip
    folder.write_summary(summary)
    export_run_lora(folder, config)
    write_report(folder.path)
    return folder


def train_step(
    config: TrainConfig,
    step: int,
    model: WanModule,
    learner: Learner,
    link: RewardLink,
    prompts: list[PreparedPrompt],
    show: Callable[[int, NDArray[np.uint8]], None],
) -> dict[str, Any]:
    """Makes one training step and returns its metrics; wall-clock values only under `seconds`.

    Args:
        show: takes the number of the step and a sampled video, at steps that make a checkpoint, on rank 0.
    """
    clock = PhaseClock()
    algorithm, ranks = config.algorithm, learner.ranks
    rows = rows_of_step(len(prompts), algorithm.groups_per_step, step, config.seed)
    window = window_of(model.schedule, algorithm.window, config.seed, step)
    rollouts = [
        roll_out(config, step, place, model, prompts[rows[place]], link, clock, window)
        for place in (ranks.even_share(len(rows)) if algorithm.name != "reward_feedback" else [])
    ]
    feedback = None
    if algorithm.name != "policy_gradient":
        weight = algorithm.feedback.weight if algorithm.name == "hybrid" else 1.0
        with clock.phase("feedback"):
            seed = (config.seed, "feedback", step)
            chosen = [prompts[row] for row in rows]
            feedback = backpropagate_rewards(model, link, chosen, algorithm, seed, weight, ranks)
    preview = rollouts[0].preview if rollouts else feedback.preview if feedback is not None else None
    if ranks.is_first and (step + 1) % config.checkpoint_every == 0 and preview is not None:
        show(step + 1, preview)
    with clock.phase(REWARD), ranks.together():
        groups, fault = collect_rewards(rollouts, config)
    clock.note_reward_latency(sum(group.rollout.group.latency_s for group in groups))
    shared = share_rewards(groups, fault, algorithm, ranks)
    batches, equal = ([], 0) if shared.fault else scored_trajectories(groups, shared, algorithm, model.device)
    equal = sum(ranks.gather(equal))
    if ranks.sharded and rollouts and not shared.fault:
        batches += uncounted_evaluations(rollouts[0], max(ranks.gather(len(batches))) - len(batches), model.device)
    with clock.phase("update"):
        update = learner.update(batches, step, shared.fault, feedback)
    rewards = shared.rewards + (feedback.rewards if feedback is not None else [])
    sampled = len(rows) if algorithm.name != "reward_feedback" else 0
    dropped = sampled - len(shared.rewards) + (feedback.dropped if feedback is not None else 0)
    return {
        "step": step + 1, **reward_metrics(rewards, algorithm), "groups_dropped": dropped,
        "groups_without_variance": equal, **update, "seconds": clock.seconds(),
    }  # fmt: skip


@dataclass(frozen=True)
class Rollout:
    """One group: sampled, sent, its rewards still to come."""

    place: int
    """Index among the groups of the step, over all ranks."""
    prompt: PreparedPrompt
    group: GroupScoring
    trajectories: list[Trajectory]
    preview: NDArray[np.uint8] | None
    """Frames of the first sample, uint8 RGB [T, H, W, 3]; None when the group has a fault."""
    fault: str | None = None
    """What of the sampled frames is not finite."""


@dataclass(frozen=True)
class RewardedGroup:
    """A group whose rewards have all come and are finite."""

    rollout: Rollout
    rewards: list[VideoReward]
    scores: GroupScores


def collect_rewards(rollouts: list[Rollout], config: TrainConfig) -> tuple[list[RewardedGroup], str | None]:
    """Waits for the rewards; returns the groups that have them, and what is not finite, named by its row, or None."""
    groups: list[RewardedGroup] = []
    faults = [rollout.fault for rollout in rollouts if rollout.fault is not None]
    for rollout in rollouts:
        if rollout.fault is not None:
            continue
        try:
            rewards = rollout.group.results()
        except GroupDroppedError:
            continue
        scores = group_scores(rewards, config.algorithm, config.reward.no_face_value)
        broken = non_finite_component(scores)
        if broken is None:
            groups.append(RewardedGroup(rollout, rewards, scores))
        else:
            faults.append(f"the reward component {broken} of row {rollout.prompt.row} is not finite")
    return groups, faults[0] if faults else None


@dataclass(frozen=True)
class SharedRewards:
    """What every rank knows of the rewards of a step: the same as one process would."""

    rewards: list[list[VideoReward]]
    """Of all groups that have them, in the order of the step."""
    deviations: dict[str, NDArray[np.float64]] | None
    """Standard deviations over all groups, where the algorithm divides by them."""
    fault: str | None
    """What is not finite on any rank."""


def share_rewards(
    groups: list[RewardedGroup], fault: str | None, algorithm: PolicyGradientConfig, ranks: Ranks
) -> SharedRewards:
    """Returns what the ranks' rewards come to together."""
    parts = ranks.gather((fault, [(group.rollout.place, group.rewards, group.scores) for group in groups]))
    everyone = sorted((group for _, part in parts for group in part), key=lambda group: group[0])
    needed = everyone and algorithm.scale == "batch"
    return SharedRewards(
        [rewards for _, rewards, _ in everyone],
        batch_deviations([scores for _, _, scores in everyone]) if needed else None,
        next((found for found, _ in parts if found is not None), None),
    )


def uncounted_evaluations(rollout: Rollout, count: int, device: torch.device) -> list[ScoredTrajectory]:
    """Returns what a rank evaluates beside its own: all ranks must evaluate a sharded model equally often."""
    trajectory, conditioning = rollout.trajectories[0], rollout.prompt.conditioning.to(device)
    advantages = torch.zeros_like(trajectory.old_log_prob[0])
    return [ScoredTrajectory(trajectory, conditioning, advantages, counted=False)] * count


def scored_trajectories(
    groups: list[RewardedGroup], shared: SharedRewards, algorithm: PolicyGradientConfig, device: torch.device
) -> tuple[list[ScoredTrajectory], int]:
    """Returns the trajectories with their advantages, and how many groups were left out: their rewards are equal."""
    batches: list[ScoredTrajectory] = []
    without_variance = 0
    for group in groups:
        advantages = weighted_advantages(group.scores, algorithm, shared.deviations)
        if not advantages.any():
            without_variance += 1
            continue
        conditioning = group.rollout.prompt.conditioning.to(device)
        trajectories = group.rollout.trajectories
        batches += [ScoredTrajectory(t, conditioning, advantages[list(t.samples)]) for t in trajectories]
    return batches, without_variance


def non_finite_message(folder: RunFolder, skipped: int, step: int, metrics: dict[str, Any]) -> str:
    """Returns what is told when a run stops because nothing finite comes any more."""
    return (
        f"stopped after step {step}: {skipped} steps in a row were skipped, the last because "
        f"{metrics['skipped_because']}. {folder.latest_checkpoint()} holds the adapters as the last finite step left "
        "them; a new run with a lower optimizer.learning_rate or model.torch_dtype=float32 may help"
    )


def roll_out(
    config: TrainConfig,
    step: int,
    place: int,
    model: WanModule,
    prompt: PreparedPrompt,
    link: RewardLink,
    clock: PhaseClock,
    window: Window,
) -> Rollout:
    """Samples one group; each chunk of frames goes out as the VAE finishes it, while the next branch is computed."""
    algorithm = config.algorithm
    shape = (prompt.num_frames, prompt.height, prompt.width)
    group = link.open_group(prompt.identity, algorithm.group_size, shape, reference_motion=prompt.reference_motion)
    preview: list[NDArray[np.uint8]] = []

    def send(sample: int, first_frame: int, frames: NDArray[np.uint8]) -> None:
        group.put(sample, first_frame, frames)
        if sample == 0:
            preview.append(frames)

    conditioning = prompt.conditioning.to(model.device)
    seed = (config.seed, "rollout", step, place)
    batches = sample_group(model, conditioning, algorithm.group_size, algorithm.branch_batch, seed, window)
    trajectories: list[Trajectory] = []
    while True:
        with clock.phase("sample"):
            batch = next(batches, None)
        if batch is None:
            return Rollout(place, prompt, group, trajectories, np.concatenate(preview))
        trajectory, latents = batch
        trajectories.append(trajectory)
        try:
            with clock.phase("decode"):
                send_decoded(model, latents, trajectory.samples, send)
        except NonFiniteFramesError as error:
            group.abandon()
            for _ in batches:  # a sharded model needs every rank in every evaluation
                pass
            return Rollout(place, prompt, group, trajectories, None, f"row {prompt.row}: {error}")


def reward_metrics(rewards: list[list[VideoReward]], algorithm: PolicyGradientConfig) -> dict[str, float | None]:
    """Returns means over all videos of a step, and the spread inside the groups; None when every group was dropped."""
    videos = [reward for group in rewards for reward in group]
    if not videos:
        return {"reward": None, "reward_std_in_group": None, "coverage": None}
    values = [[weighted_value(reward, algorithm) for reward in group] for group in rewards]
    names = [component.name for component in videos[0].components]
    components = {f"reward/{name}": float(np.mean([video.component(name) for video in videos])) for name in names}
    return {
        "reward": float(np.mean(np.concatenate(values))),
        "reward_std_in_group": float(np.mean([np.std(group) for group in values])),
        "coverage": float(np.mean([video.coverage for video in videos])),
        **components,
    }


def restore(folder: RunFolder, learner: Learner, resume: bool, progress: RunProgress) -> int:
    """Returns the step to start with, after loading the newest checkpoint of a resumed run."""
    checkpoint = learner.ranks.from_first(lambda: newest_checkpoint(folder) if resume else None)
    if checkpoint is not None:
        learner.restore(checkpoint)
        progress.say(f"resuming {folder.path} after step {checkpoint.step}")
    learner.require_equal_adapters()
    return 0 if checkpoint is None else checkpoint.step


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """Returns the newest checkpoint of a run, None where there is none yet."""
    latest = folder.latest_checkpoint()
    return None if latest is None else load_checkpoint(latest)


def load_model(config: TrainConfig, ranks: Ranks) -> WanModule:
    """Returns the model on this rank's device; with sharding each rank keeps its part of the DiTs there."""
    device = ranks.device_of(config.model.device)
    first = "cpu" if ranks.sharded else device  # no GPU need hold all weights of a model that will be sharded
    model = WanModule(config.model.model_copy(update={"device": first}), config.sampler, config.seed, config.memory)
    if ranks.sharded:
        shard_experts(model, ranks.mesh(), device)
    return model


def open_metrics(
    config: TrainConfig, folder: RunFolder, resume_step: int | None, ranks: Ranks
) -> MetricsWriter | NoMetrics:
    """Returns the writer of metrics.jsonl, TensorBoard and the recipe's trackers; on other ranks one that is silent."""
    if not ranks.is_first:
        return NoMetrics()
    trackers = open_trackers(config.tracking, folder.path, config.model_dump())
    return MetricsWriter(folder.path, resume_step, trackers)
