"""A run, what it leaves behind, and what disturbs it without changing a bit of its result."""

import itertools
import json
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from e2e_support import Server, assert_same_run, environment, free_port, records, wait_for_lines

from likeness_trainer.errors import (
    ConfigError,
    ModelLoadError,
    NonFiniteRunError,
    RewardRejectedError,
    RewardUnavailableError,
    RunFolderError,
)

pytestmark = pytest.mark.slow


def test_a_run_leaves_everything_that_is_promised(undisturbed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in (
        "config.yaml", "metrics.jsonl", "tensorboard", "samples/step-000004.png", "samples/held_out_before.npz",
        "samples/held_out_after.npz", "checkpoints/step-000004/state.json", "lora/low_noise.safetensors",
        "lora/peft/low_noise/adapter_model.safetensors", "report.html", "summary.json",
    ):  # fmt: skip
        assert (undisturbed / name).exists(), name
    held_out = json.loads((undisturbed / "summary.json").read_text())["held_out"]
    assert held_out["pairs"] == 2
    assert held_out["difference"] == pytest.approx(held_out["after"] - held_out["before"])
    assert held_out["ci95"][0] <= held_out["difference"] <= held_out["ci95"][1]
    events = EventAccumulator(str(undisturbed / "tensorboard")).Reload()
    assert [event.step for event in events.Images("sample")] == [2, 4]  # where checkpoints are made
    lines = records(undisturbed)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["ratio_deviation_first"] == 0.0 for line in lines)
    assert lines[0]["kl"] == 0.0
    assert lines[-1]["kl"] > 0.0


def test_the_same_recipe_gives_the_same_run(run_here, server, undisturbed, tmp_path) -> None:
    run_here(tmp_path / "again", server.endpoint)
    assert_same_run(tmp_path / "again", undisturbed)


def test_another_seed_gives_another_run(run_here, server, undisturbed, tmp_path) -> None:
    run_here(tmp_path / "other", server.endpoint, "seed=1", "steps=1")
    assert records(tmp_path / "other")[0]["reward"] != records(undisturbed)[0]["reward"]


@pytest.mark.parametrize("lines", [1, 3])
def test_a_run_killed_at_any_step_and_resumed_equals_the_undisturbed_one(
    run_here, command, server, undisturbed, tmp_path, lines
) -> None:
    run_dir = tmp_path / "killed"
    process = subprocess.Popen(command(run_dir, server.endpoint), env=environment(), stderr=subprocess.DEVNULL)
    wait_for_lines(run_dir / "metrics.jsonl", lines, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_here(run_dir, server.endpoint, resume=True)
    assert_same_run(run_dir, undisturbed)


def test_sigterm_stops_after_a_step_with_a_checkpoint(run_here, command, server, undisturbed, tmp_path) -> None:
    run_dir = tmp_path / "stopped"
    process = subprocess.Popen(command(run_dir, server.endpoint), env=environment(), stderr=subprocess.PIPE)
    wait_for_lines(run_dir / "metrics.jsonl", 1, process)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert b"go on with --resume" in errors
    run_here(run_dir, server.endpoint, resume=True)
    assert_same_run(run_dir, undisturbed)


def test_a_reward_server_that_dies_and_returns_changes_nothing(run_here, undisturbed, tmp_path) -> None:
    server = Server(free_port(), tmp_path / "server.log").start()
    run_dir = tmp_path / "run"

    def disturb() -> None:
        wait_for_lines(run_dir / "metrics.jsonl", 1)
        server.kill()
        time.sleep(1.0)
        server.start()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        run_here(run_dir, server.endpoint)
    finally:
        disturber.join()
        server.kill()
    assert_same_run(run_dir, undisturbed)


def test_a_reward_server_that_stays_away_ends_the_run_with_a_checkpoint(
    run_here, server, undisturbed, tmp_path
) -> None:
    doomed = Server(free_port(), tmp_path / "server.log").start()
    run_dir = tmp_path / "run"

    def disturb() -> None:
        wait_for_lines(run_dir / "metrics.jsonl", 1)
        doomed.kill()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    with pytest.raises(RewardUnavailableError, match="--resume"):
        run_here(run_dir, doomed.endpoint, "reward.give_up_after_s=1")
    disturber.join()
    assert list((run_dir / "checkpoints").glob("step-*"))
    run_here(run_dir, server.endpoint, resume=True)
    assert_same_run(run_dir, undisturbed)


def test_without_a_reward_server_the_run_ends_within_ten_seconds_and_leaves_nothing(command, tmp_path) -> None:
    run_dir = tmp_path / "run"
    port = free_port()
    more = ("reward.connect_timeout_s=2",)
    start = time.monotonic()
    result = subprocess.run(
        command(run_dir, f"127.0.0.1:{port}", more=more), env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 75
    assert f"no reward server answers at 127.0.0.1:{port}" in result.stderr
    assert "likeness-reward serve" in result.stderr
    assert "Traceback" not in result.stderr
    assert not run_dir.exists()
    assert time.monotonic() - start < 30  # 2 s of waiting; the rest is starting Python


def test_a_folder_that_holds_a_run_is_not_touched(run_here, server, undisturbed) -> None:
    before = (undisturbed / "config.yaml").read_bytes()
    with pytest.raises(RunFolderError, match="already holds a run"):
        run_here(undisturbed, server.endpoint, "seed=5")
    assert (undisturbed / "config.yaml").read_bytes() == before


def test_resuming_with_other_settings_names_them(run_here, server, undisturbed) -> None:
    with pytest.raises(RunFolderError, match="seed: was 0, is 5"):
        run_here(undisturbed, server.endpoint, "seed=5", resume=True)


def test_resuming_what_is_not_there_is_refused(run_here, server, tmp_path) -> None:
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        run_here(tmp_path / "none", server.endpoint, resume=True)


def test_a_server_with_other_models_is_refused(run_here, server, tmp_path) -> None:
    with pytest.raises(RewardRejectedError, match="expected_fingerprint"):
        run_here(tmp_path / "run", server.endpoint, "reward.expected_fingerprint=abcd")
    assert not (tmp_path / "run").exists()


def test_a_component_that_the_server_does_not_give_is_refused(run_here, server, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"names beauty; the reward server .* gives identity, coverage"):
        run_here(tmp_path / "run", server.endpoint, "algorithm.reward_weights={identity: 1, beauty: 1}")
    assert not (tmp_path / "run").exists()


def test_resuming_under_other_face_models_is_refused_unless_accepted(run_here, server, undisturbed, tmp_path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    for state in (run_dir / "checkpoints").glob("step-*/state.json"):
        document = json.loads(state.read_text())
        state.write_text(json.dumps({**document, "reward_fingerprint": "other-models"}))
    with pytest.raises(RunFolderError, match=r"rewarded by models other-models.*--accept-other-reward"):
        run_here(run_dir, server.endpoint, resume=True)
    before = (run_dir / "samples" / "held_out_before.npz").stat().st_mtime_ns
    run_here(run_dir, server.endpoint, resume=True, accept_other_reward=True)
    assert (run_dir / "samples" / "held_out_before.npz").stat().st_mtime_ns > before


def test_rewards_that_stay_nan_stop_the_run_with_the_last_good_checkpoint(
    run_here, server, undisturbed, tmp_path, monkeypatch
) -> None:
    from likeness_trainer import train

    run_dir = tmp_path / "run"
    true_scores = train.group_scores
    groups = itertools.count(1)

    def broken(*arguments):
        scores = true_scores(*arguments)
        return scores if next(groups) <= 2 else {name: values * float("nan") for name, values in scores.items()}

    monkeypatch.setattr(train, "group_scores", broken)  # two groups a step: steps 2 and 3 are not finite
    with pytest.raises(NonFiniteRunError) as caught:
        run_here(run_dir, server.endpoint, "max_skipped_steps=2")
    for text in ("after step 3", "2 steps in a row", "the reward component identity of row", "step-000001"):
        assert text in str(caught.value)
    assert [line["skipped"] for line in records(run_dir)] == [0, 1, 1]
    monkeypatch.undo()
    run_here(run_dir, server.endpoint, "max_skipped_steps=2", resume=True)
    assert_same_run(run_dir, undisturbed)


def test_videos_that_are_not_finite_skip_the_step(run_here, server, undisturbed, tmp_path, monkeypatch) -> None:
    from likeness_trainer import train
    from likeness_trainer.wan.decoding import NonFiniteFramesError

    true_send = train.send_decoded
    batches = itertools.count(1)

    def broken(*arguments):
        if next(batches) == 2:
            raise NonFiniteFramesError("3 of 9 decoded pixel values are NaN or infinite")
        true_send(*arguments)

    monkeypatch.setattr(train, "send_decoded", broken)
    run_here(tmp_path / "run", server.endpoint, "steps=2")
    first, second = records(tmp_path / "run")
    assert first["skipped"] == 1
    assert "3 of 9 decoded" in first["skipped_because"]
    assert (second["skipped"], second["kl"]) == (0, 0.0)  # nothing had moved


@pytest.mark.parametrize(
    "more",
    [
        ("sampler.stochastic_step=flow_sde", "algorithm.ratio=guard", "algorithm.scale=batch"),
        ("algorithm.window=one", "algorithm.baseline=leave_one_out", "optimizer.ema_decay=0.9"),
        (
            "algorithm.reward_weights={identity: 1, coverage: 0.5, motion: 0.5}",
            "algorithm.kl_target=0.01",
            "algorithm.credit=video",
        ),
    ],
)  # fmt: skip
def test_every_option_resumes_bit_for_bit(run_here, server, tmp_path, more) -> None:
    run_here(tmp_path / "whole", server.endpoint, *more)
    run_here(tmp_path / "halves", server.endpoint, "steps=2", *more)
    run_here(tmp_path / "halves", server.endpoint, *more, resume=True)
    assert_same_run(tmp_path / "halves", tmp_path / "whole")
    assert all(line["ratio_deviation_first"] == 0.0 for line in records(tmp_path / "whole"))


def test_what_leaves_the_device_changes_no_bit_of_a_run(run_here, server, undisturbed, tmp_path) -> None:
    run_here(tmp_path / "run", server.endpoint, "memory.swap_idle_expert=true", "memory.drop_encoders=false")
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_model_file_that_is_not_there_is_named_and_leaves_no_folder(run_here, server, tmp_path) -> None:
    with pytest.raises(ModelLoadError, match=r"vae: .*absent\.safetensors"):
        run_here(tmp_path / "run", server.endpoint, f"model.model_paths.vae={tmp_path / 'absent.safetensors'}")
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_server_takes_is_refused(run_here, server, tmp_path) -> None:
    more = ("algorithm.group_size=4096", "algorithm.branch_batch=4096")
    with pytest.raises(RewardRejectedError, match="branch_batch is 4096"):
        run_here(tmp_path / "run", server.endpoint, *more)
