"""Seconds spent in each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

TOTAL = "total"
"""Name of the whole step among the phases' seconds."""
REWARD = "reward"
"""Seconds that the step stood still for rewards."""
REWARD_HIDDEN = "reward_hidden"
"""Seconds of the reward's latency that passed while something else was done: not a phase of the step."""


class PhaseClock:
    """Adds up wall-clock seconds by phase name."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside under a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def note_reward_latency(self, seconds: float) -> None:
        """Takes the summed latency of a step's rewards, each from its last frame to its result; what was not waited for
        was hidden."""
        self._seconds[REWARD_HIDDEN] = max(0.0, seconds - self._seconds.get(REWARD, 0.0))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every phase and of the whole step so far, under TOTAL."""
        return {**self._seconds, TOTAL: time.perf_counter() - self._started}
