"""Servers that are absent, killed, restarted or told to stop."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from likeness_reward import errors
from likeness_reward.aio import AsyncRewardClient
from likeness_reward.client import RewardClient
from likeness_reward.many import RetryPolicy, VideoToScore

SOON_S = 10


def frames(count: int = 3, level: int = 220) -> np.ndarray:
    return np.full((count, 64, 64, 3), level, np.uint8)


def test_no_server_is_told_within_the_time_given() -> None:
    with RewardClient("127.0.0.1:1") as client:
        start = time.monotonic()
        with pytest.raises(errors.ServerUnavailable, match="no reward server answers at 127.0.0.1:1 within 1 s"):
            client.wait_until_ready(timeout_s=1)
        assert time.monotonic() - start < SOON_S
        with pytest.raises(errors.ServerUnavailable, match="127.0.0.1:1"):
            client.server_info()


def test_the_ready_line_names_address_pack_and_models(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client:
        info = client.wait_until_ready()
    line = server.log.read_text().splitlines()[0]
    assert line == f"serving on {server.endpoint}, pack written, fingerprint {info.model_fingerprint[:12]}"
    assert info.detector_size == (64, 64)


def test_a_server_killed_mid_stream_is_an_error_within_seconds_and_never_a_reward(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client:
        identity = client.embed_identity([frames()[0]])
        with client.open_stream(identity=identity, deadline_s=120) as stream:
            stream.start_video("whole", 64, 64, 3)
            stream.send_frames("whole", 0, frames())
            stream.end_video("whole")
            results = stream.results()
            assert next(results)[0] == "whole"
            stream.start_video("cut short", 64, 64, 3)
            stream.send_frames("cut short", 0, frames(1))
            server.kill()
            start = time.monotonic()
            with pytest.raises(errors.ServerUnavailable):
                next(results)
            assert time.monotonic() - start < SOON_S
            with pytest.raises(errors.ServerUnavailable):
                stream.send_frames("cut short", 1, frames(2))


def test_videos_without_a_result_are_sent_again_to_the_server_that_comes_back(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client:
        identity = client.embed_identity([frames()[0]])
        expected = client.score(frames(), identity).value
        videos = (VideoToScore(f"video {index}", frames(), identity) for index in range(20))
        outcomes: dict[str, float] = {}
        for name, reward in client.score_many(videos, concurrency=3, retry=RetryPolicy(first_wait_s=0.1)):
            assert name not in outcomes, "a video was scored twice"
            outcomes[name] = reward.value
            if len(outcomes) == 5:
                server.kill()
                threading.Timer(0.5, lambda: start_server(port=server.port)).start()
    assert outcomes == {f"video {index}": expected for index in range(20)}


def test_a_server_that_stays_away_is_given_up_after_the_time_set(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client:
        identity = client.embed_identity([frames()[0]])
        server.kill()
        start = time.monotonic()
        retry = RetryPolicy(first_wait_s=0.1, longest_wait_s=0.2, give_up_after_s=1.0)
        with pytest.raises(errors.ServerUnavailable):
            list(client.score_many([VideoToScore("video", frames(), identity)], retry=retry))
        assert 1.0 <= time.monotonic() - start < SOON_S


def test_sigterm_finishes_the_running_stream_refuses_new_calls_and_exits_0(start_server) -> None:
    server = start_server()
    with RewardClient(server.endpoint) as client, grpc.insecure_channel(server.endpoint) as channel:
        identity = client.embed_identity([frames()[0]])
        health = health_pb2_grpc.HealthStub(channel)
        with client.open_stream(identity=identity, deadline_s=60) as stream:
            stream.start_video("video", 64, 64, 3)
            stream.send_frames("video", 0, frames(1))
            server.terminate()
            give_up_at = time.monotonic() + SOON_S
            while health.Check(health_pb2.HealthCheckRequest(), timeout=5).status != 2:
                assert time.monotonic() < give_up_at
                time.sleep(0.02)
            with pytest.raises(errors.ServerDraining):
                client.score(frames(), identity)
            stream.send_frames("video", 1, frames(2))
            stream.end_video("video")
            stream.close()
            ((_, reward),) = stream.results()
    assert reward.embedded_frame_count == 3
    assert server.process.wait(SOON_S) == 0


def test_a_taken_port_is_named(start_server, written_pack) -> None:
    first = start_server()
    with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        start_server(port=first.port)


def test_info_tells_pack_models_and_limits_and_fails_without_a_server(start_server) -> None:
    server = start_server()
    command = [sys.executable, "-m", "likeness_reward", "info", "--endpoint", server.endpoint]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(told.stdout)
    assert document["component_names"] == ["identity", "coverage", "motion"]
    assert len(document["model_fingerprint"]) == 64
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert document["model_fingerprint"] in text
    server.kill()
    silent = subprocess.run([*command, "--timeout", "0.5"], capture_output=True, text=True)
    assert silent.returncode == 5
    assert f"no reward server answers at {server.endpoint}" in silent.stderr


def test_with_two_servers_the_death_of_one_costs_no_video_and_no_second_result(start_server) -> None:
    first, second = start_server(), start_server()
    with RewardClient(f"{first.endpoint},{second.endpoint}") as client:
        identity = client.embed_identity([frames()[0]])
        levels = [100 + 7 * index for index in range(20)]
        expected = {f"video {level}": client.score(frames(level=level), identity).value for level in levels}
        videos = (VideoToScore(f"video {level}", frames(level=level), identity) for level in levels)
        outcomes: dict[str, float] = {}
        for name, reward in client.score_many(videos, concurrency=3, retry=RetryPolicy(first_wait_s=0.05)):
            assert name not in outcomes, "a video was scored twice"
            outcomes[name] = reward.value
            if len(outcomes) == 5:
                first.kill()
            if len(outcomes) == 10:
                start_server(port=first.port)
                second.kill()
    assert outcomes == expected
    assert len(set(expected.values())) > 5


def test_asyncio_calls_are_repeated_when_one_of_two_servers_dies(start_server) -> None:
    first, second = start_server(), start_server()
    levels = [100 + 7 * index for index in range(12)]

    async def score() -> tuple[dict[str, float], dict[str, float]]:
        async with AsyncRewardClient(f"{first.endpoint},{second.endpoint}") as client:
            identity = await client.embed_identity([frames()[0]])
            expected = {f"video {level}": (await client.score(frames(level=level), identity)).value for level in levels}
            videos = (VideoToScore(f"video {level}", frames(level=level), identity) for level in levels)
            outcomes: dict[str, float] = {}
            async for name, reward in client.score_many(videos, concurrency=3, retry=RetryPolicy(first_wait_s=0.05)):
                assert name not in outcomes, "a video was scored twice"
                outcomes[name] = reward.value
                if len(outcomes) == 4:
                    first.kill()
            return expected, outcomes

    expected, outcomes = asyncio.run(score())
    assert outcomes == expected
