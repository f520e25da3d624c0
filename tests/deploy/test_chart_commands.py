"""What the chart's containers are told is run for real: same words, same environment, Secrets as files."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")

from chart_containers import (  # noqa: E402
    REWARD_POD,
    Here,
    await_probe,
    environment_of,
    metrics_of,
    probe,
    reward_values,
    serve,
    toy_fingerprint,
)
from local_triton import NoTriton, TritonProcess, free_ports, installed_triton  # noqa: E402
from rendered_chart import (  # noqa: E402
    NAMESPACE,
    SHAPES,
    Pod,
    find,
    objects_of,
    pod,
    pods_of,
    render,
)

from likeness_reward import errors  # noqa: E402
from likeness_reward.client import RewardClient  # noqa: E402
from likeness_reward.settings import ServerSettings  # noqa: E402
from likeness_trainer.cli import build_parser  # noqa: E402
from likeness_trainer.config import TrainConfig, load_config  # noqa: E402
from likeness_trainer.reward_link import RewardLink  # noqa: E402

ROOT = Path(__file__).parents[2]
HEADLESS = f"likeness-reward-headless.{NAMESPACE}.svc"


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


def start_triton(start: Any, binary: Path, stub: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """Starts the wheel's tritonserver with a container's words, and what this wheel and machine need beside them."""
    backend = TritonProcess.lay_out_backend(folder, binary, stub)
    own = [f"--backend-directory={backend.parent}", "--allow-gpu-metrics=false", "--metrics-address=127.0.0.1"]
    prefix = f"--backend-config=python,shm-region-prefix-name=likeness_chart_{os.getpid()}_"
    command = [str(binary / "bin" / "tritonserver"), *words, *own, prefix]
    return start(command, os.environ | TritonProcess.libraries(binary))
