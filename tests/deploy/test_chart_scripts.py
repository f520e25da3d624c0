"""The scripts in the chart's files/ are run as its containers run them: the pack's download, and the start of a run."""

import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")

from chart_containers import REWARD_POD, Here, toy_fingerprint  # noqa: E402
from rendered_chart import CHART, find, pod, render, values_of  # noqa: E402


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """Folders for a pod's mounts."""
    return Here(tmp_path)


class Packs(http.server.BaseHTTPRequestHandler):
    """Serves archives from memory to who knows the word."""

    files: dict[str, bytes] = {}

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer pack":
            self.send_error(401)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.files[self.path])

    def log_message(self, *arguments: object) -> None:
        pass


def archives() -> dict[str, bytes]:
    """Returns the toy pack as InsightFace ships packs: flat in a zip, in a folder of a tar; and an archive without."""
    flat, nested, empty = io.BytesIO(), io.BytesIO(), io.BytesIO()
    files = sorted(path for path in Path(toyworld.face_pack_path()).iterdir() if path.is_file())
    with zipfile.ZipFile(flat, "w") as archive:
        for file in files:
            archive.write(file, file.name)
    with tarfile.open(fileobj=nested, mode="w:gz") as archive:
        for file in files:
            archive.add(file, f"toy/{file.name}")
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("README", "no networks")
    return {"/pack.zip": flat.getvalue(), "/pack.tar.gz": nested.getvalue(), "/empty.zip": empty.getvalue()}


@pytest.fixture
def pack_server() -> Iterator[str]:
    """Address of a server with the archives."""
    Packs.files = archives()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Packs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fetch(url: str, sha256: str, here: Here, authorization: str = "Bearer pack") -> subprocess.CompletedProcess[str]:
    """Runs the init container that fetches the pack."""
    values = values_of("secured")
    values["reward"]["pack"]["download"] |= {"url": url, "sha256": sha256}
    objects = render(values)
    each = pod(objects, REWARD_POD)
    here.mount(each, {name: {"bearer": b"", "tls.crt": b"", "tls.key": b"", "ca.crt": b""} for name in SECRET_NAMES})
    container = each.container("fetch-pack")
    for name, text in find(objects, "ConfigMap", "likeness-pack-script")["data"].items():
        (here.mounts["/scripts"] / name).write_text(text)
    command = [here.word(word) for word in (*container["command"], *container["args"])]
    environment = os.environ | {container["env"][0]["name"]: authorization}
    return subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, text=True)


SECRET_NAMES = ("likeness-token", "likeness-reward-tls", "likeness-clients-ca")


@pytest.mark.parametrize("name", ["/pack.zip", "/pack.tar.gz"])
def test_a_downloaded_pack_is_the_pack(name: str, pack_server: str, here: Here) -> None:
    digest = hashlib.sha256(Packs.files[name]).hexdigest()
    done = fetch(pack_server + name, digest.upper(), here)
    assert done.returncode == 0, done.stderr
    from likeness_reward.pack.pack import load_pack

    assert load_pack(here.mounts["/packs"] / "default").fingerprint == toy_fingerprint()
    assert [path.name for path in here.mounts["/packs"].iterdir()] == ["default"]
    Packs.files[name] = b"another archive"
    again = fetch(pack_server + name, digest, here)
    assert (again.returncode, "is there already" in again.stdout) == (0, True)


def test_a_pack_that_is_not_the_one_asked_for_is_refused(pack_server: str, here: Here) -> None:
    wrong = fetch(f"{pack_server}/pack.zip", "0" * 64, here)
    found = hashlib.sha256(Packs.files["/pack.zip"]).hexdigest()
    assert wrong.returncode == 1
    assert f"its SHA-256 is {found}, expected was {'0' * 64}" in wrong.stderr
    empty = fetch(f"{pack_server}/empty.zip", hashlib.sha256(Packs.files["/empty.zip"]).hexdigest(), here)
    assert "one folder with *.onnx is expected, found none" in empty.stderr
    stranger = fetch(f"{pack_server}/pack.zip", found, here, authorization="Bearer wrong")
    assert "HTTP Error 401" in stranger.stderr
    assert list(here.mounts["/packs"].iterdir()) == [], "nothing is left behind"


def started(run_dir: Path, words: list[str], **environment: str) -> list[str]:
    """Returns what the start script runs, one word a line; `words` is a command that prints its own."""
    command = ["sh", str(CHART / "files" / "start_run.sh"), *words]
    done = subprocess.run(
        command, env=os.environ | environment | {"RUN_DIR": str(run_dir)}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_run_goes_on_when_it_has_begun(tmp_path: Path) -> None:
    words = ["printf", "%s\\n", "train", "a b"]
    assert started(tmp_path, words) == ["train", "a b"]
    (tmp_path / "config.yaml").touch()
    assert started(tmp_path, words) == ["train", "a b", "--resume"]


@pytest.mark.parametrize(("index", "is_host"), [("0", "true"), ("1", "false")])
def test_the_first_pod_keeps_the_rendezvous(index: str, is_host: str, tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" torchrun "$@"\n')
    torchrun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ["torchrun", "--nnodes=2", "-m", "likeness_trainer"]
    told = started(tmp_path, words, PATH=path, RENDEZVOUS="c10d", JOB_COMPLETION_INDEX=index)
    assert told == ["torchrun", f"--rdzv-conf=is_host={is_host}", "--nnodes=2", "-m", "likeness_trainer"]
