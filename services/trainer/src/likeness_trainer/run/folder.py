"""The folder of a run: where everything is, and who may write there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from likeness_trainer.config import TrainConfig, dump_config
from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.checkpoint import list_checkpoints

EXTENDABLE = (
    "steps", "checkpoint_every", "keep_checkpoints", "keep_every", "max_skipped_steps", "threads", "reward",
    "evaluation", "tracking", "parallel", "memory", "run_dir",
)  # fmt: skip
"""Settings that may differ when a run is resumed: they do not change what the steps already done have made."""


class RunFolder:
    """RUN/: config.yaml, metrics.jsonl, tensorboard/, samples/, checkpoints/, lora/, report.html,
    summary.json, evaluation.json, environment.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"
        self.summary_file = path / "summary.json"
        self.evaluation_file = path / "evaluation.json"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """Returns a new run folder; raises RunFolderError when the path already holds a run or is not writable."""
        cls.check(path, resume=False)
        folder = cls(path)
        try:
            folder.samples.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
            write_text(folder.config_file, dump_config(config))
        except OSError as error:
            raise RunFolderError(f"run_dir {str(path)!r} cannot be written: {error}") from error
        return folder

    @classmethod
    def resume(cls, path: Path, config: TrainConfig) -> RunFolder:
        """Returns an existing run folder; raises RunFolderError naming every setting that would change its past."""
        folder = cls.existing(path)
        before = yaml.safe_load(folder.config_file.read_text(encoding="utf-8"))
        now = yaml.safe_load(dump_config(config))
        changed = [key for key in now if key not in EXTENDABLE and now[key] != before.get(key)]
        if changed:
            listed = "\n".join(f"  {key}: was {before.get(key)!r}, is {now[key]!r}" for key in changed)
            raise RunFolderError(f"{path} cannot be resumed with other settings:\n{listed}")
        write_text(folder.config_file, dump_config(config))
        return folder

    @classmethod
    def check(cls, path: Path, resume: bool) -> None:
        """Raises RunFolderError when a new run finds one already there, or a resumed one finds none."""
        if resume:
            cls.existing(path)
        elif cls(path).config_file.exists():
            raise RunFolderError(f"{path} already holds a run; continue it with --resume or choose another run_dir")

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Returns the folder of a run that exists; raises RunFolderError otherwise."""
        folder = cls(path)
        if not folder.config_file.is_file():
            raise RunFolderError(f"{path} is not the folder of a run: it has no config.yaml")
        return folder

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest complete checkpoint, or None."""
        return next(iter(reversed(list_checkpoints(self.checkpoints))), None)

    def write_evaluation(self, document: dict[str, Any]) -> None:
        """Writes evaluation.json atomically."""
        write_text(self.evaluation_file, json.dumps(document, indent=2) + "\n")

    def forget_evaluation(self) -> None:
        """Removes the scores of the untrained model, so that a resumed run takes them again: the reward changed."""
        (self.samples / "held_out_before.npz").unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json atomically."""
        write_text(self.summary_file, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Returns summary.json, or an empty mapping when there is none yet."""
        if not self.summary_file.is_file():
            return {}
        summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return summary


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
