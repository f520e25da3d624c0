"""The client for asyncio: what RewardClient does, awaited."""

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness.reward.v1.reward_service_pb2 import StreamVideoScoresRequest as StreamRequest
from likeness_reward.channel import open_aio_channel, score_streams
from likeness_reward.credentials import ClientKeys
from likeness_reward.domain import IdentityTemplate, Pooling, ScoreOptions, ServerInfo, VideoMotion, VideoReward
from likeness_reward.errors import LikenessError, ServerUnavailable, error_from_call, error_from_status
from likeness_reward.many import RetryPolicy, VideoToScore, check_concurrency
from likeness_reward.messages import check_video, embed_request, stream_config, video_end, video_frames, video_start
from likeness_reward.wire import identity_from_message, reward_from_message, server_info_from_message


class AsyncRewardClient:
    """A connection to a reward service for one event loop; use it with `async with`, or await `close`."""

    def __init__(
        self, endpoint: str, *, timeout_s: float = 60.0, token: str | None = None, tls: ClientKeys | None = None
    ) -> None:
        """As RewardClient: `endpoint` is HOST:PORT or several with commas between; `timeout_s` is each call's deadline.

        Call it inside a running event loop. Raises InvalidCredentials.
        """
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self._channel = open_aio_channel(endpoint, tls)
        self._stub = reward_service_pb2_grpc.RewardServiceStub(self._channel)
        self._score_streams = score_streams(self._channel)

    async def __aenter__(self) -> "AsyncRewardClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close()

    async def wait_until_ready(self, timeout_s: float = 10.0) -> ServerInfo:
        """Returns server_info() as soon as the server answers. Raises ServerUnavailable after `timeout_s`."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except TimeoutError:
            message = f"no reward server answers at {self.endpoint} within {timeout_s:g} s: is it running?"
            raise ServerUnavailable(message, endpoint=self.endpoint) from None
        return await self.server_info()

    async def server_info(self) -> ServerInfo:
        """Returns the models and limits of the server."""
        request = reward_service_pb2.GetServerInfoRequest()
        return server_info_from_message(await self._call(self._stub.GetServerInfo, request))

    async def embed_identity(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean"
    ) -> IdentityTemplate:
        """Returns the identity of images: JPEG, PNG or WebP files, or RGB arrays uint8 [H, W, 3].

        Images without a usable face are left out. Raises InvalidImage, LimitExceeded, NoFaceInImages, ...
        """
        response = await self._call(self._stub.EmbedIdentity, embed_request(images, pooling))
        return identity_from_message(response.identity)

    async def score(
        self,
        frames_rgb: NDArray[np.uint8],
        identity: IdentityTemplate,
        options: ScoreOptions | None = None,
        *,
        reference_motion: VideoMotion | None = None,
    ) -> VideoReward:
        """Returns the reward of a video uint8 [T, H, W, 3], measured against the motion of a reference if given.

        Cancelling the task cancels the work in the server. Raises InvalidVideo, InvalidTemplate, LimitExceeded, ...
        """
        video = VideoToScore("video", frames_rgb, identity, reference_motion)
        return await self._score_once(video, stream_config(options, None, None), self.timeout_s)

    async def score_many(
        self,
        videos: Iterable[VideoToScore] | AsyncIterable[VideoToScore],
        options: ScoreOptions | None = None,
        *,
        concurrency: int = 4,
        deadline_s: float = 600.0,
        expected_fingerprint: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> AsyncIterator[tuple[str, VideoReward | LikenessError]]:
        """Yields (video_id, reward or that video's error) of every video, in order of completion.

        At most `concurrency` videos are held; a plain iterable is read in a thread. Each video has a call of its own
        of at most `deadline_s`, which is repeated, with exponential backoff, while the server is away or busy; when
        that lasts longer than retry.give_up_after_s, the last error is raised.
        """
        check_concurrency(concurrency)
        source = aiter(videos) if isinstance(videos, AsyncIterable) else _read_in_a_thread(videos)
        config = stream_config(options, None, expected_fingerprint)
        policy = retry or RetryPolicy()
        scoring: set[asyncio.Task[tuple[str, VideoReward | LikenessError]]] = set()
        reading: asyncio.Task[VideoToScore | None] | None = None
        ended = False
        try:
            while True:
                if reading is None and not ended and len(scoring) < concurrency:
                    reading = asyncio.create_task(_next_or_none(source))
                if reading is None and not scoring:
                    return
                waited_for: list[asyncio.Task[Any]] = [*scoring, *([reading] if reading is not None else [])]
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    video, reading = reading.result(), None
                    ended = video is None
                    if video is not None:
                        scoring.add(asyncio.create_task(self._score_at_last(video, config, deadline_s, policy)))
                for task in [task for task in scoring if task.done()]:
                    scoring.discard(task)
                    yield task.result()
        finally:
            left = [*scoring, *([reading] if reading is not None else [])]
            for unfinished in left:
                unfinished.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _score_at_last(
        self, video: VideoToScore, config: StreamRequest, deadline_s: float, policy: RetryPolicy
    ) -> tuple[str, VideoReward | LikenessError]:
        """Returns the outcome of one video, sent again while the server is away. Raises the last error in the end."""
        loop = asyncio.get_running_loop()
        first_failure_at: float | None = None
        for attempt in itertools.count(1):
            try:
                return video.video_id, await self._score_once(video, config, deadline_s)
            except LikenessError as error:
                if not error.retryable:
                    return video.video_id, error
                first_failure_at = loop.time() if first_failure_at is None else first_failure_at
                if loop.time() - first_failure_at > policy.give_up_after_s:
                    raise
                await asyncio.sleep(max(policy.wait_s(attempt), error.retry_after_s or 0.0))
        raise AssertionError("count(1) does not end")

    async def _score_once(self, video: VideoToScore, config: StreamRequest, deadline_s: float) -> VideoReward:
        check_video(video.frames_rgb)

        async def requests() -> AsyncIterator[StreamRequest | bytes]:
            yield config
            shape = video.frames_rgb.shape
            yield video_start(video.video_id, shape[:3], video.identity, video.reference_motion)
            for message in video_frames(video.video_id, 0, video.frames_rgb):
                yield message
            yield video_end(video.video_id)

        call = self._score_streams(requests(), timeout=deadline_s, metadata=self._metadata)
        try:
            async for response in call:
                if not response.HasField("result"):
                    continue
                if response.result.HasField("error"):
                    raise error_from_status(response.result.error)
                return reward_from_message(response.result.reward)
        except grpc.RpcError as error:
            raise error_from_call(error, self.endpoint) from error
        finally:
            call.cancel()
        raise ServerUnavailable(f"reward server {self.endpoint} ended the stream early", endpoint=self.endpoint)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_call(error, self.endpoint) from error


async def _next_or_none(source: AsyncIterator[VideoToScore]) -> VideoToScore | None:
    return await anext(source, None)


async def _read_in_a_thread(videos: Iterable[VideoToScore]) -> AsyncIterator[VideoToScore]:
    iterator = iter(videos)
    while (video := await asyncio.to_thread(next, iterator, None)) is not None:
        yield video
