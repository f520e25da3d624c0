"""The service: requests to the words of domain.py, the work handed to threads, answers back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Executor
from functools import partial
from importlib.metadata import version

import grpc

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward.domain import COMPONENT_NAMES, FrameScore
from likeness_reward.embedded import FRAMES_AT_ONCE, FaceScorer
from likeness_reward.errors import (
    InvalidTemplate,
    InvalidVideo,
    LikenessError,
    LimitExceeded,
    ServerBusy,
    ServerDraining,
)
from likeness_reward.face.scoring import check_reference_motion, reward_from_frames
from likeness_reward.frame_work import FrameWork
from likeness_reward.frames import FrameReader
from likeness_reward.gradient_wire import gradients_to_message
from likeness_reward.metrics import ServerMetrics
from likeness_reward.settings import ServerSettings
from likeness_reward.stream import ScoringStream, note_request_id, note_video
from likeness_reward.wire import (
    identity_from_message,
    identity_to_message,
    limits_to_message,
    observation_to_message,
    options_from_message,
    pooling_from_message,
    reference_motion_of,
    reward_to_message,
)


class Admission:
    """Counts the running calls: refuses one too many, and every new one while the server drains."""

    def __init__(self, max_calls: int, metrics: ServerMetrics) -> None:
        self._max_calls = max_calls
        self._metrics = metrics
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place for one call. Raises ServerBusy or ServerDraining."""
        if self._draining:
            raise ServerDraining("the server is shutting down")
        if self._running >= self._max_calls:
            raise ServerBusy(f"{self._running} calls are running; at most {self._max_calls} are admitted")
        self._running += 1
        self._metrics.calls_running.set(self._running)
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            self._metrics.calls_running.set(self._running)
            if self._running == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new calls and waits for those that run. Returns whether all of them ended in time."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class RewardServicer(reward_service_pb2_grpc.RewardServiceServicer):
    """likeness.reward.v1.RewardService. Keeps nothing between calls."""

    def __init__(
        self,
        scorer: FaceScorer,
        settings: ServerSettings,
        executor: Executor,
        admission: Admission,
        metrics: ServerMetrics,
    ) -> None:
        self._scorer = scorer
        self._settings = settings
        self._executor = executor
        self._admission = admission
        self._metrics = metrics
        self._work = FrameWork(scorer, executor, metrics)

    async def GetServerInfo(
        self, request: reward_service_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.GetServerInfoResponse:
        """Returns the models, limits and optional features."""
        width, height = self._scorer.pack.detector_config.size
        return reward_service_pb2.GetServerInfoResponse(
            server_version=version("likeness-reward"),
            model_fingerprint=self._scorer.model_fingerprint,
            limits=limits_to_message(self._settings.limits),
            pack_name=self._scorer.pack.name,
            embedding_length=self._scorer.embedding_length,
            features=[reward_service_pb2.FEATURE_CROP_GRADIENTS] if self._scorer.has_crop_gradients else [],
            component_names=COMPONENT_NAMES,
            detector_width=width,
            detector_height=height,
        )

    async def EmbedIdentity(
        self, request: reward_service_pb2.EmbedIdentityRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.EmbedIdentityResponse:
        """Returns the template of reference images. Raises InvalidImage, LimitExceeded, NoFaceInImages."""
        count, most = len(request.images), self._settings.max_images
        if count > most:
            raise LimitExceeded(f"{count} images; at most {most} are allowed", found=count, limit=most)
        self._metrics.received_bytes.inc(sum(map(len, request.images)))
        with self._admission.admit():
            identity, observations = await asyncio.get_running_loop().run_in_executor(
                self._executor,
                partial(
                    self._scorer.embed_identity_with_observations,
                    list(request.images),
                    pooling_from_message(request.pooling),
                    self._settings.max_pixels_per_image,
                ),
            )
        return reward_service_pb2.EmbedIdentityResponse(
            identity=identity_to_message(identity),
            observations=[observation_to_message(observation) for observation in observations],
        )

    async def ScoreVideo(
        self, request: reward_service_pb2.ScoreVideoRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.ScoreVideoResponse:
        """Returns the reward of a video in one message. Raises InvalidVideo, InvalidTemplate, LimitExceeded, ..."""
        note_request_id(request.request_id)
        options = options_from_message(request.options)
        self._scorer.check_options(options)
        reader = FrameReader.of(request.spec, self._settings.limits)
        if len(request.frames) != reader.frame_count:
            found, expected = len(request.frames), reader.frame_count
            raise InvalidVideo(f"{found} frames; spec.frame_count is {expected}", found=found, expected=expected)
        if not request.HasField("identity"):
            raise InvalidTemplate("the request has no identity")
        identity = identity_from_message(request.identity)
        self._scorer.check_identity(identity)
        motion = reference_motion_of(request)
        check_reference_motion(options, motion)
        self._metrics.received_bytes.inc(sum(map(len, request.frames)))
        with self._admission.admit(), self._one_video():
            note_video()
            scores: list[FrameScore] = []
            for start in range(0, reader.frame_count, FRAMES_AT_ONCE):
                part = request.frames[start : start + FRAMES_AT_ONCE]
                scores += await self._work.score(reader, part, start, identity, options)
            reward = reward_from_frames(scores, options, self._scorer.model_fingerprint, motion)
        response = reward_service_pb2.ScoreVideoResponse(reward=reward_to_message(reward))
        if options.include_crop_gradients:
            gradients = gradients_to_message(reward.crop_gradients, options.gradient_encoding)
            response.crop_gradients.CopyFrom(gradients)
        return response

    @contextlib.contextmanager
    def _one_video(self) -> Iterator[None]:
        """Counts the video of a unary call and what becomes of it."""
        outcome = "cancelled"
        with self._metrics.videos_in_flight.track_inprogress():
            try:
                yield
                outcome = "ok"
            except LikenessError as error:
                outcome = error.reason
                raise
            finally:
                self._metrics.videos.labels(outcome).inc()

    async def StreamVideoScores(
        self,
        request_iterator: AsyncIterator[reward_service_pb2.StreamVideoScoresRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[reward_service_pb2.StreamVideoScoresResponse, None]:
        """Yields one result per video of a stream."""
        with self._admission.admit():
            stream = ScoringStream(self._scorer, self._settings, self._work, self._metrics)
            async with contextlib.aclosing(stream.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
