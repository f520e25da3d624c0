"""Commands of the trainer, run in a thread while a test plays the cluster."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from api_server import TOKEN

from likeness_trainer.cli import build_parser
from likeness_trainer.errors import TrainerError

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "wan2.1-t2v-1.3b.yaml"
SUBMIT = ("submit", str(RECIPE), "--image", "registry.example/likeness-trainer:0.1.0", "--name", "anna",
          "--runs-claim", "likeness-runs", "--models-claim", "wan-models", "--data-claim", "people",
          "--reward-endpoint", "likeness-reward-headless.studio.svc:50051")  # fmt: skip
PATIENCE_S = 30.0
"""After which a test that waits has failed."""


class Command:
    """A command that runs in a thread while a test plays the cluster."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
        self._capsys = capsys
        self._parsed = build_parser().parse_args(arguments)
        self.error: TrainerError | None = None
        self.crash: BaseException | None = None
        self.out = ""
        self.err = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._parsed.run(self._parsed)
        except TrainerError as error:
            self.error = error
        except BaseException as error:
            self.crash = error

    def read(self) -> None:
        """Takes what was printed so far."""
        captured = self._capsys.readouterr()
        self.out += captured.out
        self.err += captured.err

    def until_says(self, text: str) -> None:
        """Returns when the command has printed a text."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.out + self.err:
            assert time.monotonic() < deadline, f"never said {text!r}, but:\n{self.out}\n{self.err}\n{self.error}"
            alive = self._thread.is_alive()
            time.sleep(0.02)
            self.read()
            assert alive or text in self.out + self.err, f"ended with {self.error or self.crash!r}:\n{self.err}"

    def code(self) -> int:
        """Returns the exit code, after the end."""
        self._thread.join(PATIENCE_S)
        self.read()
        assert not self._thread.is_alive(), f"still runs:\n{self.out}\n{self.err}"
        if self.crash is not None:
            raise self.crash
        return 0 if self.error is None else self.error.exit_code


Run = Callable[..., Command]


def write_kubeconfig(path: Path, url: str, namespace: str = "studio") -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": url}}],
        "users": [{"name": "tester", "user": {"token": TOKEN}}],
        "contexts": [
            {"name": "double", "context": {"cluster": "double", "user": "tester", "namespace": namespace}},
            {"name": "other", "context": {"cluster": "double", "user": "tester", "namespace": "elsewhere"}},
        ],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def wait_for(condition: Callable[[], object]) -> None:
    """Returns when a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
