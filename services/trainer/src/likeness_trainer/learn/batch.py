"""Which rows of the data set make up a step: an order that depends on nothing but the seed and the step."""

from __future__ import annotations

import numpy as np

from likeness_trainer.learn.seeds import derive_seed


def rows_of_step(num_rows: int, groups_per_step: int, step: int, seed: int) -> list[int]:
    """Returns the rows of one step; every epoch visits each row once, in an order of its own.

    Args:
        num_rows: rows in the data set, at least 1.
        step: 0-based optimizer step.
    """
    rows = []
    for position in range(step * groups_per_step, (step + 1) * groups_per_step):
        epoch, place = divmod(position, num_rows)
        order = np.random.default_rng(derive_seed(seed, "order", epoch)).permutation(num_rows)
        rows.append(int(order[place]))
    return rows
