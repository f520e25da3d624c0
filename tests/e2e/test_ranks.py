"""One recipe on one process, on two, and on two with sharded weights: one run; and what becomes of it when one dies."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import disturbed_trainer
import psutil
import pytest
from e2e_support import ROOT, Server, assert_same_run, environment, records, wait_for_lines
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

# Four groups a step: 4 on one rank, 2 and 2 on two. Three held-out pairs cannot be halved.
# The rate is a tenth of the toy's: AdamW divides a gradient by its own size, so the rounding of sums in another order
# moves weights with gradients near 0 by up to a twentieth of the rate a run of three steps.
STEPS = 3
RUN = (
    f"steps={STEPS}", "checkpoint_every=1", "optimizer.learning_rate=1e-4", "algorithm.groups_per_step=4",
    "algorithm.scale=batch", "algorithm.kl_target=1e-4", "evaluation.pairs=3",
)  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def torchrun(command: Callable[..., list[str]], server: Server) -> Callable[..., list[str]]:
    """Returns a function that gives the command line of a run on two ranks of this machine."""

    def make(run_dir: Path, *more: str, restarts: int = 0, script: Path | None = None) -> list[str]:
        python, *trainer = command(run_dir, server.endpoint, more=(*RUN, *more))
        if script is not None:
            trainer[:2] = [str(script)]  # in place of -m likeness_trainer
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [python, *launcher, "--max-restarts", str(restarts), *trainer]

    return make


@pytest.fixture(scope="module")
def alone(run_here, server, tmp_path_factory) -> Path:
    """The folder of the run on one process."""
    path = tmp_path_factory.mktemp("alone") / "run"
    run_here(path, server.endpoint, *RUN)
    return path


def finish(command: list[str]) -> str:
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_close_run(run_dir: Path, other: Path) -> None:
    """All metrics and all adapter weights agree within TOLERANCE."""
    ours, theirs = records(run_dir), records(other)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for line, expected in zip(ours, theirs, strict=True):
        texts = {name: value for name, value in expected.items() if isinstance(value, str)}
        assert {name: line.pop(name) for name in texts} == texts
        numbers = {name: value for name, value in expected.items() if name not in texts}
        assert line == pytest.approx(numbers, rel=TOLERANCE, abs=TOLERANCE)
    weights, expected = (load_file(path / "lora" / "low_noise.safetensors") for path in (run_dir, other))
    assert weights.keys() == expected.keys()
    assert max(float((weights[name] - expected[name]).abs().max()) for name in weights) <= TOLERANCE
    assert max(float(tensor.abs().max()) for name, tensor in weights.items() if "lora_B" in name) > 10 * TOLERANCE
    held_out, reference = (json.loads((path / "summary.json").read_text())["held_out"] for path in (run_dir, other))
    for name in ("before", "after", "difference"):
        assert held_out[name] == pytest.approx(reference[name], abs=1e-4)
    assert held_out["pairs"] == reference["pairs"] == 3


@pytest.fixture(scope="module")
def two_ranks(torchrun, tmp_path_factory) -> Path:
    """The folder of the run on two ranks that nothing disturbed."""
    path = tmp_path_factory.mktemp("two_ranks") / "run"
    assert finish(torchrun(path)).splitlines() == [str(path)]  # told by rank 0 alone
    return path


def worker(launcher: "subprocess.Popen[bytes]", rank: int) -> psutil.Process:
    """The process of one rank."""
    children = psutil.Process(launcher.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def test_two_ranks_make_the_run_of_one(two_ranks, alone) -> None:
    assert_close_run(two_ranks, alone)


def test_two_ranks_with_sharded_weights_make_the_run_of_one(torchrun, alone, tmp_path) -> None:
    finish(torchrun(tmp_path / "run", "parallel.sharding=fsdp2"))
    assert_close_run(tmp_path / "run", alone)


def test_unequal_ranks_with_sharded_weights_make_the_run_of_one(torchrun, run_here, server, alone, tmp_path) -> None:
    """Checkpoints, guidance and a merged base over sharded weights, while rank 1 loses a group and meets a NaN."""
    shutil.copy(alone / "lora" / "low_noise.safetensors", tmp_path / "few_steps.safetensors")
    more = (
        "model.use_gradient_checkpointing=true", "sampler.guidance_scale={dit: 1, dit2: 1.5}",
        f"model.base_loras=[{{path: {tmp_path / 'few_steps.safetensors'}, expert: dit2, strength: 2}}]",
    )  # fmt: skip
    with disturbed_trainer.disturbed():
        run_here(tmp_path / "alone", server.endpoint, *RUN, *more)
    script = Path(disturbed_trainer.__file__)
    finish(torchrun(tmp_path / "run", *more, "parallel.sharding=fsdp2", script=script))
    assert_close_run(tmp_path / "run", tmp_path / "alone")
    first, second, third = records(tmp_path / "run")
    assert (first["groups_dropped"], second["groups_dropped"], third["groups_dropped"]) == (1, 1, 0)
    assert (first["skipped"], second["skipped"], third["skipped"]) == (0, 1, 0)
    assert "decoded pixel values are NaN or infinite" in second["skipped_because"]
    assert first["grad_norm"] > 0
    assert third["grad_norm"] > 0


def test_a_rank_that_gets_sigterm_stops_all_after_the_step_in_hand(torchrun, run_here, server, alone, tmp_path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(torchrun(run_dir), env=environment(), stdout=output, stderr=output)
        wait_for_lines(run_dir / "metrics.jsonl", 1, launcher)
        worker(launcher, 1).send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=300) != 0
    done = len(records(run_dir))
    assert 1 <= done < STEPS, log.read_text()
    # Both ranks came to the end of the same step and told so; the checkpoint is of that step.
    for rank in ("error: ", "error on rank 1: "):
        assert f"{rank}stopped after step {done}, with a checkpoint" in log.read_text()
    assert (run_dir / "checkpoints" / f"step-{done:06d}" / "state.json").is_file()
    run_here(run_dir, server.endpoint, *RUN, resume=True)  # on one rank
    assert_close_run(run_dir, alone)


def test_both_algorithms_on_two_ranks_with_sharded_weights_make_the_run_of_one(
    torchrun, run_here, server, tmp_path
) -> None:
    """The first step's gradients are equal. AdamW then moves weights whose gradient is rounding alone by the whole
    rate, either way, and gradients through pixels feel it more than those of samples do."""
    hybrid = ("steps=2", "algorithm.name=hybrid", "algorithm.groups_per_step=2", "algorithm.kl_target=null")
    run_here(tmp_path / "alone", server.endpoint, *RUN, *hybrid)
    finish(torchrun(tmp_path / "run", *hybrid, "parallel.sharding=fsdp2"))
    ours, theirs = records(tmp_path / "run"), records(tmp_path / "alone")
    assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE)
    assert ours[1] == pytest.approx(theirs[1], rel=0.01)
    assert all(line["grad_norm"] > 0 for line in ours)
    weights, expected = (load_file(tmp_path / run / "lora" / "low_noise.safetensors") for run in ("run", "alone"))
    moved = [name for name in weights if "lora_B" in name]
    distance = sum(float(((weights[name] - expected[name]) ** 2).sum()) for name in moved) ** 0.5
    assert distance <= 0.02 * sum(float((expected[name] ** 2).sum()) for name in moved) ** 0.5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_started_anew_and_changes_nothing(torchrun, two_ranks, tmp_path, rank) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(torchrun(run_dir, restarts=1), env=environment(), stdout=output, stderr=output)
        wait_for_lines(run_dir / "metrics.jsonl", 2, launcher)  # so the checkpoint of step 1 is complete
        worker(launcher, rank).send_signal(signal.SIGKILL)
        assert launcher.wait(timeout=300) == 0, log.read_text()
    assert f"resuming {run_dir} after step " in log.read_text()
    assert_same_run(run_dir, two_ranks)
