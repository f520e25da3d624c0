"""Projects of the compositions: one each for a test, with a folder for runs and a port of its own."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from docker_engine import ROOT, Engine
from local_triton import free_ports
from safetensors.torch import load_file

TOY_PACK = ROOT / "toyworld" / "src" / "likeness_toyworld" / "weights" / "face_pack"
CPU = ("docker-compose.yml",)
GPU_SHAPE = ("docker-compose.gpu.yml", "tests/deploy/triton_stand_in/docker-compose.yml")
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close(); print('reached')"
"""Program that prints "reached" when HOST PORT takes a connection."""
STEPS = 3
END_S = 600


class Composition:
    """A project of Docker Compose on some files, without building."""

    def __init__(self, engine: Engine, files: Sequence[str], runs: Path, **variables: str) -> None:
        (port,) = free_ports(1)
        self.engine = engine
        self.name = f"likeness-test-{os.getpid()}-{port}"
        self.run = runs / "toy"
        self.port = port
        self.reward_as_the_trainer_started: dict[str, object] = {}
        self.command = [*engine.compose, "--project-name", self.name]
        for file in files:
            self.command += ["--file", str(ROOT / file)]
        self.variables = {
            "LIKENESS_RUNS": str(runs), "LIKENESS_PORT": str(port), "LIKENESS_STEPS": str(STEPS),
            "LIKENESS_UID": str(os.getuid()), "LIKENESS_GID": str(os.getgid()), "LIKENESS_PACK": str(TOY_PACK),
        } | variables  # fmt: skip

    def __call__(self, *arguments: str, seconds: float = 300, check: bool = True) -> str:
        """Returns what docker compose prints on stdout. Raises AssertionError when it fails and `check` is set."""
        done = self.engine.completed([*self.command, *arguments], seconds, self.variables)
        assert not check or done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def up(self, *services: str) -> None:
        """Starts services, or all, in order of health; returns once the last has started."""
        done = self.engine.completed(
            [*self.command, "up", "--detach", "--no-build", "--pull", "never", *services], END_S, self.variables
        )
        assert done.returncode == 0, f"{done.stderr[-1000:]}\n{self('logs', '--no-color', check=False)[-6000:]}"

    def container(self, service: str) -> str:
        """Returns the id of a service's container, running or not."""
        return self("ps", "--all", "--quiet", service).strip()

    def state(self, service: str) -> dict[str, object]:
        """Returns what the engine knows of a service's container: State of `docker inspect`."""
        state: dict[str, object] = json.loads(
            self.engine("inspect", "--format", "{{json .State}}", self.container(service))
        )
        return state

    def crash(self, service: str) -> None:
        """Kills a service's process from outside, as the kernel would; its restart policy is what brings it back."""
        before = self.state(service)
        os.kill(int(str(before["Pid"])), 9)
        give_up_at = time.monotonic() + 60
        while True:
            now = self.state(service)
            if now["Running"] and now["StartedAt"] != before["StartedAt"]:
                return
            assert time.monotonic() < give_up_at, f"{service} was not started again: {now}"
            time.sleep(0.1)

    def wait_for_steps(self, count: int, seconds: float = 240) -> None:
        """Returns once the run has made so many steps."""
        give_up_at = time.monotonic() + seconds
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
            assert time.monotonic() < give_up_at, self("logs", "--no-color")
            time.sleep(0.2)

    def wait_for_end(self) -> None:
        """Returns once the trainer has ended with exit code 0."""
        self("wait", "trainer", seconds=END_S, check=False)
        state = self.state("trainer")
        assert state["ExitCode"] == 0, f"{state}\n{self('logs', '--no-color')}"

    def assert_same_lora(self, other: "Composition") -> None:
        """Raises AssertionError unless both runs ended with the same weights, bit for bit."""
        ours, theirs = (load_file(each.run / "lora" / "low_noise.safetensors") for each in (self, other))
        assert ours.keys() == theirs.keys()
        different = [name for name in ours if not ours[name].equal(theirs[name])]
        assert different == []
        assert any(bool(tensor.any()) for tensor in ours.values()), "a LoRA of zeros was never trained"

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
