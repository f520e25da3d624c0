"""Scoring many videos: bounded concurrency, and what is lost on the way is sent again."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from likeness_reward.domain import IdentityTemplate, VideoMotion
from likeness_reward.errors import LikenessError
from likeness_reward.video_stream import VideoOutcome, VideoScoreStream


class RetryPolicy(BaseModel):
    """How long to wait for a server that is away."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_wait_s: float = Field(default=0.25, gt=0.0)
    """Wait before the first new attempt, seconds; doubled each time, with a random share taken off."""
    longest_wait_s: float = Field(default=10.0, gt=0.0)
    """Most seconds between two attempts."""
    give_up_after_s: float = Field(default=120.0, ge=0.0)
    """Seconds without any result after which the last error is raised."""

    def wait_s(self, attempt: int) -> float:
        """Returns the seconds to wait before attempt 1, 2, ...: exponential, with jitter of up to a quarter."""
        longest = min(self.first_wait_s * 2.0 ** (attempt - 1), self.longest_wait_s)
        return longest * random.uniform(0.75, 1.0)


@dataclass(frozen=True)
class VideoToScore:
    """One video and the person it should show."""

    video_id: str
    frames_rgb: NDArray[np.uint8]
    """uint8 [T, H, W, 3]."""
    identity: IdentityTemplate
    reference_motion: VideoMotion | None = None
    """What its motion is measured by."""


def check_concurrency(concurrency: int) -> int:
    """Returns the number of videos to hold at once. Raises ValueError."""
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; at least 1 is needed")
    return concurrency


class ManyVideos:
    """Scores an iterable of videos over one stream, and over a new one whenever the stream is lost."""

    def __init__(self, open_stream: Callable[[], VideoScoreStream], concurrency: int, retry: RetryPolicy) -> None:
        self._open_stream = open_stream
        self._concurrency = check_concurrency(concurrency)
        self._retry = retry

    def results(self, videos: Iterable[VideoToScore]) -> Iterator[VideoOutcome]:
        """Yields the outcome of every video. Raises the last error when the server stays away too long."""
        source = iter(videos)
        without_result: dict[str, VideoToScore] = {}
        attempt, last_result_at = 0, time.monotonic()
        while True:
            attempt += 1
            try:
                for outcome in self._one_stream(source, without_result):
                    attempt, last_result_at = 0, time.monotonic()
                    yield outcome
            except LikenessError as error:
                if not error.retryable or time.monotonic() - last_result_at > self._retry.give_up_after_s:
                    raise
                time.sleep(max(self._retry.wait_s(max(attempt, 1)), error.retry_after_s or 0.0))
            else:
                return

    def _one_stream(
        self, source: Iterator[VideoToScore], without_result: dict[str, VideoToScore]
    ) -> Iterator[VideoOutcome]:
        """Yields outcomes until all videos have one. `without_result` keeps those to send again."""
        places = threading.Semaphore(self._concurrency)
        with self._open_stream() as stream:
            sender = _Sender(stream, source, without_result, places)
            sender.start()
            try:
                for video_id, outcome in stream.results():
                    if isinstance(outcome, LikenessError) and outcome.retryable:
                        raise outcome
                    without_result.pop(video_id, None)
                    places.release()
                    yield video_id, outcome
            except LikenessError as error:
                raise sender.error or error from error
            finally:
                stream.cancel()
                places.release()  # so that a sender that waits for a place sees that the stream is over
                sender.join()


class _Sender(threading.Thread):
    """Sends the videos without a result, then the rest, and closes the stream."""

    def __init__(
        self,
        stream: VideoScoreStream,
        source: Iterator[VideoToScore],
        without_result: dict[str, VideoToScore],
        places: threading.Semaphore,
    ) -> None:
        super().__init__(name="reward-sender", daemon=True)
        self._stream = stream
        self._source = source
        self._without_result = without_result
        self._places = places
        self.error: BaseException | None = None

    def run(self) -> None:
        """Sends until the source ends or the stream does; an error of the source is kept for the other thread."""
        try:
            for video in list(self._without_result.values()):
                self._places.acquire()
                self._send(video)
            while True:
                self._places.acquire()
                video_or_none = next(self._source, None)
                if video_or_none is None:
                    break
                self._without_result[video_or_none.video_id] = video_or_none
                self._send(video_or_none)
            self._stream.close()
        except LikenessError:
            return  # the reader of the results sees the same error
        except BaseException as error:  # the source is the caller's code: its error belongs to the caller's thread
            self.error = error
            self._stream.cancel()

    def _send(self, video: VideoToScore) -> None:
        count, height, width = video.frames_rgb.shape[:3]
        self._stream.start_video(
            video.video_id, width, height, count, video.identity, reference_motion=video.reference_motion
        )
        self._stream.send_frames(video.video_id, 0, video.frames_rgb)
        self._stream.end_video(video.video_id)
