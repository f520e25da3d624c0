"""The published Wan checkpoints that the recipes name: their parts, built without weights on the meta device.

DiffSynth recognises a checkpoint by a hash of its keys and shapes. A recipe's `model.architecture` tells which
checkpoint is meant, so that a model can be measured before its files are there, and wrong files can be told apart.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

import torch
from diffsynth.configs import MODEL_CONFIGS
from diffsynth.core.loader import hash_model_file
from diffsynth.core.loader.file import hash_state_dict_keys, load_keys_dict
from torch import nn

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.model_config import WanModelConfig
from likeness_trainer.wan.model_files import ROLES, read_model_paths

PART_NAMES = {
    "dit": "wan_video_dit", "dit2": "wan_video_dit", "text_encoder": "wan_video_text_encoder",
    "vae": "wan_video_vae", "image_encoder": "wan_video_image_encoder",
}  # fmt: skip
"""Role of `model_paths` to the name that DiffSynth's table gives such a part."""

_UMT5_XXL = "9c8818c2cbea55eca56c7b447df170da"
_VAE_2_1 = "ccc42284ea13e1ad04693284c7a09be6"
_I2V_A14B = "5b013604280dd715f8457c6ed6d6a626"
PUBLISHED: dict[str, dict[str, str]] = {
    "wan-2.2-i2v-a14b": {"dit": _I2V_A14B, "dit2": _I2V_A14B, "text_encoder": _UMT5_XXL, "vae": _VAE_2_1},
    "wan-2.2-ti2v-5b": {
        "dit": "1f5ab7703c6fc803fdded85ff040c316", "text_encoder": _UMT5_XXL,
        "vae": "e1de6c02cdac79f8b739f4d3698cd216",
    },
    "wan-2.1-t2v-1.3b": {"dit": "9269f8db9040a9d860eaca435be61814", "text_encoder": _UMT5_XXL, "vae": _VAE_2_1},
}  # fmt: skip
"""`model.architecture` to the hash of the keys and shapes of each published file, as DiffSynth's table lists them."""


def part_hashes(config: WanModelConfig) -> dict[str, str]:
    """Returns role to hash: of the recipe's own files where all are there, else of the published architecture.

    Raises ModelLoadError where the files are not there and the architecture is not a published one.
    """
    pairs = read_model_paths(config.model_paths)
    files = [file for _, part in pairs for file in ([part] if isinstance(part, str) else part)]
    if all(role is not None for role, _ in pairs) and all(Path(file).is_file() for file in files):
        return {str(role): hash_model_file(part) for role, part in pairs}
    if config.architecture not in PUBLISHED:
        raise ModelLoadError(
            f"model.architecture is {config.architecture!r} and its files are not there; without files a model is "
            f"known by one of {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[config.architecture]


def table_entry(model_hash: str, role: str) -> dict[str, Any]:
    """Returns DiffSynth's description of a part. Raises ModelLoadError for a hash that it does not know as such."""
    for entry in MODEL_CONFIGS:
        if entry["model_hash"] == model_hash and entry["model_name"] == PART_NAMES[role]:
            return dict(entry)
    raise ModelLoadError(f"DiffSynth knows no {role} of a Wan model whose keys and shapes hash to {model_hash}")


def meta_part(model_hash: str, role: str) -> nn.Module:
    """Returns a part of a model on the meta device, frozen: shapes without weights."""
    entry = table_entry(model_hash, role)
    module_name, _, class_name = entry["model_class"].rpartition(".")
    with torch.device("meta"):
        part: nn.Module = getattr(importlib.import_module(module_name), class_name)(**entry.get("extra_kwargs", {}))
    return part.requires_grad_(False).eval()


def file_shapes(part: nn.Module, role: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a part under the names that its published file has."""
    prefix = "model." if role == "vae" else ""  # DiffSynth's VAE holds the published network as `model`
    return {name.removeprefix(prefix): tensor for name, tensor in part.state_dict().items()}


def hash_of_part(part: nn.Module, role: str) -> str:
    """Returns the hash under which DiffSynth looks the file of this part up."""
    digest: str = hash_state_dict_keys(file_shapes(part, role))
    return digest


def explain_wrong_files(config_paths: Mapping[str, Any] | Sequence[Any] | str, architecture: str) -> list[str]:
    """Returns one line for each file of a published architecture that is not what its role needs.

    Says how many tensors are missing, unknown, or of another shape, with an example of each: what a shard left out, a
    VAE in place of a text encoder or a file of another size of model look like.
    """
    expected = PUBLISHED.get(architecture, {})
    lines = []
    for role, files in read_model_paths(config_paths):
        if role not in expected or role not in ROLES:
            continue
        found = load_keys_dict(files)
        needed = {name: list(t.shape) for name, t in file_shapes(meta_part(expected[role], role), role).items()}
        faults = _differences(found, needed)
        if faults:
            lines.append(f"{role}: {files} is not the {role} of {architecture}: {', '.join(faults)}")
    return lines


def _differences(found: dict[str, Any], needed: dict[str, list[int]]) -> list[str]:
    missing, unknown = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    other = sorted(name for name in needed.keys() & found.keys() if list(found[name]) != needed[name])
    faults = [
        f"{len(names)} tensors {what}, such as {names[0]}"
        for what, names in (("are missing", missing), ("are unknown", unknown))
        if names
    ]
    if other:
        faults.append(f"{other[0]} is {list(found[other[0]])}, needed is {needed[other[0]]}")
    return faults
