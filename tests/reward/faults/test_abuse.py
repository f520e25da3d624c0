"""Callers that break off, dawdle or send rubbish: the server stays up, right and small."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_triton import free_ports

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness.reward.v1.reward_service_pb2 import StreamVideoScoresRequest as StreamRequest
from likeness_reward import errors, messages
from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate, ScoreOptions, VideoMotion
from likeness_reward.images import encode_png
from likeness_reward.videos import read_video

CANCELS = 10_000
MOST_GROWTH_BYTES = 10 * 2**20
EXAMPLES = int(os.environ.get("LIKENESS_FUZZ_EXAMPLES", "300"))
SERVICE = "/likeness.reward.v1.RewardService/"
ALLOWED = {
    grpc.StatusCode.OK: {None},
    grpc.StatusCode.INVALID_ARGUMENT: {
        kind.reason for kind in vars(errors).values() if getattr(kind, "code", None) is grpc.StatusCode.INVALID_ARGUMENT
    },
    grpc.StatusCode.FAILED_PRECONDITION: {errors.FingerprintMismatch.reason},
    grpc.StatusCode.UNIMPLEMENTED: {errors.FeatureUnavailable.reason},
}
"""What a changed message may be answered with: reasons by status code."""


def frames(count: int = 2, level: int = 220, side: int = 16) -> np.ndarray:
    return np.full((count, side, side, 3), level, np.uint8)


def gauge(port: int, name: str) -> float:
    """Returns a gauge of the server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"likeness_reward_{name} ")).split()[1])


async def cancel_many(endpoint: str, identity: IdentityTemplate, count: int) -> None:
    """Makes `count` calls and leaves each at another point: at once, in a video, or with its result in hand."""
    config = messages.stream_config(ScoreOptions(), identity, None)
    begin = messages.video_start("video", (2, 16, 16), None, None)
    pixels = list(map(StreamRequest.FromString, messages.video_frames("video", 0, frames())))
    steps = [config, begin, *pixels, messages.video_end("video")]
    score = messages.score_request(frames(), identity, None, None)
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)

        async def requests(length: int) -> AsyncIterator[reward_service_pb2.StreamVideoScoresRequest]:
            for step in steps[:length]:
                yield step
            await asyncio.sleep(60)

        async def one(index: int) -> None:
            if index % 6 == 5:
                call = stub.ScoreVideo(score, timeout=60)
                await asyncio.sleep(0)
            else:
                call = stub.StreamVideoScores(requests(index % 6), timeout=60)
                if index % 6:
                    await call.read()
                if index % 6 == 4:
                    await call.read()  # the result
            call.cancel()

        for first in range(0, count, 50):
            await asyncio.gather(*(one(index) for index in range(first, min(first + 50, count))))


def test_ten_thousand_cancelled_calls_leave_nothing_behind(start_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIKENESS_REWARD_MAX_CALLS", "256")
    (port,) = free_ports(1)
    server = start_server("--metrics-port", str(port))
    process = psutil.Process(server.process.pid)
    with RewardClient(server.endpoint) as client:
        identity = client.embed_identity([frames()[0]])
        expected = client.score(frames(), identity).value
        asyncio.run(cancel_many(server.endpoint, identity, CANCELS // 10))  # what is allocated once, is by now
        before = process.memory_info().rss
        asyncio.run(cancel_many(server.endpoint, identity, CANCELS))
        give_up_at = time.monotonic() + 10
        while any(gauge(port, name) for name in ("calls_running", "videos_in_flight", "queue_depth")):
            assert time.monotonic() < give_up_at, "calls that were cancelled still count as running"
            time.sleep(0.05)
        assert process.memory_info().rss - before < MOST_GROWTH_BYTES
        assert client.score(frames(), identity).value == expected


def test_a_slow_sender_and_a_slow_reader_get_their_results_and_hold_up_nobody(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client, RewardClient(server.endpoint) as other:
        identity = client.embed_identity([frames()[0]])
        expected = client.score(frames(3), identity)
        stop = threading.Event()
        answered: list[float] = []

        def ask() -> None:
            while not stop.is_set():
                answered.append(other.score(frames(3), identity).value)

        asking = threading.Thread(target=ask)
        asking.start()
        with client.open_stream(identity=identity, deadline_s=30) as stream:
            for index in range(2):  # the sender dawdles between frames
                stream.start_video(f"slow {index}", 16, 16, 3)
                for frame in range(3):
                    stream.send_frames(f"slow {index}", frame, frames(1))
                    time.sleep(0.1)
                stream.end_video(f"slow {index}")
            stream.close()
            time.sleep(0.3)  # the reader dawdles too
            results = dict(stream.results())
        stop.set()
        asking.join()
    assert {name: reward.value for name, reward in results.items()} == dict.fromkeys(
        ("slow 0", "slow 1"), expected.value
    )
    assert len(answered) > 10
    assert set(answered) == {expected.value}


mutation = st.tuples(
    st.sampled_from(("flip", "cut", "insert", "repeat", "end")),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 16),
    st.binary(min_size=1, max_size=8),
)
mutations = st.lists(mutation, min_size=1, max_size=4)


def mutated(raw: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    """Returns bytes with each change made at its place, a share of the length."""
    data = bytearray(raw)
    for kind, share, length, new in changes:
        at = int(share * len(data))
        if kind == "flip" and data:
            data[at] ^= new[0]
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "insert":
            data[at:at] = new
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        elif kind == "end":
            del data[at:]
    return bytes(data)


def fuzz(examples: int):  # type: ignore[no-untyped-def]
    """The settings of a test over changed bytes: the same ones each time."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=EXAMPLES <= 1000,
        suppress_health_check=list(HealthCheck),
    )


class Target:
    """A server process, a channel that sends raw bytes to it, and a good request of each kind."""

    def __init__(self, server) -> None:  # type: ignore[no-untyped-def]
        self.server = server
        self.client = RewardClient(server.endpoint)
        self.identity = self.client.embed_identity([frames()[0]])
        self.expected = self.client.score(frames(), self.identity).value
        self.channel = grpc.insecure_channel(server.endpoint)
        options = ScoreOptions(motion_weight=0.5, coverage_weight=0.1)
        motion = VideoMotion(0.1, 0.1)
        self.unary = {
            "EmbedIdentity": messages.embed_request([encode_png(frames()[0])], "mean").SerializeToString(),
            "ScoreVideo": messages.score_request(frames(), self.identity, options, motion).SerializeToString(),
            "GetServerInfo": b"",
        }
        self.stream = [
            messages.encoded(message)
            for message in (
                messages.stream_config(options, self.identity, self.identity.model_fingerprint),
                messages.video_start("video", (2, 16, 16), self.identity, motion),
                *messages.video_frames("video", 0, frames()),
                messages.video_end("video"),
            )
        ]

    def check_answer(self, call: object) -> None:
        """Asserts that the status of a finished call is one that bad input may have."""
        code = call.code()
        reason = None if code is grpc.StatusCode.OK else errors.error_from_call(call, "").reason
        assert reason in ALLOWED.get(code, set()), f"{code}: {reason}: {call.details()}"

    def check_alive(self) -> None:
        """Asserts that the server runs and gives what it gave at first."""
        assert self.server.process.poll() is None
        assert self.client.score(frames(), self.identity).value == self.expected


@pytest.fixture
def target(start_server) -> Iterator[Target]:
    made = Target(start_server())
    yield made
    made.check_alive()
    made.client.close()
    made.channel.close()


def test_changed_messages_are_refused_or_answered(target: Target) -> None:
    @fuzz(EXAMPLES)
    @given(st.sampled_from(sorted(target.unary)), mutations)
    def send(method: str, changes: list) -> None:
        call = target.channel.unary_unary(SERVICE + method)
        try:
            _, done = call.with_call(mutated(target.unary[method], changes), timeout=20)
        except grpc.RpcError as error:
            done = error
        target.check_answer(done)

    send()


def test_changed_streams_are_refused_or_answered(target: Target) -> None:
    order = st.lists(st.integers(0, len(target.stream) - 1), min_size=1, max_size=6)

    @fuzz(EXAMPLES // 2)
    @given(st.one_of(st.just(list(range(len(target.stream)))), order), st.integers(0, 5), mutations)
    def send(steps: list[int], which: int, changes: list) -> None:
        sent = [target.stream[step] for step in steps]
        sent[which % len(sent)] = mutated(sent[which % len(sent)], changes)
        call = target.channel.stream_stream(SERVICE + "StreamVideoScores")(iter(sent), timeout=20)
        try:
            for raw in call:
                result = reward_service_pb2.StreamVideoScoresResponse.FromString(raw).result
                if result.HasField("error"):
                    assert errors.error_from_status(result.error).code in ALLOWED
        except grpc.RpcError:
            pass
        target.check_answer(call)

    send()


def test_changed_images_are_refused_or_embedded(target: Target) -> None:
    import cv2

    noisy = np.random.default_rng(0).integers(180, 255, (16, 16, 3), np.uint8)
    files = [cv2.imencode(suffix, noisy)[1].tobytes() for suffix in (".png", ".jpg", ".webp")]

    @fuzz(EXAMPLES // 2)
    @given(st.sampled_from(files), mutations)
    def embed(raw: bytes, changes: list) -> None:
        refusal = None
        try:
            assert np.isfinite(target.client.embed_identity([mutated(raw, changes)]).embedding).all()
        except errors.LikenessError as error:
            refusal = error
        assert refusal is None or refusal.code is grpc.StatusCode.INVALID_ARGUMENT, refusal

    embed()


READ_EACH = """
import pathlib, sys
from likeness_reward.errors import UnreadableVideo
from likeness_reward.videos import read_video
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        assert read_video(path).ndim == 4
    except UnreadableVideo as error:
        assert path.name in error.message
print("alive")
"""


def test_changed_videos_are_unreadable_or_read(tmp_path) -> None:
    av = pytest.importorskip("av", reason="PyAV, which writes the video of this test, is not installed")
    whole = tmp_path / "whole.mp4"
    with av.open(str(whole), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for level in (40, 120, 200):
            picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    assert len(read_video(whole)) == 3
    paths: list[str] = []

    @fuzz(max(EXAMPLES // 10, 10))
    @given(mutations)
    def change(changes: list) -> None:
        path = tmp_path / f"{len(paths)}.mp4"
        path.write_bytes(mutated(whole.read_bytes(), changes))
        paths.append(str(path))

    change()
    for first in range(0, len(paths), 500):  # a process of its own: a decoder that crashes is seen as such
        done = subprocess.run(
            [sys.executable, "-c", READ_EACH, *paths[first : first + 500]], capture_output=True, text=True
        )
        assert done.stdout == "alive\n", done.stderr[-2000:]
