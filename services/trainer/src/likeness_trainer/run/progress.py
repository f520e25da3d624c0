"""What a person sees while a run works: a bar with the numbers that matter; plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Metrics = dict[str, Any]


class RunProgress:
    """Progress on standard error, so that standard output stays for results."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def counting(self, title: str, total: int) -> Iterator[Any]:
        """Gives a function to call after each of `total` pieces of work."""
        if not self.console.is_terminal:
            self.say(f"{title}: {total}")
            yield lambda: None
            return
        with self._bar() as bar:
            task = bar.add_task(title, total=total, detail="")
            yield lambda: bar.advance(task)

    @contextmanager
    def training(self, start: int, steps: int) -> Iterator[Any]:
        """Gives a function that takes the number and the metrics of each finished step."""
        if not self.console.is_terminal:
            yield lambda step, metrics: self.say(f"step {step}/{steps}  {describe(metrics)}")
            return
        with self._bar() as bar:
            task = bar.add_task("training", total=steps, completed=start, detail="")

            def advance(step: int, metrics: Metrics) -> None:
                bar.update(task, completed=step, detail=describe(metrics))

            yield advance

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"), console=self.console,
        )  # fmt: skip


def describe(metrics: Metrics) -> str:
    """Returns reward, coverage, KL and the seconds of each phase of one step as text."""
    seconds = "  ".join(f"{name} {value:.1f}" for name, value in metrics["seconds"].items())
    values = [
        f"{label} {metrics[key]:.{digits}f}"
        for label, key, digits in (("reward", "reward", 3), ("coverage", "coverage", 2), ("KL", "kl", 4))
        if metrics.get(key) is not None
    ]
    skipped = f"  SKIPPED: {metrics['skipped_because']}" if metrics.get("skipped") else ""
    return "  ".join(values) + f"  [s: {seconds}]" + skipped
