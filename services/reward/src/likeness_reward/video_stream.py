"""The client's end of StreamVideoScores: one thread sends videos, another receives their rewards."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from likeness.reward.v1 import reward_pb2, reward_service_pb2
from likeness.reward.v1.reward_service_pb2 import StreamVideoScoresRequest as Request
from likeness_reward.domain import IdentityTemplate, VideoMotion, VideoReward
from likeness_reward.errors import (
    DeadlineExceeded,
    InvalidGradients,
    InvalidVideo,
    LikenessError,
    ServerUnavailable,
    error_from_call,
    error_from_status,
)
from likeness_reward.gradient_wire import with_gradients
from likeness_reward.messages import video_end, video_frames, video_start
from likeness_reward.wire import reward_from_message

QUEUED_MESSAGES = 4
VideoOutcome = tuple[str, VideoReward | LikenessError]


class VideoScoreStream:
    """Videos in, rewards out. One thread may send while another reads `results`.

    Sending blocks while QUEUED_MESSAGES messages wait (the server is busy) and starting a video blocks while as many
    as the server allows are in flight. After a failure every method raises the stream's LikenessError.
    """

    def __init__(
        self,
        start_call: Callable[[Iterator[Request | bytes]], Any],
        config: Request,
        *,
        endpoint: str,
        deadline_s: float,
    ) -> None:
        """Opens the stream: `start_call` makes the gRPC call from an iterator of requests, `config` first."""
        self._endpoint = endpoint
        self._ends_at = time.monotonic() + deadline_s
        self._changed = threading.Condition()
        self._outbox: deque[Request | bytes] = deque([config])
        self._results: deque[VideoOutcome] = deque()
        self._in_flight: set[str] = set()
        self._failed: set[str] = set()
        self._with_gradients = config.config.options.include_crop_gradients
        self._gradients: dict[str, list[reward_pb2.CropGradients]] = {}
        self._max_in_flight = 0
        self._model_fingerprint = ""
        self._closed = False
        self._ended = False
        self._error: LikenessError | None = None
        self._call = start_call(self._requests())
        self._receiver = threading.Thread(target=self._receive, name="reward-stream", daemon=True)
        self._receiver.start()

    def __enter__(self) -> "VideoScoreStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def model_fingerprint(self) -> str:
        """Fingerprint of the server's models; waits for the server's first message."""
        with self._changed:
            self._wait_for(lambda: self._max_in_flight > 0)
            return self._model_fingerprint

    def start_video(
        self,
        video_id: str,
        width: int,
        height: int,
        frame_count: int,
        identity: IdentityTemplate | None = None,
        *,
        reference_motion: VideoMotion | None = None,
    ) -> None:
        """Announces a video of `frame_count` frames of width x height pixels.

        `identity` overrides the stream's; `reference_motion` is what the video's motion is measured by.
        """
        message = video_start(video_id, (frame_count, height, width), identity, reference_motion)
        with self._changed:
            if video_id in self._in_flight:
                raise InvalidVideo(f"video_id {video_id!r} is already in use on this stream", video_id=video_id)
            self._wait_for(lambda: self._max_in_flight > 0 and len(self._in_flight) < self._max_in_flight)
            self._in_flight.add(video_id)
        self._send(message)

    def send_frames(self, video_id: str, first_frame_index: int, frames_rgb: NDArray[np.uint8]) -> None:
        """Sends consecutive frames uint8 [T, H, W, 3] of an open video, up to three a message.

        Frames of a video that already failed (its error is among `results`) are dropped.
        """
        if frames_rgb.dtype != np.uint8 or frames_rgb.ndim != 4 or frames_rgb.shape[3] != 3:
            found = f"{frames_rgb.dtype} {list(frames_rgb.shape)}"
            raise InvalidVideo(f"expected frames uint8 [T, H, W, 3], found {found}", video_id=video_id, found=found)
        for message in video_frames(video_id, first_frame_index, frames_rgb):
            if video_id in self._failed:
                return
            self._send(message)

    def end_video(self, video_id: str, *, cancelled: bool = False) -> None:
        """Says that all frames were sent; the result becomes due. A cancelled video has no result."""
        self._send(video_end(video_id, cancelled=cancelled))
        with self._changed:
            self._failed.discard(video_id)
            if cancelled:
                self._in_flight.discard(video_id)
                self._changed.notify_all()

    def close(self) -> None:
        """Says that no more videos follow; `results` ends after the last result."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Gives the stream up at once, with everything on it."""
        self._call.cancel()
        self._receiver.join()

    def results(self) -> Iterator[VideoOutcome]:
        """Yields (video_id, reward or that video's error) as videos complete, until the stream is closed.

        Raises the LikenessError that ended the stream, after the results that arrived before it.
        """
        while True:
            with self._changed:
                while not self._results and not self._ended:
                    self._changed.wait()
                if not self._results:
                    if self._error is not None:
                        raise self._error
                    return
                outcome = self._results.popleft()
            yield outcome

    def _send(self, request: Request | bytes) -> None:
        with self._changed:
            self._wait_for(lambda: len(self._outbox) < QUEUED_MESSAGES)
            if self._closed:
                raise RuntimeError("the stream is closed: no message can follow")
            self._outbox.append(request)
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits, with the lock held, for a condition. Raises the stream's error, or DeadlineExceeded."""
        left_s = max(self._ends_at - time.monotonic(), 0.0)
        if not self._changed.wait_for(lambda: self._ended or condition(), left_s):
            raise DeadlineExceeded(f"reward server {self._endpoint}: the stream's deadline passed while sending")
        if self._ended:
            ended = ServerUnavailable(f"reward server {self._endpoint} ended the stream", endpoint=self._endpoint)
            raise self._error or ended

    def _requests(self) -> Iterator[Request | bytes]:
        """Feeds gRPC, which takes the next message when the last one has left."""
        while True:
            with self._changed:
                while not self._outbox and not self._closed and not self._ended:
                    self._changed.wait()
                if self._ended or not self._outbox:
                    return
                request = self._outbox.popleft()
                self._changed.notify_all()
            yield request

    def _receive(self) -> None:
        error: LikenessError | None = None
        try:
            for response in self._call:
                self._take(response)
        except grpc.RpcError:
            error = error_from_call(self._call, self._endpoint)
        finally:
            with self._changed:
                if error is None and self._in_flight:
                    error = ServerUnavailable(f"reward server {self._endpoint} ended the stream early")
                self._error, self._ended = error, True
                self._changed.notify_all()

    def _take(self, response: reward_service_pb2.StreamVideoScoresResponse) -> None:
        with self._changed:
            if response.HasField("started"):
                self._model_fingerprint = response.started.model_fingerprint
                self._max_in_flight = response.started.max_videos_in_flight
            elif response.HasField("crop_gradients"):
                self._gradients.setdefault(response.crop_gradients.video_id, []).append(response.crop_gradients)
            elif response.HasField("result"):
                result = response.result
                self._in_flight.discard(result.video_id)
                if result.HasField("error"):
                    self._failed.add(result.video_id)
                self._results.append((result.video_id, self._outcome(result)))
            self._changed.notify_all()

    def _outcome(self, result: reward_service_pb2.VideoResult) -> VideoReward | LikenessError:
        """Returns a video's error, or its reward with the gradients that came before it."""
        gradients = self._gradients.pop(result.video_id, [])
        if result.HasField("error"):
            return error_from_status(result.error)
        reward = reward_from_message(result.reward)
        if not self._with_gradients:
            return reward
        try:
            return with_gradients(reward, gradients)
        except InvalidGradients as error:
            return error
