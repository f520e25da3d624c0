"""The metrics of a run: metrics.jsonl, the record that counts, and TensorBoard events, a view of it.

One JSON object a step, flushed to the disk before the next step begins. Wall-clock times stand under the one key
`seconds` (a dict by phase), so that all other bytes of a resumed run can be compared with those of an undisturbed one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from likeness_trainer.errors import TrainerError
from likeness_trainer.run.trackers import Tracker

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
STEP_KEY = "step"
SECONDS_KEY = "seconds"


class MetricsError(TrainerError, ValueError):
    """A record cannot be written, or metrics.jsonl is damaged or does not fit the checkpoint."""


class MetricsWriter:
    """Appends one record a step. Use as a context manager, or call `close`."""

    def __init__(self, run_dir: Path, resume_step: int | None = None, trackers: Sequence[Tracker] = ()) -> None:
        """Opens RUN/metrics.jsonl for the steps after `resume_step`, the last step that the checkpoint contains.

        Records after that step are removed, as is a last line cut off by a kill: the steps are run again and written
        again. Steps count from 1, so 0 starts over; with None the run is new. Raises MetricsError where a new run finds
        records, or a resumed one lacks some. `trackers` get the numbers of every record too.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._trackers = trackers

        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_NAME
        self._last_step = _prepare(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")
        purge_step = None if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(run_dir / TENSORBOARD_NAME), purge_step=purge_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends {"step": n, ...} as one line and returns when it is on the disk.

        Values are numbers, booleans, texts, None, and lists or dicts of those. Raises MetricsError, with nothing
        written, for NaN, infinity, another type, or a step that is missing or does not follow the last one.
        """
        step = record.get(STEP_KEY)
        if not isinstance(step, int) or step <= self._last_step:
            raise MetricsError(f"step is {step!r}, allowed: a whole number above {self._last_step}")
        values = {name: value for name, value in record.items() if name != STEP_KEY}
        for name, value in values.items():
            _require_writable(name, value)
        self._file.write(json.dumps({STEP_KEY: step, **values}, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step = step
        scalars = dict(_scalars(values))
        for name, number in scalars.items():
            self._events.add_scalar(name, number, step)
        self._events.flush()
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def show(self, step: int, frames_rgb: NDArray[np.uint8], frames_per_second: int) -> None:
        """Adds a sampled video, uint8 RGB [T, H, W, 3], to the TensorBoard events, as the image `sample`."""
        from likeness_trainer.run.event_video import video_summary

        self._events._get_file_writer().add_summary(video_summary("sample", frames_rgb, frames_per_second), step)
        self._events.flush()

    def close(self) -> None:
        """Closes both files and every tracker."""
        self._file.close()
        self._events.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NoMetrics:
    """Stands in for the writer on ranks that write nothing."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Does nothing."""

    def show(self, step: int, frames_rgb: NDArray[np.uint8], frames_per_second: int) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of RUN/metrics.jsonl in order; a last line that is not complete yet is left out.

    Raises FileNotFoundError where there is no file, MetricsError that names a damaged line.
    """
    return [record for record, _ in _records(run_dir / METRICS_NAME)]


def without_seconds(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the records without wall-clock times: what two equal runs have in common, bit for bit."""
    return [{name: value for name, value in record.items() if name != SECONDS_KEY} for record in records]


def _prepare(path: Path, resume_step: int | None) -> int:
    """Cuts the file behind `resume_step` and returns the last step that is left, 0 where none is."""
    records = _records(path) if path.exists() else iter(())
    if resume_step is None:
        if path.exists() and path.stat().st_size:
            raise MetricsError(f"{path} holds records of an earlier run; resume it or choose another folder")
        return 0
    kept, last_step = 0, 0
    for record, end in records:
        if record[STEP_KEY] > resume_step:
            break
        kept, last_step = end, record[STEP_KEY]
    if last_step != resume_step:
        raise MetricsError(f"{path} ends at step {last_step}, the checkpoint is of step {resume_step}")
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(kept)
            os.fsync(file.fileno())
    return last_step


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (record, byte offset behind its line); a last line without a newline ends the iteration."""
    end = 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        end += len(line) + 1
        try:
            record = json.loads(line)
        except ValueError as error:
            raise MetricsError(f"{path}, line {number}: is no valid JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(STEP_KEY), int):
            raise MetricsError(f"{path}, line {number}: is no object with a whole number {STEP_KEY!r}")
        yield record, end


def _require_writable(name: str, value: object) -> None:
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MetricsError(f"{name} is {value}, allowed: finite numbers")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MetricsError(f"{name} has the key {key!r}, allowed: texts")
            _require_writable(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_writable(f"{name}[{index}]", item)
    else:
        raise MetricsError(f"{name} is a {type(value).__name__}, allowed: number, boolean, text, None, list, dict")


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (tag, number) of the numbers in nested dicts; tags join the keys with a slash."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)):
            yield prefix + name, float(value)
