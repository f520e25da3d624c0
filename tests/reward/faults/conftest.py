"""Real server processes, to be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_S = 30


class ServerProcess:
    """`likeness-reward serve` in a process of its own."""

    def __init__(self, pack: Path, folder: Path, port: int, arguments: tuple[str, ...]) -> None:
        ready_file = folder / f"ready-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "likeness_reward", "serve", "--pack", str(pack), "--port", str(port)]
        self.log = ready_file.with_suffix(".log")
        with self.log.open("w") as written:  # a pipe that nobody reads would stop the server after 64 KiB
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(ready_file), *arguments],
                stdout=written,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        give_up_at = time.monotonic() + START_S
        while not ready_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_at, f"the server was not ready within {START_S} s"
            time.sleep(0.02)
        self.endpoint = ready_file.read_text()
        self.port = int(self.endpoint.rpartition(":")[2])

    def kill(self) -> None:
        """Ends the process at once, as a crash would."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """Asks the process to end in order."""
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def start_server(written_pack: Path, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts server processes: start_server(*arguments, port=0)."""
    started: list[ServerProcess] = []

    def start(*arguments: str, port: int = 0) -> ServerProcess:
        started.append(ServerProcess(written_pack, tmp_path, port, arguments))
        return started[-1]

    yield start
    for server in started:
        server.kill()
