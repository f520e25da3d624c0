"""The reward service of the GPU composition before a Triton on the CPU: what reaches what, and what it answers."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compositions import CONNECT, GPU_SHAPE, TOY_PACK, Composition
from docker_engine import Engine

pytestmark = pytest.mark.timeout(900)
ADDRESSES = '{{range $name, $each := .NetworkSettings.Networks}}{{$name}} {{$each.IPAddress}}{{"\\n"}}{{end}}'


@pytest.fixture(scope="module")
def project(composition: Callable[..., Composition], triton_image: str, token_file: Path) -> Composition:
    """The reward service, and what it waits for."""
    made = composition(*GPU_SHAPE, LIKENESS_TOKEN_FILE=str(token_file))
    made.up("reward")
    return made


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A painted video, and one of another person who is looked for in it."""
    dataset = pytest.importorskip("likeness_toyworld.dataset", reason="the toy world is not installed")
    folder = tmp_path_factory.mktemp("people")
    dataset.write_dataset(folder, 2, 0)
    first, second = sorted(folder.glob("*.mp4"))
    return first, second


def scored(clip: tuple[Path, Path], *where: str) -> Any:
    """Returns what the command line says of the clip, as JSON; None when no server answers."""
    words = ["score", str(clip[0]), "--identity", str(clip[1]), "--json", *where]
    done = subprocess.run([sys.executable, "-m", "likeness_reward", *words], capture_output=True, text=True)
    if done.returncode == 5:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def served(project: Composition, token_file: Path) -> tuple[str, ...]:
    """Returns the options that name the service."""
    return ("--endpoint", f"localhost:{project.port}", "--token-file", str(token_file))


def test_rewards_are_those_of_the_pack(project: Composition, clip: tuple[Path, Path], token_file: Path) -> None:
    assert scored(clip, *served(project, token_file)) == scored(clip, "--pack", str(TOY_PACK))


def test_images_go_through_memory_that_triton_sees(
    project: Composition, engine: Engine, clip: tuple[Path, Path], token_file: Path
) -> None:
    scored(clip, *served(project, token_file))
    names = engine("exec", project.container("triton"), "ls", "/dev/shm").split()
    assert any(name.startswith("likeness-") for name in names)
    assert "images go there in shared memory" in project("logs", "--no-color", "reward")


def test_triton_is_reached_by_the_service_alone(project: Composition, engine: Engine, reward_image: str) -> None:
    (line,) = engine("inspect", "--format", ADDRESSES, project.container("triton")).splitlines()
    network, address = line.split()
    assert network == f"{project.name}_inference"
    assert engine("exec", project.container("reward"), "python", "-c", CONNECT, "triton", "8001") == "reached"

    def reached_from(network: str, host: str, port: int) -> str:
        asks = ("run", "--rm", "--network", f"{project.name}_{network}", "--entrypoint", "python", reward_image)
        return engine(*asks, "-c", CONNECT, host, str(port), check=False)

    assert reached_from("rewards", "reward", 50051) == "reached", "trainers stand here"
    for host in ("triton", address):
        assert reached_from("rewards", host, 8001) == ""
        assert reached_from("host", host, 8001) == ""


def test_a_token_is_asked_for(project: Composition) -> None:
    words = ["info", "--endpoint", f"localhost:{project.port}"]
    refused = subprocess.run([sys.executable, "-m", "likeness_reward", *words], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "no valid bearer token" in refused.stderr


def test_it_answers_again_when_triton_was_killed(
    project: Composition, clip: tuple[Path, Path], token_file: Path
) -> None:
    before = scored(clip, *served(project, token_file))
    project.crash("triton")
    give_up_at = time.monotonic() + 120
    while (after := scored(clip, *served(project, token_file))) is None:
        assert time.monotonic() < give_up_at, project("logs", "--no-color")
        time.sleep(0.5)
    assert after == before
    names = project.engine("exec", project.container("triton"), "ls", "/dev/shm").split()
    assert any(name.startswith("likeness-") for name in names), "the memory is shared again"
