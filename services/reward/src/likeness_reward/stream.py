"""One StreamVideoScores call on the server: videos in, results out as each completes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from likeness.reward.v1 import reward_service_pb2, video_pb2
from likeness.reward.v1.reward_service_pb2 import StreamVideoScoresResponse as Response
from likeness_reward.domain import FrameScore, IdentityTemplate, ScoreOptions, VideoMotion
from likeness_reward.embedded import FaceScorer
from likeness_reward.errors import (
    FingerprintMismatch,
    InvalidRequest,
    InvalidTemplate,
    InvalidVideo,
    LikenessError,
    LimitExceeded,
    StreamOrderBroken,
    error_from_status,
    status_from_error,
)
from likeness_reward.face.scoring import check_reference_motion, reward_from_frames
from likeness_reward.frame_work import FrameWork
from likeness_reward.frames import FrameReader, check_crc32
from likeness_reward.gradient_wire import gradients_to_messages
from likeness_reward.inference.call import CURRENT_CALL
from likeness_reward.metrics import ServerMetrics
from likeness_reward.settings import ServerSettings
from likeness_reward.wire import (
    identity_from_message,
    options_from_message,
    reference_motion_of,
    reward_to_message,
)

MAX_NAME_LENGTH = 64


@dataclass
class OpenVideo:
    """A video whose result is due."""

    reader: FrameReader
    identity: IdentityTemplate
    reference_motion: VideoMotion | None
    received: int = 0
    analyses: list[asyncio.Task[list[FrameScore]]] = field(default_factory=list)


@dataclass(frozen=True)
class StreamSettings:
    """What the first message of a stream says."""

    identity: IdentityTemplate | None
    options: ScoreOptions
    reference_motion: VideoMotion | None


class ScoringStream:
    """Reads the messages of one stream and scores its videos while later frames still arrive.

    At most settings.max_frames_waiting frames are held: while there are as many the stream is not read, and HTTP/2
    flow control stops the client.
    """

    def __init__(self, scorer: FaceScorer, settings: ServerSettings, work: FrameWork, metrics: ServerMetrics) -> None:
        self._scorer = scorer
        self._settings = settings
        self._work = work
        self._metrics = metrics
        self._frames_waiting = asyncio.Semaphore(settings.max_frames_waiting)
        self._outbox: asyncio.Queue[Response | LikenessError | None] = asyncio.Queue()
        self._open: dict[str, OpenVideo] = {}
        self._failed: set[str] = set()
        self._in_flight: set[str] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._config: StreamSettings | None = None

    async def responses(
        self, requests: AsyncIterator[reward_service_pb2.StreamVideoScoresRequest]
    ) -> AsyncGenerator[Response, None]:
        """Yields `started`, then one result per video. Raises the LikenessError that ends the stream."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while (item := await self._outbox.get()) is not None:
                if isinstance(item, LikenessError):
                    raise item
                if item.HasField("result"):
                    self._leave(item.result.video_id, outcome_of(item.result))
                yield item
            await reader
        finally:
            self._cancel(reader)

    def _leave(self, name: str, outcome: str) -> None:
        """Counts a video that is no longer in flight."""
        if name in self._in_flight:
            self._in_flight.discard(name)
            self._metrics.videos_in_flight.dec()
            self._metrics.videos.labels(outcome).inc()

    def _cancel(self, reader: asyncio.Task[None]) -> None:
        reader.cancel()
        for name in list(self._in_flight):
            self._leave(name, "cancelled")
        for finishing in self._finishing:
            finishing.cancel()
        for video in self._open.values():
            for analysis in video.analyses:
                analysis.cancel()

    async def _read(self, requests: AsyncIterator[reward_service_pb2.StreamVideoScoresRequest]) -> None:
        """Takes every message; ends the outbox with None, or with the error that ends the stream."""
        try:
            async for request in requests:
                await self._take(request)
            if self._open:
                raise StreamOrderBroken(f"the stream ended while video {next(iter(self._open))!r} was open")
            await asyncio.gather(*self._finishing)
        except LikenessError as error:
            self._outbox.put_nowait(error)
        finally:
            self._outbox.put_nowait(None)

    async def _take(self, request: reward_service_pb2.StreamVideoScoresRequest) -> None:
        kind = request.WhichOneof("message")
        if (kind == "config") != (self._config is None):
            raise StreamOrderBroken(f"message {kind}: config must be the first message of a stream, and only that")
        if kind == "config":
            await self._configure(request.config)
            return
        takers: dict[str | None, Callable[[], Awaitable[None]]] = {
            "video_start": partial(self._start, request.video_start),
            "frames": partial(self._add_frames, request.frames),
            "video_end": partial(self._end, request.video_end),
        }
        if kind not in takers:
            raise StreamOrderBroken("a message of the stream is empty")
        await takers[kind]()

    async def _configure(self, config: reward_service_pb2.StreamConfig) -> None:
        fingerprint = self._scorer.model_fingerprint
        note_request_id(config.request_id)
        if config.expected_model_fingerprint not in ("", fingerprint):
            raise FingerprintMismatch(
                f"the models are {fingerprint[:12]}, {config.expected_model_fingerprint[:12]} were expected",
                found=fingerprint,
                expected=config.expected_model_fingerprint,
            )
        identity = None
        if config.HasField("identity"):
            identity = identity_from_message(config.identity)
            self._scorer.check_identity(identity)
        options = options_from_message(config.options)
        self._scorer.check_options(options)
        self._config = StreamSettings(identity, options, reference_motion_of(config))
        started = reward_service_pb2.StreamStarted(
            model_fingerprint=fingerprint, max_videos_in_flight=self._settings.max_videos_in_flight
        )
        await self._outbox.put(Response(started=started))

    async def _start(self, message: video_pb2.VideoStart) -> None:
        name = message.video_id
        if not 1 <= len(name) <= MAX_NAME_LENGTH:
            raise StreamOrderBroken(f"video_id {name[:80]!r}: 1 to {MAX_NAME_LENGTH} characters are allowed")
        if name in self._in_flight or name in self._failed:
            raise StreamOrderBroken(f"video_id {name!r} is already in use on this stream", video_id=name)
        most = self._settings.max_videos_in_flight
        if max(len(self._in_flight), len(self._failed)) >= most:
            raise LimitExceeded(f"video {name!r}: {most} videos are already in flight", video_id=name, limit=most)
        self._in_flight.add(name)
        self._metrics.videos_in_flight.inc()
        note_video()
        try:
            reader = FrameReader.of(message.spec, self._settings.limits)
            self._open[name] = OpenVideo(reader, self._identity(message), self._reference_motion(message))
        except LikenessError as error:
            await self._fail(name, error)

    def _identity(self, message: video_pb2.VideoStart) -> IdentityTemplate:
        if message.HasField("identity"):
            identity = identity_from_message(message.identity)
            self._scorer.check_identity(identity)
            return identity
        if self._config is None or self._config.identity is None:
            raise InvalidTemplate(f"video {message.video_id!r} has no identity, and neither has the stream")
        return self._config.identity

    def _reference_motion(self, message: video_pb2.VideoStart) -> VideoMotion | None:
        assert self._config is not None
        motion = reference_motion_of(message) or self._config.reference_motion
        check_reference_motion(self._config.options, motion)
        return motion

    async def _add_frames(self, message: video_pb2.VideoFrames) -> None:
        name = message.video_id
        if name in self._failed:
            return
        if name not in self._open:
            raise StreamOrderBroken(f"frames of video {name!r}, which is not open", video_id=name)
        video = self._open[name]
        frames = list(message.frames)  # each access copies the pixels
        try:
            check_frames_message(video, message, frames)
        except LikenessError as error:
            await self._fail(name, error)
            return
        self._metrics.received_bytes.inc(sum(map(len, frames)))
        at_once = min(self._scorer.frames_at_once, self._settings.max_frames_waiting)
        for start in range(0, len(frames), at_once):
            part = frames[start : start + at_once]
            for _ in part:
                await self._frames_waiting.acquire()
            analysis = asyncio.create_task(self._analyze(video, part, video.received))
            analysis.add_done_callback(lambda task: task.cancelled() or task.exception())
            video.analyses.append(analysis)
            video.received += len(part)

    async def _analyze(self, video: OpenVideo, encoded: Sequence[bytes], first_index: int) -> list[FrameScore]:
        assert self._config is not None
        try:
            return await self._work.score(video.reader, encoded, first_index, video.identity, self._config.options)
        finally:
            for _ in encoded:
                self._frames_waiting.release()

    async def _end(self, message: video_pb2.VideoEnd) -> None:
        name = message.video_id
        if name in self._failed:
            self._failed.discard(name)
            return
        if name not in self._open:
            raise StreamOrderBroken(f"the end of video {name!r}, which is not open", video_id=name)
        video = self._open.pop(name)
        if message.cancelled:
            self._leave(name, "cancelled")
            for analysis in video.analyses:
                analysis.cancel()
            return
        finishing = asyncio.create_task(self._finish(name, video))
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)

    async def _finish(self, name: str, video: OpenVideo) -> None:
        """Waits for the frames of a complete video and sends its result."""
        assert self._config is not None
        try:
            if video.received != video.reader.frame_count:
                message = f"video {name!r} ended after {video.received} of {video.reader.frame_count} frames"
                raise InvalidVideo(message, found=video.received, expected=video.reader.frame_count)
            frames = [frame for part in await asyncio.gather(*video.analyses) for frame in part]
            fingerprint = self._scorer.model_fingerprint
            reward = reward_from_frames(frames, self._config.options, fingerprint, video.reference_motion)
        except LikenessError as error:
            result = reward_service_pb2.VideoResult(video_id=name, error=status_from_error(error))
        else:
            result = reward_service_pb2.VideoResult(video_id=name, reward=reward_to_message(reward))
            encoding = self._config.options.gradient_encoding
            for gradients in gradients_to_messages(reward.crop_gradients, encoding, name):
                await self._outbox.put(Response(crop_gradients=gradients))
        await self._outbox.put(Response(result=result))

    async def _fail(self, name: str, error: LikenessError) -> None:
        """Sends a video's error at once; what still comes for it is ignored until its end."""
        video = self._open.pop(name, None)
        if video is not None:
            for analysis in video.analyses:
                analysis.cancel()
        self._failed.add(name)
        result = reward_service_pb2.VideoResult(video_id=name, error=status_from_error(error))
        await self._outbox.put(Response(result=result))


def note_request_id(request_id: str) -> None:
    """Keeps a request's identifier for the call's log line. Raises InvalidRequest when it is too long."""
    if len(request_id) > MAX_NAME_LENGTH:
        message = f"request_id has {len(request_id)} characters; at most {MAX_NAME_LENGTH} are allowed"
        raise InvalidRequest(message, field="request_id")
    call = CURRENT_CALL.get()
    if call is not None:
        call.request_id = request_id


def note_video() -> None:
    """Counts a video for the call's log line."""
    call = CURRENT_CALL.get()
    if call is not None:
        call.video_count += 1


def outcome_of(result: reward_service_pb2.VideoResult) -> str:
    """Returns ok, or the reason of a video's error."""
    return error_from_status(result.error).reason if result.HasField("error") else "ok"


def check_frames_message(video: OpenVideo, message: video_pb2.VideoFrames, frames: Sequence[bytes]) -> None:
    """Raises InvalidVideo when a message's frames do not follow on, are too many, damaged or of the wrong size."""
    if message.first_frame_index != video.received:
        found = message.first_frame_index
        raise InvalidVideo(
            f"first_frame_index is {found}; the next frame is {video.received}", found=found, expected=video.received
        )
    if not frames:
        raise InvalidVideo("a message without frames")
    if video.received + len(frames) > video.reader.frame_count:
        found = video.received + len(frames)
        raise InvalidVideo(f"{found} frames; the video announced {video.reader.frame_count}", found=found)
    check_crc32(message, frames)
    for offset, data in enumerate(frames):
        video.reader.check_byte_count(video.received + offset, data)
