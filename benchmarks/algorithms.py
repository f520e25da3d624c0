"""What each choice of algorithm does to held-out identity on the toy world, at the same number of steps.

`python benchmarks/algorithms.py [--steps N] [--seeds 0 1 2] [--pairs P]` trains the toy once a seed and variant, each
variant differing from the recipe in one setting, and prints the table of docs/algorithms.md. A run that is complete is
not made again, so the command can be stopped and given once more. Equal steps are not equal work: the table shows the
seconds of a step too.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from honesty import shuffled_rewards

import likeness_toyworld as toyworld
from likeness_toyworld.dataset import write_dataset
from likeness_trainer.config import load_config
from likeness_trainer.demo import HELD_OUT_CLIPS, TRAINING_CLIPS, reward_server
from likeness_trainer.preflight import check_run
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.metrics import read_metrics
from likeness_trainer.run.progress import RunProgress
from likeness_trainer.train import train

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"
CONTROL = "control: the recipe with rewards shuffled inside each group"
VARIANTS: dict[str, list[str]] = {
    "the recipe: CPS, whole window, latent frames, KL 0.001": [],
    "Flow-SDE": ["sampler.stochastic_step=flow_sde"],
    "one random step": ["algorithm.window=one"],
    "credit to whole videos": ["algorithm.credit=video"],
    "without KL": ["algorithm.kl_weight=0"],
    CONTROL: [],
}


def main() -> None:
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=32, help="held-out pairs of each run (default: %(default)s)")
    parser.add_argument("--evaluation-pack", type=Path, help="a second face pack, which training never sees")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/algorithms"))
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with reward_server(Path(toyworld.face_pack_path()), arguments.run_dir) as endpoint:
        for seed in arguments.seeds:
            for name, changes in VARIANTS.items():
                results[name].append(result(run_variant(arguments, seed, name, changes, endpoint)))
    print(table(results))


def run_variant(arguments: argparse.Namespace, seed: int, name: str, changes: list[str], endpoint: str) -> RunFolder:
    """Returns the folder of a complete run of one variant and seed."""
    data = arguments.run_dir / f"data-seed-{seed}"
    if not data.exists():
        write_dataset(data / "train", TRAINING_CLIPS, seed)
        write_dataset(data / "held_out", HELD_OUT_CLIPS, seed, held_out=True)
    folder = RunFolder(arguments.run_dir / f"{list(VARIANTS).index(name)}-seed-{seed}")
    if folder.summary_file.exists():
        return folder
    packs = [] if arguments.evaluation_pack is None else [str(arguments.evaluation_pack.resolve())]
    settings = [
        f"run_dir={folder.path}", f"seed={seed}", f"steps={arguments.steps}", f"checkpoint_every={arguments.steps}",
        f"reward.endpoint={endpoint}", f"data.metadata={data / 'train' / 'metadata.csv'}",
        f"evaluation.metadata={data / 'held_out' / 'metadata.csv'}", f"evaluation.pairs={arguments.pairs}",
        f"evaluation.packs={packs}",
    ]  # fmt: skip
    config = load_config(RECIPE, [*settings, *changes], environment={})
    progress = RunProgress()
    progress.say(f"{name}, seed {seed}")
    resume = folder.config_file.exists()
    with shuffled_rewards(seed) if name == CONTROL else nullcontext():
        return train(config, check_run(config, resume), resume, progress)


def result(folder: RunFolder) -> dict[str, Any]:
    """Returns the numbers of one run that the table shows."""
    summary, metrics = folder.read_summary(), read_metrics(folder.path)
    others = summary.get("held_out_other_packs", [])
    return {
        "difference": summary["held_out"]["difference"],
        "other": others[0]["difference"] if others else None,
        "kl": metrics[-1].get("kl"),
        "coverage": summary["held_out"]["coverage_after"],
        "seconds": statistics.median(record["seconds"]["total"] for record in metrics),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the table as Markdown: one row a variant, seeds side by side, then means over the seeds."""
    lines = [
        "| variant | rise of held-out similarity, by seed | mean | mean under the second pack | coverage | last KL "
        "| seconds a step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        by_seed = ", ".join(f"{run['difference']:+.3f}" for run in runs)
        others = [run["other"] for run in runs if run["other"] is not None]
        columns = [
            name, by_seed, f"{statistics.mean(run['difference'] for run in runs):+.3f}",
            f"{statistics.mean(others):+.3f}" if others else "", f"{statistics.mean(r['coverage'] for r in runs):.2f}",
            "" if "without KL" in name else f"{statistics.mean(run['kl'] for run in runs):.4f}",
            f"{statistics.median(run['seconds'] for run in runs):.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
