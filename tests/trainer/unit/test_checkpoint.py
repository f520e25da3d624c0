"""Checkpoints are complete or absent."""

from pathlib import Path

import pytest
import torch

from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint


def checkpoint(step: int) -> Checkpoint:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    return Checkpoint(
        step, {"dit2": {"a.weight": parameter.detach()}}, optimizer.state_dict(), "c", {"dit2": "low_noise"}
    )


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    saved = checkpoint(4)
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=3))
    assert (loaded.step, loaded.checksum, loaded.labels) == (4, "c", {"dit2": "low_noise"})
    assert torch.equal(loaded.adapters["dit2"]["a.weight"], saved.adapters["dit2"]["a.weight"])
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], saved.optimizer["state"][0]["exp_avg"])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100, 101):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000100", "step-000101"]


def test_a_checkpoint_cut_off_while_it_was_written_does_not_count(tmp_path: Path) -> None:
    complete = save_checkpoint(tmp_path, checkpoint(1), keep=3)
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / "step-000003").mkdir()
    assert list_checkpoints(tmp_path) == [complete]
    save_checkpoint(tmp_path, checkpoint(2), keep=3)
    assert not (tmp_path / ".step-000002.partial").exists()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=3)
    (path / "dit2" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(RunFolderError, match="step-000001 cannot be read"):
        load_checkpoint(path)
