"""Ratios measured side by side in one run, on the toy world. Seconds mean little on a shared machine; ratios do.

`make bench`. Each pair is timed alternately, five times; the table shows the medians and their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import likeness_toyworld as toyworld
from likeness_reward.client import RewardClient
from likeness_reward.many import VideoToScore
from likeness_toyworld import painter
from likeness_trainer.demo import reward_server
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import run_branches, run_prefix, sample_group, sample_latents
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients, objective_terms
from likeness_trainer.wan.model_config import WanModelConfig
from likeness_trainer.wan.module import WanModule
from likeness_trainer.wan.sampler_config import SamplerConfig

REPEATS = 5
GROUP = 8


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    model = load_model()
    motion = painter.sample_motion(np.random.default_rng(3))
    frames = painter.paint_clip(painter.sample_identity(3), motion, 9, 64)[0]
    conditioning = model.encode("a portrait of a person", frames[0], 9, 64, 64)
    table = Table("what", "baseline", "seconds", "ours", "seconds", "baseline / ours")
    for row in (*sampling_rows(model, conditioning), *update_rows(model, conditioning), *transport_rows(frames)):
        table.add_row(*row)
    Console().print(table)


def load_model() -> WanModule:
    """Returns the toy model."""
    config = WanModelConfig(
        model_paths=toyworld.model_paths(), tokenizer_path=toyworld.tokenizer_path(), lora_rank=16,
        torch_dtype="float32", device="cpu", use_gradient_checkpointing=False,
    )  # fmt: skip
    return WanModule(config, SamplerConfig())


def compare(what: str, baseline: tuple[str, Callable[[], Any]], ours: tuple[str, Callable[[], Any]]) -> tuple[str, ...]:
    """Returns a row of the table: the two are timed in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for place, (_, work) in enumerate((baseline, ours)):
            start = time.perf_counter()
            work()
            seconds[place].append(time.perf_counter() - start)
    slow, fast = statistics.median(seconds[0]), statistics.median(seconds[1])
    return what, baseline[0], f"{slow:.3f}", ours[0], f"{fast:.3f}", f"{slow / fast:.2f}"


def sampling_rows(model: WanModule, conditioning: Any) -> list[tuple[str, ...]]:
    """Shared prefix against whole chains; batched branches against single ones."""
    shape = conditioning.latent_shape

    def whole_chains() -> None:
        for sample in range(GROUP):
            start = run_prefix(model, conditioning, gaussian_noise((1, *shape), "bench", sample))
            noise = gaussian_noise((len(model.schedule.stochastic_steps), 1, *shape), "bench", sample)
            run_branches(model, conditioning, start, noise, range(1))

    def group(batch: int) -> Callable[[], None]:
        return lambda: [None for _ in sample_group(model, conditioning, GROUP, batch, ("bench",))][0]

    latents = sample_latents(model, conditioning, gaussian_noise((1, *shape), "bench"))
    return [
        compare("sample a group of 8", ("prefix for each", whole_chains), ("shared prefix", group(1))),
        compare("sample a group of 8", ("branch by branch", group(1)), ("8 at once", group(GROUP))),
        compare(
            "first pixels of a video",
            ("whole decode", lambda: list(model.decode(latents))),
            ("first latent frame", lambda: next(model.decode(latents))),
        ),
    ]


def update_rows(model: WanModule, conditioning: Any) -> list[tuple[str, ...]]:
    """One backward of everything against one a step: time; the memory is in the tests."""
    config = PolicyGradientConfig(group_size=GROUP)
    advantages = torch.linspace(-1, 1, GROUP)[:, None].repeat(1, conditioning.latent_shape[1])
    batches = [
        ScoredTrajectory(trajectory, conditioning, advantages[list(trajectory.samples)])
        for trajectory, _ in sample_group(model, conditioning, GROUP, GROUP, ("bench",))
    ]

    def at_once() -> None:
        torch.stack([term for term, _, _ in objective_terms(model, batches, config)]).sum().backward()

    def by_step() -> None:
        accumulate_gradients(model, batches, config)

    return [compare("gradients of a group of 8", ("one backward", at_once), ("step by step", by_step))]


def transport_rows(frames: np.ndarray) -> list[tuple[str, ...]]:
    """One stream for a group against one call a video, on loopback."""
    with reward_server(Path(toyworld.face_pack_path()), Path("runs/bench")) as endpoint:
        client = RewardClient(endpoint)
        identity = client.embed_identity(list(frames))

        def calls() -> None:
            for _ in range(GROUP):
                client.score(frames, identity)

        def stream() -> None:
            list(client.score_many([VideoToScore(str(index), frames, identity) for index in range(GROUP)]))

        return [compare("score 8 videos", ("one call each", calls), ("one stream", stream))]


if __name__ == "__main__":
    main()
