"""Reward feedback, policy gradient and hybrid on the toy world at the same number of DiT evaluations.

`python benchmarks/reward_feedback.py [--budget N] [--seeds 0 1 2] [--pairs P] [--evaluation-pack DIR]` trains what is
missing and prints the first table of docs/reward-feedback.md. The unit of the budget is one sample through the DiT,
prefix, branches, update and reference evaluations included; it is counted while training, not computed. A run that is
complete is not made again, so the command can be stopped and given once more.

Motion is the mean over held-out videos of `Reward.motion`; its share of the untrained model's tells a video that
freezes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import likeness_toyworld as toyworld
from likeness_reward.embedded import EmbeddedScorer
from likeness_toyworld.dataset import write_dataset
from likeness_trainer.config import load_config
from likeness_trainer.demo import HELD_OUT_CLIPS, TRAINING_CLIPS, reward_server
from likeness_trainer.preflight import check_run
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.metrics import read_metrics
from likeness_trainer.run.progress import RunProgress
from likeness_trainer.train import train
from likeness_trainer.wan.module import Conditioning, WanModule

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"
FEEDBACK = ["algorithm.name=reward_feedback", "algorithm.groups_per_step=8"]
VARIANTS: dict[str, tuple[list[str], int]] = {
    "policy gradient": ([], 400),
    "reward feedback": (FEEDBACK, 96),
    "hybrid": (["algorithm.name=hybrid"], 448),
    "policy gradient, KL off": (["algorithm.kl_weight=0"], 240),
    "reward feedback, KL off": ([*FEEDBACK, "algorithm.feedback.kl_weight=0"], 64),
}
"""Settings, and DiT evaluations of one step: a policy gradient's group of 8 takes 4 + 8 * 4 for sampling and 8 * 4 * 2
for the update (3 without KL: step 7 then has no term), a reward-feedback video takes 8 + 4."""


def main() -> None:
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=8000, help="DiT evaluations of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--pairs", type=int, default=32, help="held-out pairs of each run (default: %(default)s)")
    parser.add_argument("--evaluation-pack", type=Path, help="a second face pack, which training never sees")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/reward_feedback"))
    parser.add_argument("--set", action="append", default=[], help="overrides of every run")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
    with reward_server(Path(toyworld.face_pack_path()), arguments.run_dir) as endpoint:
        for seed in arguments.seeds:
            for name in arguments.variants:
                results[name].append(result(run_variant(arguments, seed, name, endpoint)))
                print(name, seed, results[name][-1], flush=True)
    print(table(results))


@contextmanager
def counted_evaluations() -> Iterator[list[int]]:
    """Inside, the samples that go through the DiT are added up in the list's only entry."""
    count, original = [0], WanModule.velocity

    def velocity(self: WanModule, latents: Tensor, step: int, conditioning: Conditioning) -> Tensor:
        count[0] += len(latents)
        return original(self, latents, step, conditioning)

    WanModule.velocity = velocity  # type: ignore[method-assign]
    try:
        yield count
    finally:
        WanModule.velocity = original  # type: ignore[method-assign]


def run_variant(arguments: argparse.Namespace, seed: int, name: str, endpoint: str) -> RunFolder:
    """Returns the folder of a complete run of one variant and seed."""
    data = arguments.run_dir / f"data-seed-{seed}"
    if not data.exists():
        write_dataset(data / "train", TRAINING_CLIPS, seed)
        write_dataset(data / "held_out", HELD_OUT_CLIPS, seed, held_out=True)
    folder = RunFolder(arguments.run_dir / f"{name.replace(' ', '-').replace(',', '')}-seed-{seed}")
    if folder.summary_file.exists():
        return folder
    changes, evaluations = VARIANTS[name]
    steps = math.ceil(arguments.budget / evaluations)
    packs = [] if arguments.evaluation_pack is None else [str(arguments.evaluation_pack.resolve())]
    settings = [
        f"run_dir={folder.path}", f"seed={seed}", f"steps={steps}", f"checkpoint_every={steps}",
        f"reward.endpoint={endpoint}", f"data.metadata={data / 'train' / 'metadata.csv'}",
        f"evaluation.metadata={data / 'held_out' / 'metadata.csv'}", f"evaluation.pairs={arguments.pairs}",
        f"evaluation.packs={packs}", *changes, *arguments.set,
    ]  # fmt: skip
    config = load_config(RECIPE, settings, environment={})
    progress = RunProgress()
    progress.say(f"{name}, seed {seed}")
    with counted_evaluations() as count:
        train(config, check_run(config, resume=False), False, progress)
    evaluation = 2 * arguments.pairs * config.sampler.num_inference_steps
    (folder.path / "evaluations.json").write_text(json.dumps({"training": count[0] - evaluation}))
    return folder


def result(folder: RunFolder) -> dict[str, Any]:
    """Returns the numbers of one run that the table shows."""
    summary, metrics = folder.read_summary(), read_metrics(folder.path)
    others = summary.get("held_out_other_packs", [])
    before, after = (motion(folder, name) for name in ("before", "after"))
    return {
        "difference": summary["held_out"]["difference"],
        "other": others[0]["difference"] if others else None,
        "kl": metrics[-1].get("kl"),
        "coverage": summary["held_out"]["coverage_after"],
        "scene_motion": after[0] / before[0],
        "face_motion": after[1] / before[1],
        "evaluations": json.loads((folder.path / "evaluations.json").read_text())["training"],
        "seconds": sum(record["seconds"]["total"] for record in metrics),
    }


def motion(folder: RunFolder, name: str) -> tuple[float, float]:
    """Returns the mean motion of scene and face of a run's held-out videos, NaN for no face."""
    scorer = EmbeddedScorer(Path(toyworld.face_pack_path()))
    with np.load(folder.samples / f"held_out_{name}.npz") as stored:
        videos = stored["frames"]
    identity = scorer.embed_identity([videos[0, 0]])
    motions = [scorer.score(video, identity).motion for video in videos]
    faces = [found.face for found in motions if found.face is not None]
    return statistics.mean(found.scene for found in motions), statistics.mean(faces) if faces else math.nan


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the table as Markdown: one row a variant, seeds side by side, then means over the seeds."""
    lines = [
        "| variant | rise of held-out similarity, by seed | mean | under the second pack, by seed | mean | coverage "
        "| motion of scene and face, share of the base's | last KL | DiT evaluations | seconds of training |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        others = [run["other"] for run in runs if run["other"] is not None]

        def mean(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.mean(run[key] for run in runs)

        columns = [
            name, ", ".join(f"{run['difference']:+.3f}" for run in runs), f"{mean('difference'):+.3f}",
            ", ".join(f"{other:+.3f}" for other in others), f"{statistics.mean(others):+.3f}" if others else "",
            f"{mean('coverage'):.2f}", f"{mean('scene_motion'):.2f}, {mean('face_motion'):.2f}",
            "" if "KL off" in name else f"{mean('kl'):.4f}", f"{mean('evaluations'):.0f}", f"{mean('seconds'):.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
