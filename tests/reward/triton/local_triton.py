"""The real Triton of the nvidia-pytriton wheel: CPU only, python backend only, in a virtual environment of its own.

`make test` makes that environment, .venv/triton, because the wheel needs another numpy than the rest. By hand:

    .venv/bin/python tests/reward/triton/local_triton.py MODEL_REPOSITORY [PORT]
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = Path(os.environ.get("LIKENESS_TRITON_ENVIRONMENT", REPOSITORY / ".venv" / "triton"))
START_S = 60
PARENT_DEATH_SIGNAL = 1
BACKEND_FILES = ("backends/python/libtriton_python.so", "backends/python/triton_python_backend_utils.py")


class NoTriton(Exception):
    """What is missing for a Triton on this machine."""


def installed_triton() -> tuple[Path, Path]:
    """Returns the wheel's tritonserver folder and its stub for the environment's Python. Raises NoTriton."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        raise NoTriton(f"{ENVIRONMENT} does not exist; `make test` makes it from requirements-triton.txt")
    found = sorted((ENVIRONMENT / "lib").glob("python3.*/site-packages/pytriton/tritonserver"))
    if not found or not (found[0] / "bin" / "tritonserver").exists():
        raise NoTriton(f"nvidia-pytriton is not installed in {ENVIRONMENT}")
    version = found[0].parents[2].name.removeprefix("python")
    stub = found[0] / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise NoTriton(f"nvidia-pytriton has no python backend for Python {version}")
    return found[0], stub


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class TritonProcess:
    """A tritonserver on loopback, in a session of its own so that its stubs end with it."""

    def __init__(self, repository: Path, folder: Path, port: int | None = None) -> None:
        server, stub = installed_triton()
        backend = self.lay_out_backend(folder, server, stub)
        self.prefix = f"likeness_test_{os.getpid()}_{time.monotonic_ns()}_"
        self.log = folder / f"{self.prefix}.log"
        ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        ports["grpc"] = port or ports["grpc"]
        self.url = f"127.0.0.1:{ports['grpc']}"
        command = [
            server / "bin" / "tritonserver",
            f"--model-repository={repository}",
            f"--backend-directory={backend.parent}",
            *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
            *(f"--{kind}-port={number}" for kind, number in ports.items()),
            "--allow-gpu-metrics=false",
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self.prefix}",
        ]
        environment = os.environ | self.libraries(server)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @staticmethod
    def lay_out_backend(folder: Path, server: Path, stub: Path) -> Path:
        """Returns a folder with the python backend and the stub of the environment's Python."""
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True, exist_ok=True)
        for source in (*(server / name for name in BACKEND_FILES), stub):
            with contextlib.suppress(FileExistsError):
                (backend / source.name).symlink_to(source)
        return backend

    @staticmethod
    def libraries(server: Path) -> dict[str, str]:
        """Returns the variables with which tritonserver and its stubs find their libraries."""
        libraries = ENVIRONMENT / "lib" / server.parents[2].name / "site-packages" / "nvidia_pytriton.libs"
        return {
            "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{base_library_folder()}",
        }

    @property
    def port(self) -> int:
        """The gRPC port."""
        return int(self.url.rpartition(":")[2])

    def wait_until_ready(self) -> "TritonProcess":
        """Returns itself once the models are loaded."""
        give_up_at = time.monotonic() + START_S
        with InferenceServerClient(self.url) as client:
            while time.monotonic() < give_up_at:
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                with contextlib.suppress(InferenceServerException):
                    if client.is_server_ready(client_timeout=1):
                        return self
                time.sleep(0.05)
        raise AssertionError(f"Triton was not ready within {START_S} s:\n{self.log.read_text()[-4000:]}")

    def signal(self, number: int) -> None:
        """Sends a signal to Triton itself."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends Triton as a crash would, then its stubs, and removes the shared memory between them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for left in Path("/dev/shm").glob(f"{self.prefix}*"):
            left.unlink(missing_ok=True)


def base_library_folder() -> str:
    """Returns the folder of the libpython that the stub is linked with."""
    code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    python = ENVIRONMENT / "bin" / "python"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def end_with_parent() -> None:
    """Lets a child process end when this one does."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    """Runs a Triton until SIGINT or SIGTERM."""
    repository, *port = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        triton = TritonProcess(Path(repository), Path(folder), int(port[0]) if port else None)
        try:
            print(f"Triton is ready at {triton.wait_until_ready().url}", flush=True)
            triton.process.wait()
        except KeyboardInterrupt:
            print("stopping")
        finally:
            triton.kill()


if __name__ == "__main__":
    main()
