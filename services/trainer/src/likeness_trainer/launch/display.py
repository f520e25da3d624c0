"""What a person sees of a run in a cluster: its log on standard output, what the cluster does on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from likeness_trainer.launch.states import STEP


class Display:
    """Lines, and, on a terminal, a bar with the steps below them."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Lines for the same terminal appear above the bar; those for a file must not be sent to the terminal.
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                console=self._console, transient=True, redirect_stdout=sys.stdout.isatty(),
            )  # fmt: skip
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Tells what the cluster does."""
        self._console.print(text, markup=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Shows one line of the log, and moves the bar when it reports a step."""
        print(text, flush=True)
        found = STEP.match(text)
        if self._bar is None or found is None:
            return
        step, steps = int(found[1]), int(found[2])
        if self._task is None:
            self._task = self._bar.add_task("training", total=steps)
        self._bar.update(self._task, completed=step, total=steps)
