"""The composition for real: it trains, and a reward container that is killed on the way changes no bit of the LoRA."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
IMAGES = ("likeness-reward", "likeness-trainer:toy")
STEPS = 3


def compose_command() -> list[str] | None:
    """Returns how Docker Compose v2 is called here: as a plugin of docker, or as a program of its own."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return None


@pytest.fixture(scope="module")
def compose() -> list[str]:
    command = compose_command()
    if command is None:
        pytest.skip("Docker Compose v2 is not installed")
    for image in IMAGES:
        found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True)
        if found.returncode != 0:
            pytest.skip(f"no image {image} (build it with `docker compose build`): {found.stderr.strip()}")
    return command


class Composition:
    """One project of the composition, with a folder for runs and a port of its own."""

    def __init__(self, command: list[str], runs: Path, port: int) -> None:
        self.command = [*command, "-p", f"likeness-test-{os.getpid()}-{port}", "-f", str(ROOT / "docker-compose.yml")]
        self.run = runs / "toy"
        self.environment = os.environ | {
            "LIKENESS_RUNS": str(runs), "LIKENESS_PORT": str(port), "LIKENESS_STEPS": str(STEPS),
            "LIKENESS_UID": str(os.getuid()), "LIKENESS_GID": str(os.getgid()),
        }  # fmt: skip

    def __call__(self, *arguments: str, seconds: float = 300) -> str:
        result = subprocess.run(
            [*self.command, *arguments], env=self.environment, capture_output=True, text=True, timeout=seconds
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def wait_for_steps(self, count: int, seconds: float = 240) -> None:
        give_up_at = time.monotonic() + seconds
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
            assert time.monotonic() < give_up_at, self("logs", "--no-color")
            time.sleep(0.2)

    def wait_for_end(self) -> None:
        assert self("wait", "trainer", seconds=400).strip().endswith("0"), self("logs", "--no-color", "trainer")


@pytest.fixture
def composition(compose: list[str], tmp_path: Path) -> Iterator[Callable[[str, int], Composition]]:
    """Returns a function that gives a project by name and port; all are taken down afterwards."""
    projects = []

    def make(name: str, port: int) -> Composition:
        runs = tmp_path / name
        runs.mkdir()
        projects.append(Composition(compose, runs, port))
        return projects[-1]

    yield make
    for project in projects:
        project("down", "--volumes", "--timeout", "5")


@pytest.mark.timeout(900)
def test_it_trains_and_a_killed_reward_container_changes_nothing(composition) -> None:
    calm, disturbed = composition("calm", 50061), composition("disturbed", 50062)
    calm("up", "--detach", "--no-build")
    calm.wait_for_end()
    (calm.run / "report.html").unlink()
    calm("run", "--rm", "--no-deps", "trainer", "report", "/runs/toy")
    assert (calm.run / "report.html").stat().st_size > 10_000

    disturbed("up", "--detach", "--no-build")
    disturbed.wait_for_steps(1)
    disturbed("kill", "reward")
    time.sleep(1.0)
    disturbed("start", "reward")
    disturbed.wait_for_end()
    ours, theirs = (load_file(project.run / "lora" / "low_noise.safetensors") for project in (disturbed, calm))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
