"""The LoRA of a run, in the two formats that other tools load."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from likeness_trainer.config import TrainConfig
from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.checkpoint import load_checkpoint, reward_fingerprint_of
from likeness_trainer.run.folder import RunFolder, write_text
from likeness_trainer.run.model_card import model_card
from likeness_trainer.wan.lora_files import AdapterWeights, LoraMetadata, write_peft_directory, write_single_file


def export_run_lora(
    folder: RunFolder,
    config: TrainConfig,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> list[Path]:
    """Writes `LABEL.safetensors` and `peft/LABEL/` for each trained expert, and a README.md; returns what was written.

    Needs the checkpoint only, not the model.

    Args:
        checkpoint: which one; the newest by default.
        output: folder to write to; the run's lora/ by default.
    """
    source = checkpoint or folder.latest_checkpoint()
    if source is None:
        raise RunFolderError(f"{folder.path} has no checkpoint yet, so there is no LoRA to export")
    state = load_checkpoint(source)
    reward_fingerprint = reward_fingerprint_of(source)
    target = output or folder.lora
    created = datetime.fromtimestamp(source.stat().st_mtime, UTC).date()
    written: list[Path] = []
    for expert, tensors in state.published.items():
        label = state.labels[expert]
        rank = config.model.lora_rank
        weights = AdapterWeights(tensors, rank, config.model.lora_alpha or rank)
        metadata = LoraMetadata(
            title=f"{folder.path.resolve().name} step {state.step}" + ("" if label == "lora" else f" {label}"),
            architecture=config.model.architecture + "/lora",
            base_model=_base_model(config.model.model_paths, expert),
            created=created,
            expert="" if label == "lora" else label,
            reward_fingerprint=reward_fingerprint,
        )
        written.append(write_single_file(weights, target / f"{label}.safetensors", metadata))
        written.append(write_peft_directory(weights, target / "peft" / label, metadata.base_model))
    title = f"{folder.path.resolve().name}, step {state.step}"
    card = target / "README.md"
    labels = list(state.labels.values())
    write_text(card, model_card(title, config, labels, state.step, reward_fingerprint, folder.read_summary()))
    return [*written, card]


def _base_model(model_paths: Any, expert: str) -> str:
    if isinstance(model_paths, dict):
        path = model_paths.get(expert, "")
        return Path(path if isinstance(path, str) else path[0]).name
    return ""
