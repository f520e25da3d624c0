"""The data set of a run: every row is checked before any model is loaded, then read when it is asked for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from likeness_trainer.data.errors import DatasetError, RowProblem, UnusableMediaError
from likeness_trainer.data.images import IMAGE_SUFFIXES, read_image
from likeness_trainer.data.metadata import Row, read_rows
from likeness_trainer.data.sizes import SIDE_MULTIPLE, fill, target_size
from likeness_trainer.data.video import probe, read_frames


class DataConfig(BaseModel):
    """Where the training data is and which videos are sampled for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metadata: Path
    """metadata.csv, .json or .jsonl with the columns video, prompt and, where wanted, reference_image."""
    num_frames: int = Field(default=81, ge=1)
    """Frames of a video: 4n+1, because the VAE turns the first frame and then each four into one latent frame."""
    height: int | None = Field(default=None, ge=SIDE_MULTIPLE)
    """Fixed height in pixels, a multiple of 16, together with `width`; without them each row keeps its aspect ratio."""
    width: int | None = Field(default=None, ge=SIDE_MULTIPLE)
    """Fixed width in pixels, a multiple of 16."""
    max_pixels: int = Field(default=480 * 480, ge=SIDE_MULTIPLE * SIDE_MULTIPLE)
    """Largest area of a frame in pixels where no fixed size is given."""
    fps: int = Field(default=16, ge=1, le=240)
    """Frames a second; videos of another or a varying rate are resampled."""
    skip_bad_rows: bool = False
    """Go on without the rows that cannot be used, instead of refusing the data set."""

    @model_validator(mode="after")
    def _sizes_fit_the_model(self) -> Self:
        if self.num_frames % 4 != 1:
            below = (self.num_frames - 1) // 4 * 4 + 1
            raise ValueError(f"num_frames is {self.num_frames}, allowed: 4n+1; nearest are {below} and {below + 4}")
        if (self.height is None) != (self.width is None):
            raise ValueError(f"height is {self.height} and width is {self.width}, allowed: both or neither")
        for name, side in (("height", self.height), ("width", self.width)):
            if side is not None and side % SIDE_MULTIPLE:
                raise ValueError(f"{name} is {side}, allowed: multiples of {SIDE_MULTIPLE}")
        return self

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of the frames made from a source of this size."""
        if self.height is not None and self.width is not None:
            return self.height, self.width
        return target_size(height, width, self.max_pixels)


@dataclass(frozen=True, eq=False)
class VideoExample:
    """What image-to-video training needs of one row."""

    row: int
    """Row number in the metadata file, from 1."""
    prompt: str
    first_frame: NDArray[np.uint8]
    """uint8 RGB [height, width, 3]: the reference image where the row names one, else the video's first frame."""
    reference_frames: NDArray[np.uint8]
    """uint8 RGB [T, h, w, 3], T at most num_frames: the person as the video shows them; T is 1 for a still image.

    Without a reference image h and w are height and width; with one the video keeps its own aspect ratio."""
    height: int
    """Of the video to generate, in pixels."""
    width: int
    num_frames: int


class Dataset:
    """The usable rows; `dataset[i]` decodes row i anew each time, so memory does not grow with the data."""

    def __init__(self, config: DataConfig, rows: list[Row], problems: list[RowProblem]) -> None:
        self.config = config
        self.rows = tuple(rows)
        self.problems = tuple(problems)
        """Why rows were left out (with skip_bad_rows)."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> VideoExample:
        """Returns row `index`, from 0. Raises DatasetError where its files changed since they were checked."""
        row = self.rows[index]
        try:
            reference_frames = _read_reference_frames(row.video, self.config)
        except UnusableMediaError as error:
            raise self._changed(row, f"video {row.video} {error}") from error
        first_frame = reference_frames[0]
        if row.reference_image is not None:
            try:
                first_frame = fit_frame(read_image(row.reference_image), self.config)
            except UnusableMediaError as error:
                raise self._changed(row, f"reference_image {row.reference_image} {error}") from error
        return VideoExample(
            row=row.number,
            prompt=row.prompt,
            first_frame=first_frame,
            reference_frames=reference_frames,
            height=first_frame.shape[0],
            width=first_frame.shape[1],
            num_frames=self.config.num_frames,
        )

    def _changed(self, row: Row, reason: str) -> DatasetError:
        problem = RowProblem(row.number, row.line, reason)
        return DatasetError(self.config.metadata, "a row can no longer be used", [problem])


def load_dataset(config: DataConfig) -> Dataset:
    """Returns the data set after every row has been decoded once.

    Raises DatasetError that lists all unusable rows, or, with skip_bad_rows, where no row is left.
    """
    rows, problems = _checked_rows(config)
    if problems and not config.skip_bad_rows:
        unusable = len({problem.row for problem in problems})
        raise DatasetError(
            config.metadata,
            f"{unusable} of {unusable + len(rows)} rows cannot be used (skip_bad_rows is off)",
            problems,
        )
    if not rows:
        raise DatasetError(config.metadata, "no row can be used", problems)
    return Dataset(config, rows, problems)


def check(config: DataConfig) -> list[RowProblem]:
    """Returns every problem of every row in the order of the file; empty where the data set can be used as it is.

    Raises DatasetError where the metadata file itself cannot be read.
    """
    return _checked_rows(config)[1]


def _checked_rows(config: DataConfig) -> tuple[list[Row], list[RowProblem]]:
    rows, problems = read_rows(config.metadata)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        reasons = list(pool.map(lambda row: _row_faults(row, config), rows))
    usable = [row for row, faults in zip(rows, reasons, strict=True) if not faults]
    problems += [
        RowProblem(row.number, row.line, fault) for row, faults in zip(rows, reasons, strict=True) for fault in faults
    ]
    return usable, sorted(problems, key=lambda problem: problem.row)


def _row_faults(row: Row, config: DataConfig) -> list[str]:
    """Returns the reasons why the files of `row` cannot be used."""
    faults = []
    try:
        _check_video(row.video, config)
    except UnusableMediaError as error:
        faults.append(f"video {row.video} {error}")
    if row.reference_image is not None:
        try:
            config.frame_size(*read_image(row.reference_image).shape[:2])
        except UnusableMediaError as error:
            faults.append(f"reference_image {row.reference_image} {error}")
    return faults


def _check_video(path: Path, config: DataConfig) -> None:
    if path.suffix.lower() in IMAGE_SUFFIXES:
        config.frame_size(*read_image(path).shape[:2])
        return
    count, height, width = probe(path, config.fps, config.num_frames)
    _require_frame_count(count, config)
    config.frame_size(height, width)


def _require_frame_count(count: int, config: DataConfig) -> None:
    if count < config.num_frames:
        raise UnusableMediaError(
            f"has {count} frame(s) at {config.fps} frames a second, num_frames is {config.num_frames}"
        )


def _read_reference_frames(path: Path, config: DataConfig) -> NDArray[np.uint8]:
    """Returns uint8 RGB [T, h, w, 3] of a video (T = num_frames) or of a still image (T = 1)."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return fit_frame(read_image(path), config)[None]
    frames: list[NDArray[np.uint8]] = []
    for picture in read_frames(path, config.fps, config.num_frames):
        # A stream may change its size; all frames take that of the first.
        frames.append(fill(picture, *frames[0].shape[:2]) if frames else fit_frame(picture, config))
    _require_frame_count(len(frames), config)
    return np.stack(frames)


def fit_frame(image_rgb: NDArray[np.uint8], config: DataConfig) -> NDArray[np.uint8]:
    """Returns a picture uint8 RGB [H, W, 3] scaled and cropped to the size that the settings give it."""
    return fill(image_rgb, *config.frame_size(*image_rgb.shape[:2]))
