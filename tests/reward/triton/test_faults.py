"""Triton killed, stopped and slow under a running server: errors in time, never a wrong reward, and back by itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import InferenceServerClient

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward.backend import open_backend
from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate
from likeness_reward.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InferenceServerUnavailable,
    InvalidRepository,
    NoFaceInImages,
)
from likeness_reward.images import encode_png
from likeness_reward.inference.call import CURRENT_CALL, Call
from likeness_reward.settings import ServerSettings
from likeness_reward.triton_scorer import TritonScorer

SERVICE = "likeness.reward.v1.RewardService"
PROBE_INTERVAL_S = 0.5
START_S = 60
SLOW_S = 2.0
GREENS = (0, 80, 160, 240)


class GatewayProcess:
    """`likeness-reward serve --backend triton` in a process of its own."""

    def __init__(self, url: str, folder: Path, **settings: object) -> None:
        ready_file = folder / f"ready-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "likeness_reward", "serve", "--backend", "triton", "--triton-url", url]
        variables = {"triton_probe_interval_s": PROBE_INTERVAL_S, "port": 0, "ready_file": ready_file} | settings
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {f"LIKENESS_REWARD_{name.upper()}": str(value) for name, value in variables.items()},
        )
        give_up_at = time.monotonic() + START_S
        while not ready_file.exists():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < give_up_at, f"the server was not ready within {START_S} s"
            time.sleep(0.02)
        self.endpoint = ready_file.read_text()

    def is_serving(self) -> bool:
        """Returns what the health service says."""
        with grpc.insecure_channel(self.endpoint) as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status == 1

    def wait_until(self, serving: bool, within_s: float) -> None:
        """Returns once health says so."""
        give_up_at = time.monotonic() + within_s
        while self.is_serving() != serving:
            assert time.monotonic() < give_up_at, f"health did not become {serving} within {within_s} s"
            time.sleep(0.05)

    def stop(self) -> int:
        """Asks the process to end in order; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts servers: start_gateway(triton_url, **settings)."""
    started: list[GatewayProcess] = []

    def start(url: str, **settings: object) -> GatewayProcess:
        started.append(GatewayProcess(url, tmp_path, **settings))
        return started[-1]

    yield start
    for gateway in started:
        gateway.process.kill()
        gateway.process.wait(10)
        gateway.process.stdout.close()


@pytest.fixture
def models(export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path) -> Path:
    """The tiny written pack as a model repository."""
    return export_pack(written_pack, tmp_path / "models")


def slow_down(repository: Path, model: str) -> None:
    """Lets every run of a model that is not its warm-up, which has black images, take SLOW_S."""
    path = repository / model / "1" / "model.py"
    before = "            outputs = self.session.run"
    assert before in path.read_text()
    wait = f"            __import__('time').sleep({SLOW_S} if any(batch.any() for batch in batches) else 0)\n"
    path.write_text(path.read_text().replace(before, wait + before))


def videos(colours) -> list[np.ndarray]:
    """Returns videos of one frame with different faces."""
    return [colours.frame(green=green)[None] for green in GREENS]


def rewards(client: RewardClient, identity: IdentityTemplate, colours) -> list[float]:
    """Returns the rewards of the videos."""
    return [client.score(video, identity).value for video in videos(colours)]


@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_triton_killed_is_an_error_until_it_is_back_with_equal_rewards(
    start_triton, start_gateway, models: Path, colours, shared_memory: str
) -> None:
    triton = start_triton(models)
    gateway = start_gateway(triton.url, triton_shared_memory=shared_memory)
    with RewardClient(gateway.endpoint, timeout_s=10) as client:
        identity = client.embed_identity([colours.frame()])
        calm = rewards(client, identity, colours)
        assert len(set(calm)) == len(GREENS)
        triton.kill()
        started = time.monotonic()
        with pytest.raises(InferenceServerUnavailable, match=f"Triton at {triton.url}, model face_detector"):
            client.score(videos(colours)[0], identity)
        assert time.monotonic() - started < 5
        gateway.wait_until(serving=False, within_s=5)
        start_triton(models, triton.port)
        gateway.wait_until(serving=True, within_s=10)
        assert rewards(client, identity, colours) == calm
    assert gateway.stop() == 0
    assert list(Path("/dev/shm").glob("likeness-*")) == []


def test_a_triton_restarted_between_two_calls_is_not_even_noticed(
    start_triton, start_gateway, models: Path, colours
) -> None:
    triton = start_triton(models)
    gateway = start_gateway(triton.url, triton_shared_memory="on", triton_probe_interval_s=3600)
    with RewardClient(gateway.endpoint, timeout_s=10) as client:
        identity = client.embed_identity([colours.frame()])
        calm = rewards(client, identity, colours)
        triton.kill()
        start_triton(models, triton.port)
        time.sleep(2.5)  # the longest that gRPC waits before it connects again
        assert rewards(client, identity, colours) == calm


def test_a_stopped_triton_costs_a_call_its_deadline_and_no_more(
    start_triton, start_gateway, models: Path, colours
) -> None:
    triton = start_triton(models)
    gateway = start_gateway(triton.url, triton_timeout_s=3)
    with RewardClient(gateway.endpoint, timeout_s=10) as client:
        identity = client.embed_identity([colours.frame()])
        calm = rewards(client, identity, colours)
        triton.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded), RewardClient(gateway.endpoint, timeout_s=1) as hurried:
            hurried.score(videos(colours)[0], identity)
        assert time.monotonic() - started < 1.5
        with pytest.raises(InferenceServerUnavailable, match="no answer within [23] s"):
            client.score(videos(colours)[0], identity)
        gateway.wait_until(serving=False, within_s=5)
        triton.signal(signal.SIGCONT)
        gateway.wait_until(serving=True, within_s=10)
        assert rewards(client, identity, colours) == calm


def test_a_slow_triton_is_given_up_at_the_deadline_and_never_answers_another_call(
    start_triton, models: Path, colours
) -> None:
    slow_down(models, "face_recognizer")
    triton = start_triton(models)
    scorer = TritonScorer(triton.url, shared_memory="on")
    identity = scorer.embed_identity([colours.frame()])
    expected = [scorer.score(video, identity).value for video in videos(colours)[:2]]
    (used,) = known_regions(triton.url)
    previous = CURRENT_CALL.set(Call(timeout_s=1.0))
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded, match="did not answer for face_recognizer before the call's deadline"):
            scorer.score(videos(colours)[2], identity)
    finally:
        CURRENT_CALL.reset(previous)
    assert 0.8 < time.monotonic() - started < 1.3
    # Triton still works on that request and will write its outputs: not into the memory of the next ones.
    assert not (Path("/dev/shm") / used).exists()
    assert [scorer.score(video, identity).value for video in videos(colours)[:2]] == expected
    scorer.connection.close()
    assert [name for name in known_regions(triton.url) if name.startswith("likeness-")] == []
    triton.kill()


def known_regions(url: str) -> list[str]:
    """Returns the names of the shared memory that Triton has mapped."""
    with InferenceServerClient(url) as client:
        return list(client.get_system_shared_memory_status().regions)


def test_a_killed_server_leaves_no_shared_memory_behind(start_triton, start_gateway, models: Path, colours) -> None:
    triton = start_triton(models)
    gateway = start_gateway(triton.url, triton_shared_memory="on")
    with RewardClient(gateway.endpoint, timeout_s=10) as client:
        client.embed_identity([colours.frame()])
    left = known_regions(triton.url)
    assert left
    gateway.process.kill()
    give_up_at = time.monotonic() + 5
    while list(Path("/dev/shm").glob("likeness-*")):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    scorer = TritonScorer(triton.url, shared_memory="on")
    assert not set(left) & set(known_regions(triton.url))
    scorer.connection.close()
    triton.kill()


def test_a_model_that_is_loaded_but_fails_is_not_ready(start_triton, start_gateway, models: Path, colours) -> None:
    path = models / "face_recognizer" / "1" / "model.py"
    flag = models.parent / "fail"
    before = "            outputs = self.session.run"
    failure = f"            if Path({str(flag)!r}).exists():\n                raise RuntimeError('no memory')\n"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, failure + before))
    triton = start_triton(models)
    gateway = start_gateway(triton.url)
    with RewardClient(gateway.endpoint, timeout_s=10) as client:
        identity = client.embed_identity([colours.frame()])
        flag.touch()
        with pytest.raises(InferenceFailed, match="model face_recognizer: .*onnxruntime: no memory"):
            client.score(videos(colours)[0], identity)
        gateway.wait_until(serving=False, within_s=5)
        flag.unlink()
        gateway.wait_until(serving=True, within_s=5)
        assert client.score(videos(colours)[0], identity).embedded_frame_count == 1


def test_a_cancelled_call_stops_waiting_for_triton_at_once(start_triton, models: Path, colours) -> None:
    slow_down(models, "face_detector")
    triton = start_triton(models)
    scorer = TritonScorer(triton.url)
    call = Call(timeout_s=60)
    previous = CURRENT_CALL.set(call)
    threading.Timer(0.5, call.end).start()
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded):
            scorer.embed_identity([colours.frame()])
    finally:
        CURRENT_CALL.reset(previous)
    assert 0.4 < time.monotonic() - started < 1.0
    scorer.connection.close()
    triton.kill()


def test_a_client_that_goes_away_frees_the_server_for_the_next(
    start_triton, start_gateway, export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path, colours
) -> None:
    repository = export_pack(written_pack, tmp_path / "two", instances=2)  # one stays busy with the cancelled request
    slow_down(repository, "face_detector")
    gateway = start_gateway(start_triton(repository).url, workers=1)
    with grpc.insecure_channel(gateway.endpoint) as channel:
        request = reward_service_pb2.EmbedIdentityRequest(images=[encode_png(colours.frame())])
        call = reward_service_pb2_grpc.RewardServiceStub(channel).EmbedIdentity.future(request, timeout=60)
        time.sleep(0.5)
        started = time.monotonic()
        call.cancel()
        with RewardClient(gateway.endpoint, timeout_s=20) as client, pytest.raises(NoFaceInImages):
            client.embed_identity([np.zeros((64, 64, 3), np.uint8)])  # black, so not slowed down
        assert time.monotonic() - started < 1.0


def test_a_stream_that_goes_away_frees_the_server_for_the_next(
    start_triton, start_gateway, export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path, colours
) -> None:
    repository = export_pack(written_pack, tmp_path / "two", instances=2)
    slow_down(repository, "face_detector")
    gateway = start_gateway(start_triton(repository).url, workers=1)
    with RewardClient(gateway.endpoint, timeout_s=20) as client:
        identity = client.embed_identity([colours.frame()])
        stream = client.open_stream(identity=identity, deadline_s=60)
        stream.start_video("video", 64, 64, 2)
        stream.send_frames("video", 0, videos(colours)[0])
        time.sleep(0.5)
        started = time.monotonic()
        stream.cancel()
        with pytest.raises(NoFaceInImages):
            client.embed_identity([np.zeros((64, 64, 3), np.uint8)])
        assert time.monotonic() - started < 1.0


def test_a_detector_size_or_letterbox_that_triton_does_not_have_is_named(start_triton, models: Path) -> None:
    url = start_triton(models).url
    settings = ServerSettings(backend="triton", triton_url=url, detector_size=(128, 64))
    with pytest.raises(InvalidRepository, match="detector takes 64x64; the detector size asked for is 128x64"):
        open_backend(settings)
    with pytest.raises(InvalidRepository, match="exported with letterbox fit; full is asked for"):
        open_backend(ServerSettings(backend="triton", triton_url=url, letterbox="full"))
    assert list(Path("/dev/shm").glob("likeness-*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "triton"], "the triton backend needs triton_url, HOST:PORT"),
        (["--triton-url", "127.0.0.1:1", "--pack", "p"], "triton_url belongs to the triton backend"),
        ([], "the embedded backend needs a pack"),
        (["--backend", "triton", "--triton-url", "h:1", "--provider", "cuda"], "provider belongs to the embedded"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "likeness_reward", "serve", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"LIKENESS_REWARD_TOKEN": "secret"}
    )
    assert ended.returncode == 2
    assert message in " ".join(ended.stderr.split())
    assert "secret" not in ended.stderr


def test_a_server_without_its_triton_gives_up_in_time_with_exit_code_5() -> None:
    command = [sys.executable, "-m", "likeness_reward", "serve", "--backend", "triton", "--triton-url", "127.0.0.1:1"]
    variables = os.environ | {"LIKENESS_REWARD_TRITON_START_TIMEOUT_S": "0.5"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, env=variables)
    assert ended.returncode == 5
    assert "error: Triton at 127.0.0.1:1: no answer" in ended.stderr
