"""What the chart's containers are told is run for real: same words, same environment, Secrets as files."""

import contextlib
import hashlib
import http.server
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")

from local_triton import NoTriton, TritonProcess, free_ports, installed_triton  # noqa: E402
from rendered_chart import (  # noqa: E402
    CHART,
    NAMESPACE,
    SHAPES,
    Manifest,
    Pod,
    find,
    objects_of,
    pod,
    pods_of,
    render,
    values_of,
)

from likeness_reward import errors  # noqa: E402
from likeness_reward.client import RewardClient  # noqa: E402
from likeness_reward.settings import ServerSettings  # noqa: E402
from likeness_trainer.cli import build_parser  # noqa: E402
from likeness_trainer.config import TrainConfig, load_config  # noqa: E402
from likeness_trainer.reward_link import RewardLink  # noqa: E402

ROOT = Path(__file__).parents[2]
START_S = 60
REWARD_POD = "Deployment/likeness-reward"
HEADLESS = f"likeness-reward-headless.{NAMESPACE}.svc"


class Here:
    """Folders of this machine in place of a pod's mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts: dict[str, Path] = {}

    def mount(self, each: Pod, secrets: dict[str, dict[str, bytes]]) -> None:
        """Lays out a pod's Secrets, each key under the path that the pod gives it, and empty folders for the rest."""
        volumes = {volume["name"]: volume for volume in each.spec["volumes"]}
        for container in each.containers:
            for mount in container["volumeMounts"]:
                target = self.folder / mount["mountPath"].strip("/")
                target.mkdir(parents=True, exist_ok=True)
                self.mounts[mount["mountPath"]] = target
                secret = volumes[mount["name"]].get("secret")
                for item in secret["items"] if secret else ():
                    (target / item["path"]).write_bytes(secrets[secret["secretName"]][item["key"]])

    def word(self, text: str) -> str:
        """Returns a word of a command line with this machine's paths."""
        for path in sorted(self.mounts, key=len, reverse=True):
            for before in ("", "="):
                if before + path in text and (before or text.startswith(path)):
                    return text.replace(before + path, before + str(self.mounts[path]), 1)
        return text


def environment_of(container: Manifest) -> dict[str, str]:
    """Returns what a container's process sees beside the image's variables."""
    image = {"LIKENESS_REWARD_PACK": "/packs/default"}  # of services/reward/Dockerfile
    given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIKENESS_")}
    return inherited | image | given


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def await_probe(port: int, service: str, process: subprocess.Popen[str]) -> None:
    """Returns once a gRPC probe succeeds."""
    give_up_at = time.monotonic() + START_S
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        while time.monotonic() < give_up_at:
            if process.poll() is not None:
                raise AssertionError(process.stdout.read() if process.stdout else "ended")
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest(service=service)
                if health_pb2_grpc.HealthStub(channel).Check(request, timeout=1).status == 1:
                    return
            time.sleep(0.05)
    raise AssertionError(f"nothing SERVING on port {port} within {START_S} s")


def probe(container: Manifest, name: str) -> tuple[int, str]:
    """Returns port and service of a gRPC probe."""
    return container[name]["grpc"]["port"], container[name]["grpc"].get("service", "")


def reward_values(shape: str, **more: Any) -> Manifest:
    """Returns the values of a shape with free ports."""
    values = values_of(shape)
    grpc_port, health, metrics = free_ports(3)
    reward = values.setdefault("reward", {})
    reward.update({"ports": {"grpc": grpc_port, "health": health, "metrics": metrics}, **more})
    return values


def serve(start: Any, here: Here, values: Manifest, secrets: dict[str, dict[str, bytes]]) -> tuple[Any, Manifest]:
    """Starts the reward container of these values on the toy pack; returns process and container once it is ready."""
    each = pod(render(values), REWARD_POD)
    here.mount(each, secrets)
    here.mounts["/packs/default"] = Path(toyworld.face_pack_path())
    container = each.container("reward")
    command = [sys.executable, "-m", "likeness_reward", *map(here.word, container["args"])]
    process = start(command, environment_of(container))
    await_probe(*probe(container, "readinessProbe"), process)
    for name in ("startupProbe", "livenessProbe"):
        await_probe(*probe(container, name), process)
    return process, container


def metrics_of(values: Manifest) -> str:
    """Returns what Prometheus would read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{values['reward']['ports']['metrics']}/metrics") as answer:
        return str(answer.read().decode())


def test_the_embedded_pod_serves_and_drains(start, tmp_path: Path) -> None:
    values = reward_values("embedded")
    process, _ = serve(start, Here(tmp_path), values, {})
    with RewardClient(f"127.0.0.1:{values['reward']['ports']['grpc']}") as client:
        info = client.server_info()
    assert info.limits.max_videos_in_flight == 64
    assert "likeness_reward_queue_depth 0.0" in metrics_of(values)
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture
def secrets() -> dict[str, dict[str, bytes]]:
    """The Secrets that the shape "secured" names."""
    servers, clients = trustme.CA(), trustme.CA()
    server, client = servers.issue_cert(HEADLESS), clients.issue_cert("trainer@example.com")

    def pair(certificate: trustme.LeafCert, ca: trustme.CA) -> dict[str, bytes]:
        return {
            "tls.crt": b"".join(blob.bytes() for blob in certificate.cert_chain_pems),
            "tls.key": certificate.private_key_pem.bytes(),
            "ca.crt": ca.cert_pem.bytes(),
        }

    return {
        "likeness-token": {"bearer": b"open-sesame\n"},
        "likeness-reward-tls": pair(server, servers),
        "likeness-clients-ca": {"ca.crt": clients.cert_pem.bytes()},
        "likeness-trainer-tls": pair(client, clients),
    }


def run_config(each: Pod, here: Here) -> TrainConfig:
    """Returns what a run's container resolves its words to: through torchrun's parser, the trainer's and the recipe."""
    container = each.spec["containers"][0]
    words = container["args"][2:]  # after the script and its name
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        launched = get_args_parser().parse_args(words[1:])
        assert (launched.module, launched.training_script) == (True, "likeness_trainer")
        words = launched.training_script_args
    else:
        assert words[0] == "likeness-trainer"
        words = words[1:]
    arguments = build_parser().parse_args([here.word(word) for word in [*words, "--resume"]])
    return load_config(arguments.recipe, arguments.overrides, environment={})


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """Folders for a pod's mounts, with the image's recipes."""
    place = Here(tmp_path)
    place.mounts["/recipes"] = ROOT / "recipes"
    return place


def test_token_and_mutual_tls_of_the_secrets_let_the_trainer_in_and_nobody_else(start, here: Here, secrets) -> None:
    values = reward_values("secured", pack={"source": "pvc"}, detectorSize="")
    process, _ = serve(start, here, values, secrets)
    run = pod(render(values), "Job/likeness-anna")
    here.mount(run, secrets)
    port = values["reward"]["ports"]["grpc"]
    config = run_config(run, here).reward
    assert config.endpoint == f"{HEADLESS}:{port}"
    assert config.connect_timeout_s == 300
    with grpc_name(HEADLESS, port) as endpoint:
        link = RewardLink(config.model_copy(update={"endpoint": endpoint, "connect_timeout_s": 20.0}))
        assert link.connect().pack_name == "likeness-toy"
        link.close()
        stranger = config.model_copy(update={"endpoint": endpoint, "token_file": None})
        with stranger.open_client() as client, pytest.raises(errors.Unauthenticated):
            client.server_info()
    assert "likeness_reward_info" in metrics_of(values)
    assert process.poll() is None


@contextlib.contextmanager
def grpc_name(name: str, port: int) -> Iterator[str]:
    """Lets this process resolve a Service's name to loopback, as the cluster's DNS would to the pods."""
    original = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **more: Any) -> Any:
        return original("127.0.0.1" if host == name else host, *arguments, **more)

    socket.getaddrinfo = resolve  # type: ignore[assignment]
    try:
        yield f"{name}:{port},{name}:{port}"  # of a list, names are resolved here and not by gRPC's own resolver
    finally:
        socket.getaddrinfo = original


RUNS = [
    (shape, each.owner) for shape in SHAPES for each in pods_of(objects_of(shape)) if not each.owner.startswith("D")
]


@pytest.mark.parametrize(("shape", "owner"), RUNS)
def test_the_words_of_every_run_are_ones_that_the_trainer_takes(shape: str, owner: str, here: Here) -> None:
    objects = objects_of(shape)
    name = owner.rpartition("-")[2]
    each = pod(objects, owner)
    if any(volume["name"] == "recipe" for volume in each.spec["volumes"]):
        recipe = here.folder / "recipe"
        recipe.mkdir()
        (recipe / "recipe.yaml").write_text(find(objects, "ConfigMap", f"likeness-{name}")["data"]["recipe.yaml"])
        here.mounts["/etc/likeness/recipe"] = recipe
    config = run_config(each, here)
    assert config.run_dir == f"/runs/{name}"
    assert config.reward.endpoint.endswith(".svc:50051")
    if (shape, name) == ("runs", "anna"):
        assert (config.steps, config.seed, config.optimizer.learning_rate) == (200, 1000003, 2e-5)
        assert config.model.trainable_models == ["dit"]
    if (shape, name) == ("runs", "ben"):
        assert (config.steps, config.model.architecture) == (50, "wan-2.1-t2v-1.3b")


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "trainer-only"])
def test_the_words_of_every_reward_pod_are_settings(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container = pod(objects_of(shape), REWARD_POD).container("reward")
    for name, value in environment_of(container).items():
        monkeypatch.setenv(name, value)
    import typer

    from likeness_reward import server
    from likeness_reward.cli import app

    taken: list[ServerSettings] = []

    async def take(settings: ServerSettings) -> None:
        taken.append(settings)

    monkeypatch.setattr(server, "serve", take)
    typer.main.get_command(app).main(container["args"], standalone_mode=False)
    (settings,) = taken
    assert settings.max_message_bytes == 64 * 2**20
    if "triton" in shape:
        assert (settings.backend, settings.pack, settings.triton_timeout_s) == ("triton", None, 30.0)
    else:
        assert settings.backend == "embedded"
        assert str(settings.pack).startswith("/packs/default")


def test_triton_and_the_service_beside_it_run_as_told(start, here: Here, tmp_path: Path) -> None:
    try:
        binary, stub = installed_triton()
    except NoTriton as missing:
        pytest.skip(f"no Triton: {missing}")
    values = reward_values("triton-sidecar", expectFingerprint=toy_fingerprint())
    triton_grpc, triton_metrics = free_ports(2)
    values["triton"] = {
        "gpus": 0,
        "ports": {"grpc": triton_grpc, "metrics": triton_metrics},
        "export": {"runtime": "python", "maxBatch": 4, "gradients": True},
    }
    each = pod(render(values), REWARD_POD)
    here.mount(each, {})
    here.mounts["/packs/default"] = Path(toyworld.face_pack_path())
    export = each.container("export-pack")
    script = export["command"][2].replace("/repository", str(here.mounts["/repository"]))
    words = [here.word(word) for word in export["args"]]
    for _ in range(2):  # a pod that starts again
        subprocess.run(["sh", "-c", script, "export", sys.executable, "-m", "likeness_reward", *words[1:]], check=True)
    container = each.container("triton")
    triton = start_triton(start, binary, stub, tmp_path, [here.word(word) for word in container["args"]])
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        await_probe(*probe(container, name), triton)
    with urllib.request.urlopen(f"http://127.0.0.1:{triton_metrics}/metrics") as answer:
        assert b"nv_inference_request_success" in answer.read()
    process, _ = serve(start, here, values, {})
    with RewardClient(f"127.0.0.1:{values['reward']['ports']['grpc']}") as client:
        assert client.server_info().model_fingerprint == toy_fingerprint()
        assert client.server_info().has_crop_gradients
    assert 'backend="triton"' in metrics_of(values)
    process.terminate()
    assert process.wait(30) == 0
    triton.terminate()
    assert triton.wait(30) == 0, "Triton ends in order within its time"


def toy_fingerprint() -> str:
    """Returns the fingerprint of the toy pack."""
    from likeness_reward.pack.pack import load_pack

    return load_pack(Path(toyworld.face_pack_path())).fingerprint


def start_triton(start: Any, binary: Path, stub: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """Starts the wheel's tritonserver with a container's words, and what this wheel and machine need beside them."""
    backend = TritonProcess.lay_out_backend(folder, binary, stub)
    own = [f"--backend-directory={backend.parent}", "--allow-gpu-metrics=false", "--metrics-address=127.0.0.1"]
    prefix = f"--backend-config=python,shm-region-prefix-name=likeness_chart_{os.getpid()}_"
    command = [str(binary / "bin" / "tritonserver"), *words, *own, prefix]
    return start(command, os.environ | TritonProcess.libraries(binary))


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
