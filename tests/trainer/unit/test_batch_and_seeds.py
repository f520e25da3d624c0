"""Data order and noise follow from (seed, step, index) alone."""

import torch

from likeness_trainer.learn.batch import rows_of_step
from likeness_trainer.learn.seeds import derive_seed, gaussian_noise


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order() -> None:
    rows = [row for step in range(10) for row in rows_of_step(20, 4, step, seed=3)]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:]


def test_steps_may_be_larger_than_the_data_set() -> None:
    assert rows_of_step(1, 3, 5, seed=0) == [0, 0, 0]


def test_noise_depends_on_every_part_and_on_nothing_else() -> None:
    first = gaussian_noise((4, 4), 0, "rollout", 3, 1)
    torch.manual_seed(99)
    assert torch.equal(first, gaussian_noise((4, 4), 0, "rollout", 3, 1))
    assert not torch.equal(first, gaussian_noise((4, 4), 0, "rollout", 1, 3))
    assert derive_seed(1, 23) != derive_seed(12, 3)
