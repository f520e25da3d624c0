"""Loads the frozen parts of a Wan model through DiffSynth, and says in words what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import io
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

import torch
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "likeness_trainer.diffsynth_models"
"""Packages that bring model definitions of their own register them with DiffSynth through this entry-point group."""

ROLES = ("dit", "dit2", "text_encoder", "vae", "image_encoder")
"""Roles of a `model_paths` mapping, in the order in which DiffSynth must see them: high noise before low noise."""

ModelPaths = Mapping[str, Any] | Sequence[Any] | str


class ModelLoadError(ValueError):
    """A model file is missing, not recognised, or a part of the model is absent."""


def resolve_path(path: str) -> str:
    """Returns a path on disk; ``package:relative/path`` names a file inside an installed Python package."""
    match = re.fullmatch(r"([A-Za-z_][\w.]+):([^/\\].*)", path)
    if match is None:
        return str(Path(path).expanduser())
    package, inside = match.groups()
    try:
        return str(importlib.resources.files(package).joinpath(inside))
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"{path!r} names the Python package {package!r}, which is not installed") from error


def read_model_paths(model_paths: ModelPaths) -> list[tuple[str | None, str | list[str]]]:
    """Returns (role, file or shards) pairs in loading order from a mapping, a list, or a JSON file of either.

    Raises:
        ModelLoadError: an unknown role, an empty list, or the JSON is not readable.
    """
    if isinstance(model_paths, str):
        try:
            model_paths = json.loads(Path(model_paths).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelLoadError(
                f"model_paths is {model_paths!r}; it must be a mapping, a list, or a JSON file of either ({error})"
            ) from error
    if isinstance(model_paths, Mapping):
        unknown = sorted(set(model_paths) - set(ROLES))
        if unknown:
            raise ModelLoadError(f"model_paths has unknown roles {unknown}; allowed are {list(ROLES)}")
        pairs: list[tuple[str | None, Any]] = [(role, model_paths[role]) for role in ROLES if model_paths.get(role)]
    else:
        pairs = [(None, path) for path in model_paths]
    if not pairs:
        raise ModelLoadError("model_paths is empty")
    return [(role, _files(path)) for role, path in pairs]


def load_pipeline(
    model_paths: ModelPaths, tokenizer_path: str | None, dtype: torch.dtype, device: torch.device | str
) -> WanVideoPipeline:
    """Returns DiffSynth's Wan pipeline with every parameter frozen.

    Raises:
        ModelLoadError: names every file that is missing, or the first one that DiffSynth does not recognise.
    """
    pairs = read_model_paths(model_paths)
    if not tokenizer_path:
        raise ModelLoadError("tokenizer_path is not set; it is the folder with the tokenizer of the text encoder")
    tokenizer = resolve_path(tokenizer_path)
    _require_files(pairs, tokenizer)
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()()
    configs = [ModelConfig(path=files) for _, files in pairs]
    pipeline = _from_pretrained(configs, ModelConfig(path=tokenizer), dtype, device)
    _require_parts(pipeline, pairs)
    return pipeline.requires_grad_(False).eval()


def _files(path: Any) -> str | list[str]:
    if isinstance(path, str | Path):
        return resolve_path(str(path))
    return [resolve_path(str(shard)) for shard in path]


def _require_files(pairs: list[tuple[str | None, str | list[str]]], tokenizer: str) -> None:
    named = [
        (role or "model_paths", file)
        for role, files in pairs
        for file in ([files] if isinstance(files, str) else files)
    ]
    missing = [f"{role}: {file}" for role, file in named if not Path(file).is_file()]
    if not Path(tokenizer).is_dir():
        missing.append(f"tokenizer_path: {tokenizer}")
    if missing:
        raise ModelLoadError("these model files do not exist:\n  " + "\n  ".join(missing))


def _from_pretrained(
    configs: list[ModelConfig], tokenizer: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> WanVideoPipeline:
    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter):
            return WanVideoPipeline.from_pretrained(
                torch_dtype=dtype, device=device, model_configs=configs, tokenizer_config=tokenizer
            )
    except ValueError as error:
        raise ModelLoadError(f"DiffSynth could not load a model: {error}") from error
    finally:
        logger.debug("%s", chatter.getvalue())


def _require_parts(pipeline: WanVideoPipeline, pairs: list[tuple[str | None, str | list[str]]]) -> None:
    for part in ("dit", "vae", "text_encoder"):
        if getattr(pipeline, part) is None:
            raise ModelLoadError(f"none of {[files for _, files in pairs]} holds the {part} of a Wan model")
    for role, files in pairs:
        if role is not None and getattr(pipeline, role) is None:
            raise ModelLoadError(f"{files} was given as {role}, but DiffSynth recognises it as another part")
