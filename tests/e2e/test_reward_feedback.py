"""Runs by reward feedback and by both algorithms, from recipe to LoRA, with a real server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Server

from likeness_trainer.config import load_config
from likeness_trainer.errors import ConfigError


@pytest.mark.parametrize("name", ["reward_feedback", "hybrid"])
def test_a_run_moves_the_adapters(run_here: Callable[..., Any], server: Server, tmp_path: Path, name: str) -> None:
    folder = run_here(tmp_path / "run", server.endpoint, f"algorithm.name={name}")
    records = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert all(record["skipped"] == 0 and record["groups_dropped"] == 0 for record in records)
    assert all(record["grad_norm"] > 0 and record["seconds"]["feedback"] > 0 for record in records)
    assert records[0]["kl"] == 0.0  # the adapters start as the identity
    assert records[-1]["kl"] > 0.0
    assert any(folder.lora.iterdir())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("algorithm.updates_per_rollout=2", "updates_per_rollout is 2"),
        ("algorithm.reward_weights.motion=1", "motion, which has no gradient"),
        ("algorithm.feedback.last_steps=5", "the window has 4 steps"),
        ("algorithm.kl_target=0.1", "kl_target"),
        ("algorithm.feedback.spread=0", "algorithm.feedback.spread"),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    settings: Callable[..., list[str]], tmp_path: Path, setting: str, reason: str
) -> None:
    from e2e_support import RECIPE

    overrides = settings(tmp_path, "localhost:1", "algorithm.name=reward_feedback", setting)
    with pytest.raises(ConfigError, match=reason):
        load_config(RECIPE, overrides, environment={})
