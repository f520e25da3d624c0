"""Ctrl-C and SIGTERM end a run after the step in hand, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from likeness_trainer.errors import RunStoppedError


class StopSignals:
    """Inside, the first SIGINT or SIGTERM only asks to stop; a second one acts as usual."""

    def __init__(self) -> None:
        self.received = 0
        """The signal that this process got; it may come at any moment, also while the ranks agree."""
        self.requested = 0
        """The signal after which all ranks stop."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back()

    def raise_if_requested(self, step: int, steps: int) -> None:
        """Raises RunStoppedError when a stop was asked for and steps are left."""
        if self.requested and step < steps:
            raise RunStoppedError(step, self.requested)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
