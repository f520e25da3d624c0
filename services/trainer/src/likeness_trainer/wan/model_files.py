"""Which files a recipe names, and whether they are there. Imports no DiffSynth, which takes seconds."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from likeness_trainer.errors import ModelLoadError

ROLES = ("dit", "dit2", "text_encoder", "vae", "image_encoder")
"""Roles of a `model_paths` mapping, in the order in which DiffSynth must see them: high noise before low noise."""

INDEX_SUFFIX = ".safetensors.index.json"
"""Ending of the file that names the shards of a checkpoint; it can be given in place of them."""

ModelPaths = Mapping[str, Any] | Sequence[Any] | str


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


def require_model_files(model_paths: ModelPaths, tokenizer_path: str | None) -> None:
    """Raises ModelLoadError naming every model file, and the tokenizer's folder, that does not exist."""
    if not tokenizer_path:
        raise ModelLoadError("tokenizer_path is not set; it is the folder with the tokenizer of the text encoder")
    named = [
        (role or "model_paths", file)
        for role, files in read_model_paths(model_paths)
        for file in ([files] if isinstance(files, str) else files)
    ]
    missing = [f"{role}: {file}" for role, file in named if not Path(file).is_file()]
    if not Path(resolve_path(tokenizer_path)).is_dir():
        missing.append(f"tokenizer_path: {resolve_path(tokenizer_path)}")
    if missing:
        raise ModelLoadError("these model files do not exist:\n  " + "\n  ".join(missing))


def require_base_loras(paths: Sequence[str]) -> None:
    """Raises ModelLoadError naming every LoRA file or PEFT folder of model.base_loras that does not exist."""
    missing = [path for path in paths if not Path(resolve_path(path)).exists()]
    if missing:
        raise ModelLoadError("these files of model.base_loras do not exist:\n  " + "\n  ".join(missing))


def _files(path: Any) -> str | list[str]:
    if isinstance(path, str | Path):
        file = resolve_path(str(path))
        return _shards(Path(file)) if file.endswith(INDEX_SUFFIX) and Path(file).is_file() else file
    return [resolve_path(str(shard)) for shard in path]


def _shards(index: Path) -> list[str]:
    """Returns the files that the index of a sharded checkpoint names, beside it, in order."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is no index of a sharded checkpoint: it has no weight_map") from error
    return [str(index.parent / name) for name in sorted(set(names))]
