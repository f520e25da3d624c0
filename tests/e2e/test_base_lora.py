"""A run on a base with a LoRA merged into it: what it samples, records and refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from e2e_support import records
from safetensors.torch import load_file, save_file

from likeness_trainer.config import load_config
from likeness_trainer.errors import ModelLoadError, RunFolderError
from likeness_trainer.run.folder import RunFolder

pytestmark = pytest.mark.slow


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def test_a_run_stands_on_the_merged_base_and_on_no_other(run_here, server, undisturbed, tmp_path) -> None:
    from likeness_trainer.run.sampling import load_trained

    merged = tmp_path / "few_steps.safetensors"
    shutil.copy(undisturbed / "lora" / "low_noise.safetensors", merged)
    setting = f"model.base_loras=[{{path: {merged}, expert: dit2}}]"
    run_dir = tmp_path / "run"
    run_here(run_dir, server.endpoint, setting, "steps=1")

    # The base is what the other run trained: without a new adapter it samples what that run sampled at its end.
    held_out, other = summary(run_dir)["held_out"], summary(undisturbed)["held_out"]
    assert held_out["before"] == pytest.approx(other["after"], abs=1e-4)
    assert abs(other["after"] - other["before"]) > 1e-3
    assert records(run_dir)[0]["kl"] == 0.0
    (recorded,) = json.loads((run_dir / "checkpoints" / "step-000001" / "state.json").read_text())["base_loras"]
    assert (recorded["expert"], recorded["path"], recorded["strength"]) == ("dit2", str(merged), 1.0)
    assert (
        "`few_steps.safetensors` into dit2 at strength 1: load them beside" in (run_dir / "lora/README.md").read_text()
    )

    with pytest.raises(RunFolderError, match="cannot be resumed with other settings"):
        run_here(run_dir, server.endpoint, "steps=2", resume=True)
    save_file({name: tensor + torch.ones_like(tensor) for name, tensor in load_file(merged).items()}, merged)
    told = r"stand on a base with .*few_steps\.safetensors .* merged; model\.base_loras now gives"
    with pytest.raises(RunFolderError, match=told):
        run_here(run_dir, server.endpoint, setting, "steps=2", resume=True)
    folder = RunFolder.existing(run_dir)
    with pytest.raises(RunFolderError, match=told):
        load_trained(folder, load_config(folder.config_file, environment={}))
    merged.unlink()
    with pytest.raises(ModelLoadError, match=r"of model\.base_loras do not exist:\n.*few_steps"):
        run_here(run_dir, server.endpoint, setting, "steps=2", resume=True)
