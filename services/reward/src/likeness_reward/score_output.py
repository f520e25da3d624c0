"""How the score command prints: a line for people, JSON for programs, and a progress bar that spoils neither."""

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from likeness_reward.domain import VideoReward
from likeness_reward.errors import LikenessError, UnreadableVideo
from likeness_reward.reporting import error_document, reward_document, reward_table

OutputFormat = Literal["table", "json", "jsonl"]


class ScoreProgress:
    """A progress bar on the terminal, if there is one; lines of output go above it.

    The bar is drawn on stdout when that is a terminal, else on stderr; output that goes to a file or a pipe never
    holds any of it.
    """

    def __init__(self, total: int) -> None:
        self._on_stdout = sys.stdout.isatty()
        self._console = Console(stderr=not self._on_stdout, highlight=False)
        columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns,
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=total < 2 or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("scoring", total=total)

    def __enter__(self) -> "ScoreProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more video is done."""
        self._progress.advance(self._task)

    def say(self, line: str) -> None:
        """Prints a line of output."""
        if self._on_stdout:
            self._console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def complain(self, line: str) -> None:
        """Prints a line on stderr."""
        if self._console.is_terminal:
            self._console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


class ScoreOutput(ABC):
    """Prints the outcome of each video."""

    def __init__(self, progress: ScoreProgress, *, per_frame: bool) -> None:
        self._progress = progress
        self._per_frame = per_frame

    @abstractmethod
    def reward(self, video: Path, reward: VideoReward) -> None:
        """Takes a reward."""

    def error(self, video: Path, error: LikenessError) -> None:
        """Takes the error of a video, and says it on stderr."""
        message = error.message if isinstance(error, UnreadableVideo) else f"{video}: {error.message}"
        self._progress.complain(f"error: {message}")

    def finish(self) -> None:
        """Ends the output."""
        return


class TableOutput(ScoreOutput):
    """For people: a line a video, and on demand one a frame."""

    def reward(self, video: Path, reward: VideoReward) -> None:
        """Prints the reward."""
        self._progress.say(reward_table(video, reward, per_frame=self._per_frame))


class JsonLinesOutput(ScoreOutput):
    """For programs: one JSON object a line and video, as each is done."""

    def reward(self, video: Path, reward: VideoReward) -> None:
        """Prints the reward's document."""
        self.take(reward_document(video, reward, per_frame=self._per_frame))

    def error(self, video: Path, error: LikenessError) -> None:
        """Prints the error's document."""
        super().error(video, error)
        self.take(error_document(video, error))

    def take(self, document: dict[str, Any]) -> None:
        """Prints one document."""
        self._progress.say(json.dumps(document))


class JsonOutput(JsonLinesOutput):
    """For programs: one JSON object for one video, a list of them for several."""

    def __init__(self, progress: ScoreProgress, *, per_frame: bool, single: bool) -> None:
        super().__init__(progress, per_frame=per_frame)
        self._single = single
        self._documents: list[dict[str, Any]] = []

    def take(self, document: dict[str, Any]) -> None:
        """Keeps one document."""
        self._documents.append(document)

    def finish(self) -> None:
        """Prints all documents."""
        self._progress.say(json.dumps(self._documents[0] if self._single else self._documents))


def open_output(kind: OutputFormat, progress: ScoreProgress, *, per_frame: bool, single: bool) -> ScoreOutput:
    """Returns the output of a format."""
    if kind == "table":
        return TableOutput(progress, per_frame=per_frame)
    if kind == "jsonl":
        return JsonLinesOutput(progress, per_frame=per_frame)
    return JsonOutput(progress, per_frame=per_frame, single=single)
