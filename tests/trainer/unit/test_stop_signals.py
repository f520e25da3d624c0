"""A signal ends a run after a step, whenever it comes."""

import os
import signal

import pytest

from likeness_trainer.errors import RunStoppedError
from likeness_trainer.run.stop_signals import StopSignals


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost() -> None:
    """This rank has told that it got none and waits for the others when the signal comes: the next step counts it."""

    def interrupted_gather(value: int) -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [value, 0]

    with StopSignals() as stop:
        stop.requested = max(interrupted_gather(stop.received))
        stop.raise_if_requested(1, 3)
        stop.requested = max([stop.received, 0])
        with pytest.raises(RunStoppedError, match="stopped after step 2") as caught:
            stop.raise_if_requested(2, 3)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_a_signal_in_the_last_step_lets_the_run_finish() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        stop.requested = stop.received
        assert stop.requested == signal.SIGINT
        stop.raise_if_requested(3, 3)


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
