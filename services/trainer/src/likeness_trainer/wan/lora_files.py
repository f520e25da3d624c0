"""The two LoRA files of a run: a PEFT directory (for resume and PEFT users) and one safetensors file (all others).

The single file names its tensors `diffusion_model.blocks.N...lora_{A,B}.weight` with alpha / rank folded into B: the
only naming that ComfyUI, diffusers' Wan converter and DiffSynth all load. Without the prefix diffusers loads nothing
and does not say so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from peft import LoraConfig
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import nn

from likeness_trainer.wan.lora import load_lora_state, lora_rank_and_alpha, lora_state, target_pattern

PEFT_PREFIX = "base_model.model."
SINGLE_FILE_PREFIX = "diffusion_model."
PEFT_CONFIG_NAME = "adapter_config.json"
PEFT_WEIGHTS_NAME = "adapter_model.safetensors"


class LoraMetadata(BaseModel):
    """What the header of the single file tells about the adapter; every field is free text but the date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(min_length=1)
    """Name shown by model managers."""
    architecture: str = Field(min_length=1)
    """Base architecture with `/lora`, for example `wan-2.2-i2v-a14b/lora`."""
    base_model: str = ""
    """Name or path of the model that the adapter was trained on."""
    license: str = ""
    """SPDX identifier or text."""
    created: date
    """Day of training; given by the caller: an export reads no clock."""
    expert: str = ""
    """`high_noise` or `low_noise` for models of two experts, else empty."""
    reward_fingerprint: str = ""
    """Fingerprint of the face models that gave the reward."""


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter apart from its model, as checkpoints hold it."""

    state: dict[str, torch.Tensor]
    """Names and tensors as `lora_state` returns them."""
    rank: int
    alpha: float


def adapter_weights(dit: nn.Module) -> AdapterWeights:
    """Returns a copy of the adapter of `dit`. Raises ValueError where it carries none."""
    return AdapterWeights(lora_state(dit), *lora_rank_and_alpha(dit))


def write_single_file(weights: AdapterWeights, path: Path, metadata: LoraMetadata) -> Path:
    """Writes an adapter as one safetensors file at `path`, atomically, and returns `path`.

    Tensors: float32, A [rank, in], B [out, rank] already multiplied by alpha / rank: a reader adds B A to the weight.
    Raises OSError where the file cannot be written.
    """
    rank, alpha = weights.rank, weights.alpha
    tensors = {
        SINGLE_FILE_PREFIX + name: tensor * (alpha / rank) if ".lora_B." in name else tensor
        for name, tensor in weights.state.items()
    }
    header = _header(metadata, rank, alpha)
    _write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=header))
    return path


def write_peft_directory(weights: AdapterWeights, directory: Path, base_model: str = "") -> Path:
    """Writes adapter_config.json and adapter_model.safetensors into `directory` and returns it.

    `peft.PeftModel.from_pretrained(wan_model, directory)` loads it, as does `load_peft_directory`. The new folder is
    complete before it takes the place of an old one.
    """
    rank, alpha, state = weights.rank, weights.alpha, weights.state
    layers = [name.rsplit(".lora_", 1)[0] for name in state]
    config = LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=target_pattern(layers),
        lora_dropout=0.0,
        bias="none",
        inference_mode=True,
        base_model_name_or_path=base_model or None,
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        config.save_pretrained(str(temporary))
        save_file({PEFT_PREFIX + name: tensor for name, tensor in state.items()}, temporary / PEFT_WEIGHTS_NAME)
        temporary.chmod(0o755)
        _replace_directory(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def load_peft_directory(dit: nn.Module, directory: Path) -> None:
    """Loads `directory` (as `write_peft_directory` writes it) into the adapter already injected into `dit`.

    Raises ValueError where rank, alpha or layers differ, FileNotFoundError where one of the two files is missing.
    """
    for name in (PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} is no PEFT adapter: {name} is missing")
    config = json.loads((directory / PEFT_CONFIG_NAME).read_text(encoding="utf-8"))
    rank, alpha = lora_rank_and_alpha(dit)
    if (config["r"], config["lora_alpha"]) != (rank, alpha):
        raise ValueError(
            f"{directory} holds rank {config['r']} and alpha {config['lora_alpha']}, the model has {rank} and {alpha}"
        )
    tensors: dict[str, torch.Tensor] = load_file(directory / PEFT_WEIGHTS_NAME)
    load_lora_state(dit, {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()})


def _header(metadata: LoraMetadata, rank: int, alpha: float) -> dict[str, str]:
    """Returns the safetensors header; the format allows text values only."""
    header = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": metadata.architecture,
        "modelspec.implementation": "diffsynth",
        "modelspec.title": metadata.title,
        "modelspec.date": metadata.created.isoformat(),
        "modelspec.license": metadata.license,
        "likeness.base_model": metadata.base_model,
        "likeness.expert": metadata.expert,
        "likeness.reward_fingerprint": metadata.reward_fingerprint,
        "likeness.rank": str(rank),
        "likeness.trained_alpha": str(alpha),
        "likeness.scale": "folded into lora_B",
    }
    return {key: value for key, value in header.items() if value}


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _replace_directory(new: Path, directory: Path) -> None:
    """Moves `new` to `directory`; rename(2) cannot replace a folder that has content, so the old one steps aside."""
    if not directory.exists():
        new.replace(directory)
        return
    aside = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    directory.replace(aside)
    new.replace(directory)
    shutil.rmtree(aside)
