"""The command `likeness-trainer plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from likeness_trainer.config import load_config
from likeness_trainer.errors import ConfigError
from likeness_trainer.planning.plan import Gpus, make_plan
from likeness_trainer.planning.sizes import parse_size
from likeness_trainer.planning.table import print_plan


def plan_recipe(
    recipe: Path, overrides: Sequence[str], count: int, gpu_memory: str, reserve: str, as_json: bool
) -> None:
    """Prints the plan of a recipe, as tables or as JSON; what is being measured is shown while it is.

    Raises:
        ConfigError, ModelLoadError: see `load_config`, `parse_size` and `make_plan`.
    """
    if count < 1:
        raise ConfigError(f"--gpus is {count}, allowed: 1 or more")
    memory, kept = parse_size(gpu_memory, "--gpu-memory"), parse_size(reserve, "--reserve")
    if kept >= memory:
        raise ConfigError(f"--reserve is {reserve}, allowed: less than --gpu-memory ({gpu_memory})")
    config = load_config(recipe, overrides)
    with Console(stderr=True).status("") as status:
        plan = make_plan(config, Gpus(count, memory, kept), lambda what: status.update(f"measuring {what}"))
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan, Console())
