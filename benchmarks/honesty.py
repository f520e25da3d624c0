"""The demo with its rewards shuffled inside each group: nothing true is left to learn, so nothing may be learned.

`python benchmarks/honesty.py [--seeds 0 1 2] [--steps N]` trains as `likeness-trainer demo` does, but gives every video
the reward of another one of its group. A rise of the held-out similarity here would mean that something else than the
reward moves it.

An adapter pushed at random moves all held-out pairs together, a little up or a little down, so the interval over the
pairs of one run does not tell luck from learning; runs of several seeds do. Exit code 1 when one run makes the demo's
claim (a rise of at least 0.03 with its interval above zero), or when the mean over the seeds lies above zero by its own
95 % interval (Student's t over runs).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from likeness_reward.domain import VideoReward
from likeness_trainer import train
from likeness_trainer.demo import run_demo, verdict
from likeness_trainer.learn.credit import GroupScores, group_scores
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"
CLAIM = 0.03
"""The rise that the demo promises; no run with shuffled rewards may show it."""


def main() -> None:
    """Trains with shuffled rewards, once a seed, and judges the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/honesty"), help="one folder a seed inside it")
    arguments = parser.parse_args()
    steps = [] if arguments.steps is None else [f"steps={arguments.steps}"]
    results = [train_shuffled(seed, arguments.run_dir / f"seed-{seed}", steps) for seed in arguments.seeds]
    differences = np.array([result["difference"] for result in results])
    if any(result["difference"] >= CLAIM and result["ci95"][0] > 0 for result in results):
        sys.exit(f"a run rose by {differences.max():+.3f} although its rewards were shuffled")
    if len(results) > 1:
        low, high = stats.t.interval(0.95, len(results) - 1, differences.mean(), stats.sem(differences))
        print(f"mean over {len(results)} seeds: {differences.mean():+.3f} (95 % interval {low:+.3f} to {high:+.3f})")
        if low > 0:
            sys.exit("the mean rose although the rewards were shuffled")


def train_shuffled(seed: int, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains one seed; returns and prints what became of its held-out pairs."""
    with shuffled_rewards(seed):
        folder = run_demo(RECIPE, run_dir, seed, [], overrides, resume=False)
    print(f"seed {seed}, rewards shuffled:", verdict(folder).splitlines()[0], flush=True)
    held_out: dict[str, Any] = folder.read_summary()["held_out"]
    return held_out


@contextmanager
def shuffled_rewards(seed: int) -> Iterator[None]:
    """Inside, training gives every video the reward of another one of its group, drawn from `seed`."""
    generator = np.random.default_rng(seed)

    def shuffled(rewards: list[VideoReward], algorithm: PolicyGradientConfig, no_face_value: float) -> GroupScores:
        order = generator.permutation(len(rewards))
        return group_scores([rewards[index] for index in order], algorithm, no_face_value)

    train.group_scores = shuffled
    try:
        yield
    finally:
        train.group_scores = group_scores


if __name__ == "__main__":
    main()
