"""Checkpoints that are either complete or absent, and the state that makes a resumed run equal the undisturbed one.

All noise and the data order follow from (seed, step), so a checkpoint holds only: the step, the adapters of every
trained expert, and the optimizer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from likeness_trainer.errors import RunFolderError

STATE_FILE = "state.json"
ADAPTER_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds."""

    step: int
    """Optimizer steps done."""
    adapters: dict[str, dict[str, torch.Tensor]]
    """Expert name to adapter state, float32."""
    optimizer: dict[str, Any]
    """State dict of the optimizer."""
    checksum: str
    """SHA-256 of the adapters when they were saved."""
    labels: dict[str, str]
    """Expert name to the name under which its LoRA is published."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes folder/step-NNNNNN and returns it; a kill at any moment leaves the previous checkpoints whole.

    Args:
        folder: the run's checkpoints folder.
        keep: newest checkpoints to keep.
    """
    target = folder / f"step-{checkpoint.step:06d}"
    temporary = folder / f".step-{checkpoint.step:06d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for expert, state in checkpoint.adapters.items():
        (temporary / expert).mkdir()
        save_file(state, temporary / expert / ADAPTER_FILE)
    torch.save(checkpoint.optimizer, temporary / OPTIMIZER_FILE)
    state_text = json.dumps({"step": checkpoint.step, "checksum": checkpoint.checksum, "experts": checkpoint.labels})
    (temporary / STATE_FILE).write_text(state_text, encoding="utf-8")
    for file in sorted(temporary.rglob("*")):
        _fsync(file)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    _fsync(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(path: Path) -> Checkpoint:
    """Returns a checkpoint; raises RunFolderError naming the file that is missing or broken."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        adapters = {expert: load_file(path / expert / ADAPTER_FILE) for expert in state["experts"]}
        optimizer = torch.load(path / OPTIMIZER_FILE, weights_only=True)
        return Checkpoint(state["step"], adapters, optimizer, state["checksum"], state["experts"])
    except Exception as error:
        raise RunFolderError(f"checkpoint {path} cannot be read: {error}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
