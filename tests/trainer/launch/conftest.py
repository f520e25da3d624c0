"""The commands against the API server double."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

from api_server import ApiServer
from launch_support import Command, Run, write_kubeconfig


@pytest.fixture
def server() -> Iterator[ApiServer]:
    running = ApiServer()
    yield running
    running.close()


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig of the double, which KUBECONFIG names."""
    path = write_kubeconfig(tmp_path / "kubeconfig", server.url)
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
def run(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that starts a command."""
    return lambda *arguments: Command(capsys, arguments)
