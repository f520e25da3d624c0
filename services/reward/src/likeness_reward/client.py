"""The client: calls with deadlines, streams with backpressure, errors of one family."""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward.channel import open_channel, score_streams
from likeness_reward.credentials import ClientKeys
from likeness_reward.domain import (
    FaceObservation,
    IdentityTemplate,
    Pooling,
    ScoreOptions,
    ServerInfo,
    VideoMotion,
    VideoReward,
)
from likeness_reward.errors import LikenessError, ServerUnavailable, error_from_call
from likeness_reward.gradient_wire import with_gradients
from likeness_reward.many import ManyVideos, RetryPolicy, VideoToScore
from likeness_reward.messages import check_video, embed_request, score_request, stream_config
from likeness_reward.video_stream import VideoScoreStream
from likeness_reward.wire import (
    identity_from_message,
    observation_from_message,
    reward_from_message,
    server_info_from_message,
)

SINGLE_MESSAGE_BYTES = 8 * 2**20


class RewardClient:
    """A connection to a reward service. Threads may share it; use it as a context manager or call `close`."""

    def __init__(
        self, endpoint: str, *, timeout_s: float = 60.0, token: str | None = None, tls: ClientKeys | None = None
    ) -> None:
        """`timeout_s` is the deadline of each unary call; `tls` makes the connection a TLS one; nothing is sent yet.

        `endpoint` is HOST:PORT, or several with commas between them, of which each call takes the next that answers.
        A name that stands for several addresses is used the same way. Raises InvalidCredentials.
        """
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self._channel = open_channel(endpoint, tls)
        self._stub = reward_service_pb2_grpc.RewardServiceStub(self._channel)
        self._score_streams = score_streams(self._channel)

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._channel.close()

    def wait_until_ready(self, timeout_s: float = 10.0) -> ServerInfo:
        """Returns server_info() as soon as the server answers. Raises ServerUnavailable after `timeout_s`."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            message = f"no reward server answers at {self.endpoint} within {timeout_s:g} s: is it running?"
            raise ServerUnavailable(message, endpoint=self.endpoint) from None
        return self.server_info()

    def server_info(self) -> ServerInfo:
        """Returns the models and limits of the server."""
        return server_info_from_message(self._call(self._stub.GetServerInfo, reward_service_pb2.GetServerInfoRequest()))

    def embed_identity(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean"
    ) -> IdentityTemplate:
        """Returns the identity of images: JPEG, PNG or WebP files, or RGB arrays uint8 [H, W, 3].

        Images without a usable face are left out. Raises InvalidImage, LimitExceeded, NoFaceInImages, ...
        """
        return self.embed_identity_with_observations(images, pooling)[0]

    def embed_identity_with_observations(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean"
    ) -> tuple[IdentityTemplate, list[FaceObservation]]:
        """As `embed_identity`; also returns what was seen in each image."""
        response = self._call(self._stub.EmbedIdentity, embed_request(images, pooling))
        observations = [observation_from_message(message) for message in response.observations]
        return identity_from_message(response.identity), observations

    def score(
        self,
        frames_rgb: NDArray[np.uint8],
        identity: IdentityTemplate,
        options: ScoreOptions | None = None,
        *,
        reference_motion: VideoMotion | None = None,
    ) -> VideoReward:
        """Returns the reward of a video uint8 [T, H, W, 3]; more than SINGLE_MESSAGE_BYTES of it go over a stream.

        `reference_motion`, the `motion` of another video's reward, is what its motion is measured by.
        Raises InvalidVideo, InvalidTemplate, FingerprintMismatch, LimitExceeded, ...
        """
        check_video(frames_rgb)
        if frames_rgb.nbytes > SINGLE_MESSAGE_BYTES:
            return self._score_over_stream(frames_rgb, identity, options, reference_motion)
        request = score_request(frames_rgb, identity, options, reference_motion)
        response = self._call(self._stub.ScoreVideo, request)
        reward = reward_from_message(response.reward)
        if options is None or not options.include_crop_gradients:
            return reward
        return with_gradients(reward, [response.crop_gradients])

    def _score_over_stream(
        self,
        frames_rgb: NDArray[np.uint8],
        identity: IdentityTemplate,
        options: ScoreOptions | None,
        reference_motion: VideoMotion | None,
    ) -> VideoReward:
        count, height, width = frames_rgb.shape[:3]
        with self.open_stream(options, identity=identity, deadline_s=self.timeout_s) as stream:
            stream.start_video("video", width, height, count, reference_motion=reference_motion)
            stream.send_frames("video", 0, frames_rgb)
            stream.end_video("video")
            stream.close()
            (_, outcome), *_ = stream.results()
        if isinstance(outcome, LikenessError):
            raise outcome
        return outcome

    def open_stream(
        self,
        options: ScoreOptions | None = None,
        *,
        identity: IdentityTemplate | None = None,
        deadline_s: float,
        expected_fingerprint: str | None = None,
    ) -> VideoScoreStream:
        """Returns an open stream for many videos, for example one group of samples.

        `identity` is the person of every video that names none of its own; the stream fails when the server's models
        are not `expected_fingerprint`, and after `deadline_s` in any case.
        """
        return VideoScoreStream(
            lambda requests: self._score_streams(requests, timeout=deadline_s, metadata=self._metadata),
            stream_config(options, identity, expected_fingerprint),
            endpoint=self.endpoint,
            deadline_s=deadline_s,
        )

    def score_many(
        self,
        videos: Iterable[VideoToScore],
        options: ScoreOptions | None = None,
        *,
        concurrency: int = 4,
        deadline_s: float = 600.0,
        expected_fingerprint: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> Iterator[tuple[str, VideoReward | LikenessError]]:
        """Yields (video_id, reward or that video's error) of every video, in order of completion.

        At most `concurrency` videos are held. When the server goes away or is busy, the videos without a result are
        sent again on a new stream, with exponential backoff; after retry.give_up_after_s without a result the last
        error is raised. Each stream has the deadline `deadline_s`.
        """

        def open_stream() -> VideoScoreStream:
            return self.open_stream(options, deadline_s=deadline_s, expected_fingerprint=expected_fingerprint)

        return ManyVideos(open_stream, concurrency, retry or RetryPolicy()).results(videos)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_call(error, self.endpoint) from error
