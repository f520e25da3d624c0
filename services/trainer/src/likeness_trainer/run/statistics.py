"""Is the difference real? A paired bootstrap: the same people and noise, before and after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_CHUNK_INDICES = 4_000_000


def paired_bootstrap(
    before: Sequence[float] | NDArray[np.floating],
    after: Sequence[float] | NDArray[np.floating],
    *,
    seed: int,
    resamples: int = 10_000,
) -> tuple[float, tuple[float, float]]:
    """Returns (mean difference after - before, (low, high) of its 95 % percentile interval).

    `before` and `after`: one finite value a pair, 2 pairs or more, in the same order. Pairs are drawn with
    replacement, so what differs between people cancels within each pair (Efron and Tibshirani 1993, chapter 13).
    The same seed gives the same interval.

    Raises ValueError for unequal lengths, fewer than 2 pairs, NaN or infinity, resamples below 1.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"before has shape {first.shape} and after {second.shape}, allowed: one value for each pair")
    if first.size < 2:
        raise ValueError(f"there are {first.size} pairs, allowed: 2 or more")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, allowed: 1 or more")
    differences = second - first
    if not np.isfinite(differences).all():
        raise ValueError(f"pair {int(np.flatnonzero(~np.isfinite(differences))[0])} is not finite in before or after")
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK_INDICES // differences.size)
    means = np.concatenate(
        [
            differences[generator.integers(0, differences.size, (min(rows, resamples - start), differences.size))].mean(
                1
            )
            for start in range(0, resamples, rows)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(differences.mean()), (float(low), float(high))
