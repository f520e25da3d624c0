"""Trackers: asked for by the recipe, named when they are absent, given every number, and resumed under the same id.

The two services are stood in for by modules that record the calls made to them.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from likeness_trainer.errors import ConfigError
from likeness_trainer.run.metrics import MetricsWriter
from likeness_trainer.run.trackers import TrackingConfig, flatten, open_trackers, require_trackers

SETTINGS = {"seed": 3, "optimizer": {"learning_rate": 1e-4}}


@pytest.mark.parametrize(("key", "package"), [("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")])
def test_a_tracker_that_is_not_installed_is_named(key: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"tracking\.{key} is 'faces'.*pip install likeness-trainer\[{package}\]"):
        require_trackers(TrackingConfig(**{key: "faces"}))
    require_trackers(TrackingConfig())


def test_wandb_gets_every_number_and_a_resumed_run_its_old_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda scalars, step: calls.append((step, scalars)), finish=lambda: calls.append("finished")
    )
    module = ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = TrackingConfig(wandb_project="faces")
    for resume_step in (None, 1):
        trackers = open_trackers(config, tmp_path, SETTINGS)
        with MetricsWriter(tmp_path, resume_step, trackers) as writer:
            writer.write(
                {"step": 1 if resume_step is None else 2, "reward": 0.5, "seconds": {"total": 2.0}, "why": "x"}
            )
    first, logged, finished, second, *_ = calls
    assert (first["project"], first["config"]) == ("faces", SETTINGS)
    assert logged == (1, {"reward": 0.5, "seconds/total": 2.0})
    assert finished == "finished"
    assert second["id"] == first["id"]
    assert second["resume"] == "allow"


def test_mlflow_gets_every_number_and_a_resumed_run_its_old_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"experiment {name}"

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            calls.append(("created", experiment_id))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_param(self, run_id: str, name: str, value: Any) -> None:
            calls.append((run_id, name, value))

        def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
            calls.append((run_id, name, value, step))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("terminated", run_id))

    tracking = ModuleType("mlflow.tracking")
    tracking.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    for step in (1, 2):
        (tracker,) = open_trackers(TrackingConfig(mlflow_experiment="faces"), tmp_path, SETTINGS)
        tracker.log(step, {"reward": 0.5})
        tracker.close()
    assert calls == [
        ("created", "experiment faces"), ("r1", "seed", 3), ("r1", "optimizer.learning_rate", 1e-4),
        ("r1", "reward", 0.5, 1), ("terminated", "r1"), ("r1", "reward", 0.5, 2), ("terminated", "r1"),
    ]  # fmt: skip


def test_no_tracker_is_opened_unasked(tmp_path: Path) -> None:
    assert open_trackers(TrackingConfig(), tmp_path, SETTINGS) == []


def test_settings_are_flattened_to_dotted_keys() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}
