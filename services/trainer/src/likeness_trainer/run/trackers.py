"""Weights & Biases and MLflow beside metrics.jsonl: packages of their own, imported when a recipe asks for them."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from likeness_trainer.errors import ConfigError


class TrackingConfig(BaseModel):
    """Where metrics go beside metrics.jsonl and TensorBoard. Each service takes its address and key from its own
    environment variables (WANDB_*, MLFLOW_*)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wandb_project: str | None = None
    """Project in Weights & Biases; needs `pip install likeness-trainer[wandb]`."""
    mlflow_experiment: str | None = None
    """Experiment in MLflow; needs `pip install likeness-trainer[mlflow]`."""


class Tracker(Protocol):
    """Takes the metrics of one run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """A run in Weights & Biases. A resumed run goes on under the same id, which is kept in the run folder."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        run_id = _kept_id(run_dir / "wandb_id", lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=project, name=run_dir.resolve().name, id=run_id, resume="allow", config=dict(settings),
            dir=str(run_dir),
        )  # fmt: skip

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run in MLflow. A resumed run goes on under the same id, which is kept in the run folder."""

    def __init__(self, experiment: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        self._client = tracking.MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)

        def create() -> str:
            run = self._client.create_run(experiment_id, run_name=run_dir.resolve().name)
            for name, value in flatten(settings).items():
                self._client.log_param(run.info.run_id, name, value)
            return str(run.info.run_id)

        self._run_id = _kept_id(run_dir / "mlflow_run_id", create)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def require_trackers(config: TrackingConfig) -> None:
    """Raises ConfigError naming the setting and the package when a tracker is asked for that is not installed."""
    for key, package in (("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")):
        if getattr(config, key) is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"tracking.{key} is {getattr(config, key)!r}, but the package {package} is not installed; "
                f"`pip install likeness-trainer[{package}]`, or leave tracking.{key} out"
            )


def open_trackers(config: TrackingConfig, run_dir: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    """Returns the trackers that a recipe asks for.

    Args:
        settings: the resolved recipe, which each tracker shows beside the metrics.
    """
    trackers: list[Tracker] = []
    if config.wandb_project is not None:
        trackers.append(WandbTracker(config.wandb_project, run_dir, settings))
    if config.mlflow_experiment is not None:
        trackers.append(MlflowTracker(config.mlflow_experiment, run_dir, settings))
    return trackers


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _kept_id(file: Path, create: Any) -> str:
    if not file.is_file():
        file.write_text(create(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
