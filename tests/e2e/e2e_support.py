"""What the end-to-end tests share: the server as a process, and how runs are compared."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "toy.yaml"
STEPS = 4
SMALL = [
    f"steps={STEPS}", "checkpoint_every=2", "algorithm.group_size=4", "algorithm.branch_batch=2",
    "algorithm.groups_per_step=2", "evaluation.pairs=2", "reward.first_backoff_s=0.1",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A reward server on a fixed port that can be killed and started again."""

    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ready: Path = field(init=False)

    def __post_init__(self) -> None:
        self.ready = self.log.with_suffix(".ready")

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Server":
        import likeness_toyworld

        self.ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "likeness_reward", "serve", "--pack", likeness_toyworld.face_pack_path()]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--ready-file", str(self.ready)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self.ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the reward server did not come up"
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without wall-clock values."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_run(run_dir: Path, other: Path) -> None:
    from safetensors.torch import load_file

    assert records(run_dir) == records(other)
    ours, theirs = (load_file(path / "lora" / "low_noise.safetensors") for path in (run_dir, other))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def wait_for_lines(
    path: Path, count: int, process: subprocess.Popen[bytes] | None = None, seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process is None or process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline, f"{path} did not reach {count} lines"
        time.sleep(0.02)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
