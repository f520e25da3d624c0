"""The painted clips that pre-training sees. As in video from the web, people are not always steady.

Seeds of people: pre-training draws from PRETRAINING_PEOPLE, validation while training from VALIDATION_PEOPLE.
Data sets for reinforcement start at 500 000 and held-out people at HELD_OUT_SEED (see dataset.people_seeds).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from likeness_toyworld.painter import paint_clip, paint_drifting_clip, sample_identity, sample_motion

PRETRAINING_PEOPLE = range(0, 100_000)
VALIDATION_PEOPLE = range(400_000, 500_000)
DRIFTING_SHARE = 0.65
"""Share of the pre-training clips in which the person changes towards another one."""
DRIFT_RANGE = (0.3, 1.0)
"""How far the change has come by the last frame: 1 is the other person."""


@dataclass(frozen=True)
class Corpus:
    """frames_rgb: uint8 [N, T, H, W, 3]; landmarks: float32 [N, T, 5, 2], pixels (x, y)."""

    frames_rgb: NDArray[np.uint8]
    landmarks: NDArray[np.float32]


def paint_corpus(
    clips: int,
    seed: int,
    people: range = PRETRAINING_PEOPLE,
    drifting_share: float = DRIFTING_SHARE,
    num_frames: int = 9,
) -> Corpus:
    """`clips` painted clips of random people; `drifting_share` of them drift by an amount drawn from DRIFT_RANGE."""
    rng = np.random.default_rng(seed)
    frames_rgb, landmarks = [], []
    for _ in range(clips):
        first, second = (sample_identity(int(person)) for person in rng.integers(people.start, people.stop, 2))
        motion = sample_motion(rng)
        if rng.random() < drifting_share:
            frames, marks = paint_drifting_clip(first, second, float(rng.uniform(*DRIFT_RANGE)), motion, num_frames)
        else:
            frames, marks = paint_clip(first, motion, num_frames)
        frames_rgb.append(frames)
        landmarks.append(marks.landmarks)
    return Corpus(np.stack(frames_rgb), np.stack(landmarks))
