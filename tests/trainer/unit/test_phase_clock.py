"""Seconds by phase; what of the reward's latency nobody waited for."""

import time

import pytest

from likeness_trainer.run.phase_clock import REWARD, REWARD_HIDDEN, TOTAL, PhaseClock


def test_phases_add_up_under_their_names() -> None:
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("sample"):
            time.sleep(0.02)
    seconds = clock.seconds()
    assert 0.04 <= seconds["sample"] <= seconds[TOTAL]


@pytest.mark.parametrize(("latency", "hidden"), [(5.0, 4.95), (0.01, 0.0)])
def test_latency_that_was_not_waited_for_was_hidden(latency: float, hidden: float) -> None:
    clock = PhaseClock()
    with clock.phase(REWARD):
        time.sleep(0.05)
    clock.note_reward_latency(latency)
    assert clock.seconds()[REWARD_HIDDEN] == pytest.approx(hidden, abs=0.03)
