"""The paired bootstrap: its interval is the known one, and pairing is what makes it narrow."""

from __future__ import annotations

import numpy as np
import pytest

from likeness_trainer.run.statistics import paired_bootstrap


def test_a_constant_rise_has_no_spread():
    before = [0.1, 0.5, 0.9, 0.3]
    difference, (low, high) = paired_bootstrap(before, [value + 0.25 for value in before], seed=0)
    assert (difference, low, high) == pytest.approx((0.25, 0.25, 0.25))


def test_the_interval_is_that_of_the_normal_theory():
    generator = np.random.default_rng(1)
    before = generator.normal(0.4, 0.2, 400)
    differences = generator.normal(0.05, 0.1, 400)
    difference, (low, high) = paired_bootstrap(before, before + differences, seed=0)
    error = differences.std() / 400**0.5
    assert difference == pytest.approx(differences.mean())
    assert low == pytest.approx(differences.mean() - 1.96 * error, abs=0.05 * error * 3)
    assert high == pytest.approx(differences.mean() + 1.96 * error, abs=0.05 * error * 3)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(2)
    covered = 0
    for trial in range(300):
        differences = generator.normal(0.03, 0.1, 40)
        _, (low, high) = paired_bootstrap(np.zeros(40), differences, seed=trial, resamples=1000)
        covered += low <= 0.03 <= high
    assert 0.90 <= covered / 300 <= 0.98  # 0.95 +- 4 binomial standard errors, less the small bias at 40 pairs


def test_pairing_matters_where_people_differ_more_than_the_effect():
    people = np.linspace(-5, 5, 32)
    rise = 0.1 + 0.01 * np.cos(np.arange(32))
    _, (low, high) = paired_bootstrap(people, people + rise, seed=0)
    assert low > 0.09
    assert high < 0.11, "an unpaired bootstrap would span several units"


def test_the_seed_decides():
    values = np.random.default_rng(3).normal(size=20)
    first = paired_bootstrap(np.zeros(20), values, seed=4)
    assert paired_bootstrap(np.zeros(20), values, seed=4) == first
    assert paired_bootstrap(np.zeros(20), values, seed=5) != first


def test_swapping_before_and_after_changes_the_sign():
    values = np.random.default_rng(3).normal(1.0, 0.1, size=20)
    assert paired_bootstrap(np.zeros(20), values, seed=4)[0] > 0
    assert paired_bootstrap(values, np.zeros(20), seed=4)[0] < 0


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([0.1, 0.2], [0.1], "shape"),
        ([0.1], [0.2], "there are 1 pairs, allowed: 2 or more"),
        ([], [], "there are 0 pairs"),
        ([0.1, float("nan")], [0.1, 0.2], "pair 1 is not finite"),
        ([[0.1, 0.2]], [[0.1, 0.2]], "shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(before, after, seed=0)
