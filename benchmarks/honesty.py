"""The demo with its rewards shuffled inside each group: nothing true is left to learn, so nothing may be learned.

`python benchmarks/honesty.py [--seed S] [--steps N]` trains as `likeness-trainer demo` does, but gives every video the
reward of another one of its group. A rise of the held-out similarity here would mean that something else than reward
moves it. Exit code 1 when the 95 % interval of the difference lies above zero.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from likeness_reward.domain import VideoReward
from likeness_trainer import train
from likeness_trainer.demo import run_demo, verdict
from likeness_trainer.learn.credit import GroupScores, group_scores
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"


def main() -> None:
    """Trains with shuffled rewards and judges the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/honesty"))
    arguments = parser.parse_args()
    steps = [] if arguments.steps is None else [f"steps={arguments.steps}"]
    with shuffled_rewards(arguments.seed):
        folder = run_demo(RECIPE, arguments.run_dir, arguments.seed, [], steps, resume=False)
    print("rewards shuffled:", verdict(folder).splitlines()[0])
    low, _ = folder.read_summary()["held_out"]["ci95"]
    if low > 0:
        sys.exit("the similarity rose although the rewards were shuffled")


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
