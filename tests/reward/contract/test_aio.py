"""The asyncio client gives what the blocking one gives."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from likeness_reward import AsyncRewardClient, ScoreOptions, VideoToScore
from likeness_reward.domain import VideoMotion
from likeness_reward.errors import InvalidVideo, NoFaceInImages, ServerUnavailable
from likeness_reward.many import RetryPolicy


def frames(colours, *greens: int) -> np.ndarray:
    return np.stack([colours.frame(green=green) for green in greens])


def test_every_call_equals_that_of_the_blocking_client(serve, client, colours) -> None:
    identity = colours.identity(60)
    seen = frames(colours, 0, 60, 120)
    options = ScoreOptions(motion_weight=0.5)
    motion = VideoMotion(0.1, 0.1)

    async def calls(endpoint: str) -> None:
        async with AsyncRewardClient(endpoint, timeout_s=20) as connected:
            assert await connected.wait_until_ready() == client.server_info()
            embedded = await connected.embed_identity([colours.frame(green=30)])
            expected = client.embed_identity([colours.frame(green=30)])
            np.testing.assert_array_equal(embedded.embedding, expected.embedding)
            reward = await connected.score(seen, identity, options, reference_motion=motion)
            blocking = client.score(seen, identity, options, reference_motion=motion)
            assert (reward.value, reward.components) == (blocking.value, blocking.components)
            with pytest.raises(NoFaceInImages):
                await connected.embed_identity([colours.frame(red=0)])
            with pytest.raises(InvalidVideo, match="float32"):
                await connected.score(seen.astype(np.float32), identity)

    asyncio.run(calls(client.endpoint))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_videos_are_scored_with_few_held_and_each_error_is_its_own(client, colours, asynchronous: bool) -> None:
    taken, done = 0, 0
    held: list[int] = []

    def source() -> Iterator[VideoToScore]:
        nonlocal taken
        for index in range(20):
            taken += 1
            held.append(taken - done)
            frame_count = 0 if index == 7 else 3
            yield VideoToScore(f"video {index}", frames(colours, *[10 * index] * 3)[:frame_count], colours.identity())

    async def awaited_source() -> AsyncIterator[VideoToScore]:
        for video in source():
            await asyncio.sleep(0)
            yield video

    async def score() -> dict[str, object]:
        nonlocal done
        outcomes: dict[str, object] = {}
        async with AsyncRewardClient(client.endpoint) as connected:
            videos = awaited_source() if asynchronous else source()
            async for name, outcome in connected.score_many(videos, concurrency=3):
                done += 1
                assert name not in outcomes
                outcomes[name] = outcome
        return outcomes

    outcomes = asyncio.run(score())
    assert len(outcomes) == 20
    assert isinstance(outcomes.pop("video 7"), InvalidVideo)
    for name, reward in outcomes.items():
        assert reward.value == pytest.approx(colours.similarity(0, 10 * int(name.split()[1])), abs=1e-5)
    # Three are with the server; results that wait to be yielded when a place is free are at most one batch more.
    assert max(held) <= 4


def test_an_error_of_the_source_is_the_callers(client, colours) -> None:
    def source() -> Iterator[VideoToScore]:
        yield VideoToScore("first", frames(colours, 0), colours.identity())
        raise OSError("the disk is gone")

    async def score() -> None:
        async with AsyncRewardClient(client.endpoint) as connected:
            async for _ in connected.score_many(source()):
                pass

    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(score())


def test_a_cancelled_task_ends_the_call_in_the_server(serve, colours) -> None:
    recognizer = colours.Recognizer()
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(20)

    server = serve(colours.scorer(recognizer=recognizer))
    recognizer.before_run = wait

    async def cancel() -> None:
        async with AsyncRewardClient(server.endpoint) as connected:
            task = asyncio.create_task(connected.score(frames(colours, 0), colours.identity()))
            assert await asyncio.to_thread(begun.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            recognizer.before_run = lambda: None
            go_on.set()
            assert (await connected.score(frames(colours, 0), colours.identity())).value == pytest.approx(1.0)

    asyncio.run(cancel())


def test_a_server_that_stays_away_is_given_up_after_the_time_set(colours) -> None:
    async def score() -> None:
        async with AsyncRewardClient("127.0.0.1:9") as connected:
            with pytest.raises(ServerUnavailable, match="127.0.0.1:9"):
                await connected.wait_until_ready(0.2)
            video = VideoToScore("video", frames(colours, 0), colours.identity())
            retry = RetryPolicy(first_wait_s=0.05, give_up_after_s=0.3)
            async for _ in connected.score_many([video], retry=retry):
                pass

    with pytest.raises(ServerUnavailable):
        asyncio.run(score())
