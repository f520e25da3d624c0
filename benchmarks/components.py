"""What each component of the reward gives for good videos and for videos that cheat, on painted people.

    python benchmarks/components.py [--pack DIR] [--people 16]

Each row is the mean over people of one kind of video, scored against the person of a good video of 9 frames and
measured against the motion of another video of the same person.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import likeness_toyworld
from likeness_reward.domain import ScoreOptions
from likeness_reward.embedded import EmbeddedScorer
from likeness_toyworld.painter import paint_clip, sample_identity, sample_motion

Frames = NDArray[np.uint8]
NUM_FRAMES = 9


def good(person: int, size: int) -> Frames:
    """Returns a video uint8 [9, size, size, 3] of a person who moves."""
    return paint_clip(sample_identity(person), sample_motion(5000 + person), NUM_FRAMES, size)[0]


def frozen(person: int, size: int) -> Frames:
    """Returns the first frame of the good video, nine times."""
    return np.repeat(good(person, size)[:1], NUM_FRAMES, axis=0)


def half_hidden(person: int, size: int) -> Frames:
    """Returns the good video with every second frame grey."""
    frames = good(person, size).copy()
    frames[1::2] = 127
    return frames


def other_person(person: int, size: int) -> Frames:
    """Returns a video of somebody else with the same movements."""
    return paint_clip(sample_identity(person + 1000), sample_motion(5000 + person), NUM_FRAMES, size)[0]


def two_people(person: int, size: int) -> Frames:
    """Returns the good video beside one of somebody else, on one canvas twice as wide."""
    return np.concatenate([good(person, size), other_person(person, size)], axis=2)


KINDS: dict[str, Callable[[int, int], Frames]] = {
    "a good video": good,
    "its first frame, frozen": frozen,
    "the face hidden in every second frame": half_hidden,
    "another person": other_person,
    "the person beside another": two_people,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=Path(likeness_toyworld.face_pack_path()))
    parser.add_argument("--people", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="side of the painted frames, pixels (default: 64)")
    arguments = parser.parse_args()
    scorer = EmbeddedScorer(arguments.pack)
    print(f"{'mean over ' + str(arguments.people) + ' people':<40}{'identity':>10}{'coverage':>10}{'motion':>10}")
    for name, paint in KINDS.items():
        rows = [components(scorer, person, paint, arguments.size) for person in range(100, 100 + arguments.people)]
        identity, coverage, motion = np.mean(rows, axis=0)
        print(f"{name:<40}{identity:>10.3f}{coverage:>10.3f}{motion:>10.3f}")


def components(scorer: EmbeddedScorer, person: int, paint: Callable[[int, int], Frames], size: int) -> list[float]:
    """Returns identity, coverage and motion of one video of a person."""
    identity = scorer.embed_identity([good(person, size)[0]])
    reference = paint_clip(sample_identity(person), sample_motion(9000 + person), NUM_FRAMES, size)[0]
    motion = scorer.score(reference, identity).motion
    options = ScoreOptions(face_choice="most_similar")
    reward = scorer.score(paint(person, size), identity, options, reference_motion=motion)
    return [reward.component(name) for name in ("identity", "coverage", "motion")]


if __name__ == "__main__":
    main()
