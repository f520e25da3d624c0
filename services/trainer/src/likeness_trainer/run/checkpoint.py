"""Checkpoints that are either complete or absent, and the state that makes a resumed run equal the undisturbed one.

All noise and the data order follow from (seed, step), so a checkpoint holds only: the step, the adapters of every
trained expert with their average, the optimizer, the few numbers that the learner adapts, and what the run stood on:
its resolved recipe and the fingerprint of the reward's models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from likeness_trainer.errors import RunFolderError
from likeness_trainer.wan.model_config import MergedLora

STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"
ADAPTER_FILE = "adapter_model.safetensors"
AVERAGE_FILE = "adapter_average.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class LearnerState:
    """Numbers that change as the run goes."""

    kl_weight: float
    """Weight of the divergence for the next step."""
    skipped_in_a_row: int
    """Steps since the last finite update."""
    average_updates: int
    """Updates that the average of the adapters has seen."""


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
    state: LearnerState
    average: dict[str, dict[str, torch.Tensor]]
    """Expert name to the average of its adapter; empty when none is kept."""
    base_loras: tuple[MergedLora, ...] = ()
    """What was merged into the base that the adapters stand on."""

    def require_base(self, merged: Sequence[MergedLora]) -> None:
        """Raises RunFolderError where a model's base had other LoRA files merged; where they lie does not matter."""
        if [lora.contents for lora in merged] != [lora.contents for lora in self.base_loras]:
            saved, given = (", ".join(map(str, loras)) or "no LoRA" for loras in (self.base_loras, merged))
            raise RunFolderError(
                f"the adapters of step {self.step} stand on a base with {saved} merged; model.base_loras now gives "
                f"{given}. Put the same files back, or start a new run"
            )

    @property
    def published(self) -> dict[str, dict[str, torch.Tensor]]:
        """The adapters that are evaluated and exported: the average when there is one."""
        return self.average or self.adapters


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    newest: int
    """So many of the newest."""
    every: int | None = None
    """And each whose step is a multiple of this."""

    def outdated(self, steps: list[int]) -> list[int]:
        """Returns the steps, of those given oldest first, whose checkpoints go."""
        return [step for step in steps[: -self.newest] if self.every is None or step % self.every]


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, retention: Retention, reward_fingerprint: str = "", config_text: str = ""
) -> Path:
    """Writes folder/step-NNNNNN and returns it; a kill at any moment leaves the previous checkpoints whole.

    Args:
        folder: the run's checkpoints folder.
        retention: which of the older checkpoints stay.
        reward_fingerprint: of the models that gave the rewards.
        config_text: the resolved recipe, YAML.
    """
    target = folder / f"step-{checkpoint.step:06d}"
    temporary = folder / f".step-{checkpoint.step:06d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for expert, state in checkpoint.adapters.items():
        (temporary / expert).mkdir()
        save_file(state, temporary / expert / ADAPTER_FILE)
    for expert, state in checkpoint.average.items():
        save_file(state, temporary / expert / AVERAGE_FILE)
    torch.save(checkpoint.optimizer, temporary / OPTIMIZER_FILE)
    (temporary / CONFIG_FILE).write_text(config_text, encoding="utf-8")
    document = {
        "step": checkpoint.step, "checksum": checkpoint.checksum, "experts": checkpoint.labels,
        "reward_fingerprint": reward_fingerprint, "learner": asdict(checkpoint.state),
        "base_loras": [asdict(lora) for lora in checkpoint.base_loras],
    }  # fmt: skip
    (temporary / STATE_FILE).write_text(json.dumps(document), encoding="utf-8")
    for file in sorted(temporary.rglob("*")):
        _fsync(file)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    _fsync(folder)
    for step in retention.outdated([step_of(path) for path in list_checkpoints(folder)]):
        shutil.rmtree(folder / f"step-{step:06d}")
    return target


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def reward_fingerprint_of(path: Path) -> str:
    """Returns the fingerprint of the models that gave the rewards of a checkpoint; raises RunFolderError."""
    try:
        return str(json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["reward_fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"checkpoint {path} cannot be read: {error!r}") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()]
    return sorted(found, key=step_of)


def load_checkpoint(path: Path) -> Checkpoint:
    """Returns a checkpoint; raises RunFolderError naming the file that is missing or broken."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        adapters = {expert: load_file(path / expert / ADAPTER_FILE) for expert in state["experts"]}
        files = {expert: path / expert / AVERAGE_FILE for expert in state["experts"]}
        average = {expert: load_file(file) for expert, file in files.items() if file.is_file()}
        optimizer = torch.load(path / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        learner = LearnerState(**state["learner"])
        base = tuple(MergedLora(**lora) for lora in state["base_loras"])
        return Checkpoint(
            state["step"], adapters, optimizer, state["checksum"], state["experts"], learner, average, base
        )
    except Exception as error:
        raise RunFolderError(f"checkpoint {path} cannot be read: {error}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
