"""One recipe on one process, on two, and on two with sharded weights: one run; and what becomes of it when one dies."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_support import ROOT, Server, environment, records, wait_for_lines
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

# Four groups a step: 4 on one rank, 2 and 2 on two. Three held-out pairs cannot be halved.
STEPS = 3
RUN = (
    f"steps={STEPS}", "checkpoint_every=1", "algorithm.groups_per_step=4", "algorithm.scale=batch",
    "algorithm.kl_target=1e-4", "evaluation.pairs=3",
)  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def torchrun(command: Callable[..., list[str]], server: Server) -> Callable[..., list[str]]:
    """Returns a function that gives the command line of a run on two ranks of this machine."""

    def make(run_dir: Path, *more: str, restarts: int = 0) -> list[str]:
        python, *trainer = command(run_dir, server.endpoint, more=(*RUN, *more))
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
    assert ours == [pytest.approx(line, rel=TOLERANCE, abs=TOLERANCE) for line in theirs]
    weights, expected = (load_file(path / "lora" / "low_noise.safetensors") for path in (run_dir, other))
    assert weights.keys() == expected.keys()
    assert max(float((weights[name] - expected[name]).abs().max()) for name in weights) <= TOLERANCE
    assert max(float(tensor.abs().max()) for name, tensor in weights.items() if "lora_B" in name) > 100 * TOLERANCE
    held_out, reference = (json.loads((path / "summary.json").read_text())["held_out"] for path in (run_dir, other))
    assert held_out == pytest.approx(reference, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_ranks_make_the_run_of_one(torchrun, alone, tmp_path, sharding) -> None:
    run_dir = tmp_path / "run"
    told = finish(torchrun(run_dir, f"parallel.sharding={sharding}"))
    assert told.splitlines() == [str(run_dir)]  # from rank 0 alone
    assert_close_run(run_dir, alone)
