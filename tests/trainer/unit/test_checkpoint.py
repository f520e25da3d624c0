"""Checkpoints are complete or absent."""

from pathlib import Path

import pytest
import torch

from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.checkpoint import (
    Checkpoint,
    LearnerState,
    Retention,
    list_checkpoints,
    load_checkpoint,
    reward_fingerprint_of,
    save_checkpoint,
    step_of,
)


def checkpoint(step: int) -> Checkpoint:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    adapters = {"dit2": {"a.weight": parameter.detach()}}
    average = {"dit2": {"a.weight": parameter.detach() / 2}}
    state = LearnerState(kl_weight=0.1 + 0.2, skipped_in_a_row=2, average_updates=7)
    return Checkpoint(step, adapters, optimizer.state_dict(), "c", {"dit2": "low_noise"}, state, average)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    saved = checkpoint(4)
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, Retention(3)))
    assert (loaded.step, loaded.checksum, loaded.labels) == (4, "c", {"dit2": "low_noise"})
    assert loaded.state == saved.state
    assert torch.equal(loaded.published["dit2"]["a.weight"], saved.average["dit2"]["a.weight"])
    assert torch.equal(loaded.adapters["dit2"]["a.weight"], saved.adapters["dit2"]["a.weight"])
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], saved.optimizer["state"][0]["exp_avg"])


@pytest.mark.parametrize(("every", "kept"), [(None, [100, 101]), (10, [10, 100, 101]), (9, [9, 100, 101])])
def test_the_newest_and_every_mth_are_kept(tmp_path: Path, every: int | None, kept: list[int]) -> None:
    for step in (9, 10, 100, 101):
        save_checkpoint(tmp_path, checkpoint(step), Retention(2, every))
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == kept


def test_a_checkpoint_tells_what_the_run_stood_on(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), Retention(1), "face-models", "seed: 3\n")
    assert reward_fingerprint_of(path) == "face-models"
    assert (path / "config.yaml").read_text() == "seed: 3\n"
    (path / "state.json").write_text("{}")
    with pytest.raises(RunFolderError, match="step-000001 cannot be read"):
        reward_fingerprint_of(path)


def test_a_checkpoint_cut_off_while_it_was_written_does_not_count(tmp_path: Path) -> None:
    complete = save_checkpoint(tmp_path, checkpoint(1), Retention(3))
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / "step-000003").mkdir()
    assert list_checkpoints(tmp_path) == [complete]
    save_checkpoint(tmp_path, checkpoint(2), Retention(3))
    assert not (tmp_path / ".step-000002.partial").exists()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), Retention(3))
    (path / "dit2" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(RunFolderError, match="step-000001 cannot be read"):
        load_checkpoint(path)
