"""Held-out evaluation: the same people and the same noise, with and without the adapters, paired."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import MOTION_COMPONENT, VideoReward
from likeness_trainer.config import EvaluationConfig, TrainConfig
from likeness_trainer.data.dataset import Dataset
from likeness_trainer.errors import ConfigError
from likeness_trainer.learn.prompts import PreparedPrompt, prepare_prompts
from likeness_trainer.learn.rollout import sample_latents, send_decoded
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.preflight import load_held_out
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import GroupScoring, RewardConfig, RewardLink
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.progress import RunProgress
from likeness_trainer.run.report import write_report
from likeness_trainer.run.sampling import load_trained
from likeness_trainer.run.statistics import paired_bootstrap
from likeness_trainer.wan.module import WanModule

_COMPONENT_PREFIX = "component/"


@dataclass(frozen=True)
class HeldOutVideos:
    """Videos sampled for the pairs, and what the reward of the run says of them."""

    frames: NDArray[np.uint8]
    """[N, T, H, W, 3], RGB."""
    similarity: NDArray[np.float64]
    """[N, T], NaN where no face was found."""
    values: NDArray[np.float64]
    """[N], the rewards: no-face frames counted."""
    components: dict[str, NDArray[np.float64]]
    """Each part of the reward by name: [N]."""

    @property
    def coverage(self) -> float:
        """Share of frames with a face."""
        return float(np.isfinite(self.similarity).mean())

    def save(self, path: Path, first_frames: NDArray[np.uint8]) -> None:
        """Writes the videos and scores for the report."""
        temporary = path.with_suffix(".partial.npz")
        components: dict[str, Any] = {_COMPONENT_PREFIX + name: values for name, values in self.components.items()}
        np.savez_compressed(
            temporary, frames=self.frames, similarity=self.similarity, values=self.values, first_frames=first_frames,
            **components,
        )  # fmt: skip
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> HeldOutVideos:
        """Returns what `save` wrote."""
        with np.load(path) as data:
            names = [name for name in data.files if name.startswith(_COMPONENT_PREFIX)]
            components = {name.removeprefix(_COMPONENT_PREFIX): data[name] for name in names}
            return cls(data["frames"], data["similarity"], data["values"], components)


def sample_held_out(
    model: WanModule,
    link: RewardLink,
    prompts: list[PreparedPrompt],
    config: EvaluationConfig,
    advance: Callable[[], None],
    ranks: Ranks,
) -> HeldOutVideos | None:
    """Returns one video a pair, sampled without stochastic steps, scored through the reward service.

    Each rank makes its share of the pairs; rank 0 gets all videos, the others None.
    """
    sizes = sorted({(prompt.height, prompt.width) for prompt in prompts})
    if len(sizes) > 1:
        raise ConfigError(f"held-out videos have sizes {sizes} (height, width); set data.height and data.width")
    groups: list[GroupScoring] = []
    videos: list[NDArray[np.uint8]] = []
    pairs = ranks.even_share(config.pairs)
    for place, pair in enumerate(pairs):
        prompt = prompts[pair % len(prompts)]
        frames = np.zeros((prompt.num_frames, prompt.height, prompt.width, 3), np.uint8)
        shape = (prompt.num_frames, prompt.height, prompt.width)
        group = link.open_group(prompt.identity, 1, shape, reference_motion=prompt.reference_motion)

        def take(sample: int, first: int, chunk: NDArray[np.uint8], frames: Any = frames, group: Any = group) -> None:
            frames[first : first + len(chunk)] = chunk
            group.put(sample, first, chunk)

        conditioning = prompt.conditioning.to(model.device)
        noise = gaussian_noise((1, *conditioning.latent_shape), config.seed, "evaluation", pair)
        send_decoded(model, sample_latents(model, conditioning, noise), range(1), take)
        groups.append(group)
        videos.append(frames)
        if place >= 4:
            groups[place - 4].results()
        advance()
    mine = {pair: (video, group.results()[0]) for pair, video, group in zip(pairs, videos, groups, strict=True)}
    parts = ranks.gather_to_first(mine)
    if parts is None:
        return None
    everyone = {pair: scored for part in parts for pair, scored in part.items()}
    return _collect(*map(list, zip(*(everyone[pair] for pair in range(config.pairs)), strict=True)))


def _collect(videos: list[NDArray[np.uint8]], rewards: list[VideoReward]) -> HeldOutVideos:
    return HeldOutVideos(
        np.stack(videos),
        np.array([reward.similarities for reward in rewards], np.float64),
        np.array([reward.value for reward in rewards], np.float64),
        {part.name: np.array([reward.component(part.name) for reward in rewards]) for part in rewards[0].components},
    )


def compare(before: HeldOutVideos, after: HeldOutVideos, pack: str, seed: int) -> dict[str, Any]:
    """Returns the summary of a paired comparison: means, difference and its 95 % bootstrap interval."""
    difference, interval = paired_bootstrap(before.values, after.values, seed=seed)
    return {
        "before": float(before.values.mean()),
        "after": float(after.values.mean()),
        "difference": difference,
        "ci95": list(interval),
        "pairs": len(before.values),
        "pack": pack,
        "coverage_before": before.coverage,
        "coverage_after": after.coverage,
    }


def evaluation_document(
    before: HeldOutVideos, after: HeldOutVideos, rows: list[int], pack: str, seed: int
) -> dict[str, Any]:
    """Returns evaluation.json: each component with its 95 % bootstrap interval, and its values pair by pair.

    Args:
        rows: row of the held-out metadata that each pair shows.
    """
    components: dict[str, Any] = {}
    for name, first in before.components.items():
        difference, interval = paired_bootstrap(first, after.components[name], seed=seed)
        components[name] = {
            "before": float(first.mean()), "after": float(after.components[name].mean()), "difference": difference,
            "ci95": list(interval),
        }  # fmt: skip
    pairs = [
        {"row": row}
        | {
            name: {"before": float(before.components[name][pair]), "after": float(after.components[name][pair])}
            for name in components
        }
        for pair, row in enumerate(rows)
    ]
    return {"pack": pack, "count": len(rows), "components": components, "pairs": pairs}


def rescore(
    videos: HeldOutVideos, dataset: Dataset, pack: Path, reward: RewardConfig, advance: Callable[[], None]
) -> HeldOutVideos:
    """Returns the same videos scored under another face pack, in this process.

    The people are embedded anew, since templates of different packs cannot be compared.
    """
    from likeness_reward.embedded import EmbeddedScorer

    scorer = EmbeddedScorer(pack)
    options = reward.score_options()
    rewards = []
    for pair, frames in enumerate(videos.frames):
        clip = dataset[pair % len(dataset)].reference_frames
        identity = scorer.embed_identity(list(clip))
        motion = scorer.score(clip, identity, options).motion if MOTION_COMPONENT in videos.components else None
        rewards.append(scorer.score(frames, identity, options, reference_motion=motion))
        advance()
    return _collect(list(videos.frames), rewards)


@dataclass
class Evaluation:
    """Samples the held-out pairs before and after training and compares them."""

    config: TrainConfig
    folder: RunFolder
    link: RewardLink
    model: WanModule
    dataset: Dataset | None
    pack: str
    progress: RunProgress
    ranks: Ranks = Ranks()

    def __post_init__(self) -> None:
        self.prompts: list[PreparedPrompt] = []

    def prepare(self) -> None:
        """Encodes the people; call it before `before`, while the model has its encoders."""
        if self.dataset is None:
            return
        people = min(len(self.dataset), self.config.evaluation.pairs)
        with self.progress.counting("preparing held-out people", len(self.ranks.even_share(people))) as advance:
            self.prompts = prepare_prompts(self.model, self.link, self.dataset, people, advance, self.ranks)

    def before(self, start: int) -> None:
        """Samples the pairs with the untouched model, unless a resumed run already did."""
        if self.dataset is None:
            return
        done = self.folder.samples / "held_out_before.npz"
        if self.ranks.from_first(lambda: start == 0 or not done.is_file()):
            with self.model.without_adapters():
                self._sample("before")

    def after(self) -> dict[str, Any]:
        """Returns the `held_out` part of the summary; an empty one on other ranks than the first."""
        if self.dataset is None:
            return {}
        after = self._sample("after")
        if after is None:
            return {}
        before = HeldOutVideos.load(self.folder.samples / "held_out_before.npz")
        seed = self.config.evaluation.seed
        rows = [self.prompts[pair % len(self.prompts)].row for pair in range(len(before.values))]
        self.folder.write_evaluation(evaluation_document(before, after, rows, self.pack, seed))
        result: dict[str, Any] = {"held_out": compare(before, after, self.pack, seed)}
        others = []
        for pack in self.config.evaluation.packs:
            with self.progress.counting(f"scoring under {Path(pack).name}", 2 * len(before.values)) as advance:
                pair = [rescore(v, self.dataset, Path(pack), self.config.reward, advance) for v in (before, after)]
            others.append(compare(pair[0], pair[1], Path(pack).name, seed))
        return {**result, "held_out_other_packs": others} if others else result

    def _sample(self, name: str) -> HeldOutVideos | None:
        assert self.dataset is not None
        config, share = self.config.evaluation, len(self.ranks.even_share(self.config.evaluation.pairs))
        with self.progress.counting(f"held-out videos {name} training", share) as advance:
            videos = sample_held_out(self.model, self.link, self.prompts, config, advance, self.ranks)
        if videos is None:
            return None
        first_frames = [self.dataset[p % len(self.prompts)].first_frame for p in range(len(videos.values))]
        videos.save(self.folder.samples / f"held_out_{name}.npz", np.stack(first_frames))
        return videos


def evaluate_run(folder: RunFolder, config: TrainConfig, progress: RunProgress) -> None:
    """Samples the held-out pairs of a run anew, with and without its newest adapters; rewrites summary and report."""
    held_out = load_held_out(config)
    link = RewardLink(config.reward, config.algorithm.measures_motion)
    server = link.connect()
    model = load_trained(folder, config)
    evaluation = Evaluation(config, folder, link, model, held_out, server.pack_name, progress)
    evaluation.prepare()
    if config.memory.drop_encoders:
        model.drop_encoders()
    evaluation.before(start=0)
    folder.write_summary({**folder.read_summary(), **evaluation.after()})
    write_report(folder.path)
    link.close()
