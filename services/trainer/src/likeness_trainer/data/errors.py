"""What can be wrong with a data set: one reason for each unusable row, all of them in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from likeness_trainer.errors import TrainerError


class UnusableMediaError(ValueError):
    """One image or video cannot be used; the message is the reason, without the path."""


@dataclass(frozen=True, order=True)
class RowProblem:
    """Why one row cannot be used."""

    row: int
    """Number of the data row, from 1; a CSV header is not counted."""
    line: int | None
    """Line of the file where the row ends, from 1; None in a .json file."""
    reason: str
    """What is wrong, with the column, the value and what is allowed."""

    def __str__(self) -> str:
        place = f"row {self.row}" if self.line is None else f"row {self.row} (line {self.line})"
        return f"{place}: {self.reason}"


class DatasetError(TrainerError, ValueError):
    """The metadata file, or rows of it, cannot be used; `problems` lists every row."""

    exit_code = 2

    def __init__(self, metadata: Path, reason: str, problems: Sequence[RowProblem] = ()) -> None:
        self.metadata = metadata
        self.reason = reason
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{metadata}: {reason}", *(f"  {problem}" for problem in problems)]))
