"""Reads metadata.csv, .json or .jsonl into rows; faults of the file raise, faults of a row are collected."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from likeness_trainer.data.errors import DatasetError, RowProblem

REQUIRED_COLUMNS = ("video", "prompt")
OPTIONAL_COLUMNS = ("reference_image",)
SUFFIXES = (".csv", ".json", ".jsonl")


@dataclass(frozen=True)
class Row:
    """One row of the metadata file, paths resolved against the folder of the file but not opened yet."""

    number: int
    """From 1, the header of a CSV not counted."""
    line: int | None
    video: Path
    prompt: str
    reference_image: Path | None


@dataclass(frozen=True)
class _Record:
    """A row as the file has it, or the reason why it could not even be read."""

    line: int | None
    values: Mapping[str, object]
    fault: str | None = None


def read_rows(metadata: Path) -> tuple[list[Row], list[RowProblem]]:
    """Returns the rows whose fields are filled in, and a problem for each row whose fields are not.

    Raises DatasetError where the file is missing, empty, not UTF-8, of another format, or lacks a column.
    """
    text = _read_text(metadata)
    readers = {".csv": _csv_records, ".json": _json_records, ".jsonl": _jsonl_records}
    rows: list[Row] = []
    problems: list[RowProblem] = []
    number = 0
    for number, record in enumerate(readers[metadata.suffix.lower()](metadata, text), start=1):
        faults = [record.fault] if record.fault else _field_faults(record.values)
        if faults:
            problems += [RowProblem(number, record.line, fault) for fault in faults]
        else:
            rows.append(_row(number, record, metadata.parent))
    if number == 0:
        raise DatasetError(metadata, "holds no rows")
    return rows, problems


def _read_text(metadata: Path) -> str:
    if metadata.suffix.lower() not in SUFFIXES:
        raise DatasetError(metadata, f"has the suffix {metadata.suffix!r}, allowed: {', '.join(SUFFIXES)}")
    if metadata.is_dir():
        raise DatasetError(metadata, "is a folder, needed is the metadata file itself")
    try:
        data = metadata.read_bytes()
    except FileNotFoundError as error:
        raise DatasetError(metadata, "does not exist") from error
    except OSError as error:
        raise DatasetError(metadata, f"cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DatasetError(
            metadata, f"is not UTF-8: byte 0x{data[error.start]:02x} in line {line}; save it as UTF-8"
        ) from error
    if not text.strip():
        raise DatasetError(metadata, "is empty")
    return text


def _csv_records(metadata: Path, text: str) -> Iterator[_Record]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        header: list[str] = []
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                _require_columns(metadata, header)
                continue
            fault = None
            if len(cells) != len(header):
                fault = f"has {len(cells)} cells, the header has {len(header)}; quote a text that contains commas"
            yield _Record(reader.line_num, dict(zip(header, cells, strict=False)), fault)
    except csv.Error as error:
        raise DatasetError(metadata, f"is no valid CSV, line {reader.line_num}: {error}") from error


def _require_columns(metadata: Path, header: list[str]) -> None:
    found = ", ".join(repr(name) for name in header)
    missing = [name for name in REQUIRED_COLUMNS if name not in header]
    if missing:
        hint = "; cells are separated by commas" if len(header) == 1 else ""
        raise DatasetError(metadata, f"lacks the column {' and '.join(missing)}; its header has {found}{hint}")
    twice = sorted({name for name in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS) if header.count(name) > 1})
    if twice:
        raise DatasetError(metadata, f"has the column {' and '.join(twice)} more than once; its header has {found}")


def _json_records(metadata: Path, text: str) -> Iterator[_Record]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(metadata, f"is no valid JSON, line {error.lineno}: {error.msg}") from error
    if not isinstance(items, list):
        raise DatasetError(metadata, f"holds a JSON {type(items).__name__}, needed is a list of objects")
    for item in items:
        yield _json_record(None, item)


def _jsonl_records(metadata: Path, text: str) -> Iterator[_Record]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            yield _json_record(line, json.loads(content))
        except json.JSONDecodeError as error:
            yield _Record(line, {}, f"is no valid JSON: {error.msg} at character {error.pos + 1}")


def _json_record(line: int | None, item: object) -> _Record:
    if not isinstance(item, dict):
        return _Record(line, {}, f"is a JSON {type(item).__name__}, needed is an object")
    return _Record(line, item)


def _field_faults(values: Mapping[str, object]) -> list[str]:
    faults = []
    for name in REQUIRED_COLUMNS:
        value = values.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            faults.append(f"{name} is empty")
        elif not isinstance(value, str):
            faults.append(f"{name} is {value!r}, needed is a text")
    for name in OPTIONAL_COLUMNS:
        value = values.get(name)
        if value is not None and not isinstance(value, str):
            faults.append(f"{name} is {value!r}, needed is a text")
    for name in ("video", "reference_image"):
        value = values.get(name)
        if isinstance(value, str) and "\0" in value:
            faults.append(f"{name} contains a NUL character")
    return faults


def _row(number: int, record: _Record, folder: Path) -> Row:
    reference_image = str(record.values.get("reference_image") or "").strip()
    return Row(
        number=number,
        line=record.line,
        video=folder / str(record.values["video"]).strip(),
        prompt=str(record.values["prompt"]).strip(),
        reference_image=folder / reference_image if reference_image else None,
    )
