"""The asynchronous line to the reward service: frames leave while the next video is sampled, and nothing is lost.

A group of videos is one stream. What was sent is kept until its result has come, so that a connection that breaks is
opened again, with exponential backoff, and only the videos that lack a result are sent once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from likeness_reward.client import RewardClient
from likeness_reward.credentials import client_keys, read_token
from likeness_reward.domain import (
    GradientEncoding,
    IdentityTemplate,
    Limits,
    ScoreOptions,
    ServerInfo,
    VideoMotion,
    VideoReward,
)
from likeness_reward.errors import InvalidCredentials, LikenessError
from likeness_reward.video_stream import VideoScoreStream
from likeness_trainer.errors import RewardRejectedError, RewardUnavailableError
from likeness_trainer.patience import TRANSIENT_CODES, Patience

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RewardConfig(BaseModel):
    """Where the reward comes from, and how long to wait for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = "localhost:50051"
    """HOST:PORT of the reward server, or several with commas between them."""
    token_file: str | None = None
    """File with the bearer token."""
    tls: bool = False
    """Whether the connection is a TLS one; tls_ca and tls_cert imply it."""
    tls_ca: str | None = None
    """File (PEM) with the roots that the server's certificate is checked against; default those that gRPC brings."""
    tls_cert: str | None = None
    """File (PEM) with the trainer's own certificate, for servers that ask for one."""
    tls_key: str | None = None
    """File (PEM) with the private key of tls_cert."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Time in which the server must answer when the run starts."""
    deadline_s: float = Field(600.0, gt=0)
    """Deadline of one call or stream. A stream stays open while its group is sampled."""
    give_up_after_s: float = Field(300.0, gt=0)
    """Time without an answer after which the run stops, with a checkpoint."""
    first_backoff_s: float = Field(0.2, gt=0)
    """Pause before the first new try; doubles with every further one, up to 10 seconds."""
    video_retries: int = Field(2, ge=0)
    """New tries of a video whose own scoring failed; then its group is dropped and counted."""
    no_face_value: float = Field(0.0, ge=-1, le=1)
    """Score of a frame without a usable face."""
    min_face_pixels: int = Field(32, ge=1)
    """Faces narrower than this do not count."""
    gradient_encoding: GradientEncoding = "float16"
    """How gradients of the reward cross the wire, where the algorithm needs them."""
    expected_fingerprint: str | None = None
    """Refuse a server whose models have another fingerprint."""

    def open_client(self) -> RewardClient:
        """Returns a client; it connects when first used. Raises RewardRejectedError naming a bad key or token file."""
        names = (self.tls_ca, self.tls_cert, self.tls_key)
        ca, cert, key = (Path(name) if name is not None else None for name in names)
        try:
            token = read_token(Path(self.token_file)) if self.token_file is not None else None
            tls = client_keys(self.tls, ca, cert, key)
            return RewardClient(self.endpoint, timeout_s=self.deadline_s, token=token, tls=tls)
        except InvalidCredentials as error:
            raise RewardRejectedError(f"reward: {error.message}") from error

    def score_options(self) -> ScoreOptions:
        """Returns the options that go with every video."""
        return ScoreOptions(no_face_value=self.no_face_value, min_face_pixels=self.min_face_pixels, include_frames=True)


class GroupDroppedError(Exception):
    """A video of the group could not be scored although the server answered; the group is left out of the update."""


@dataclass
class _Video:
    width: int
    height: int
    num_frames: int
    chunks: list[tuple[int, NDArray[np.uint8]]] = field(default_factory=list)
    frames_kept: int = 0
    result: VideoReward | None = None
    failures: int = 0

    @property
    def complete(self) -> bool:
        return self.frames_kept == self.num_frames


class RewardLink:
    """The client side of one run: one connection, one stream a group."""

    def __init__(self, config: RewardConfig, measures_motion: bool = False) -> None:
        self.config = config
        self.measures_motion = measures_motion
        self._client = config.open_client()
        self.fingerprint = ""
        self._limits: Limits | None = None

    def connect(self) -> ServerInfo:
        """Returns what the server says of itself.

        Raises:
            RewardUnavailableError: no answer within connect_timeout_s; names the endpoint and what to do.
            RewardRejectedError: the server has other models than the recipe expects.
        """
        try:
            info = self._client.wait_until_ready(self.config.connect_timeout_s)
        except LikenessError as error:
            if error.code not in TRANSIENT_CODES:
                raise RewardRejectedError(f"the reward server at {self.config.endpoint} refused: {error}") from error
            raise RewardUnavailableError(
                f"no reward server answers at {self.config.endpoint} within {self.config.connect_timeout_s:g} s. "
                "Start one with `likeness-reward serve --pack DIR`, or set reward.endpoint"
            ) from error
        expected = self.config.expected_fingerprint
        if expected is not None and info.model_fingerprint != expected:
            raise RewardRejectedError(
                f"the reward server at {self.config.endpoint} has models {info.model_fingerprint}; "
                f"reward.expected_fingerprint is {expected}"
            )
        self.fingerprint = info.model_fingerprint
        self._limits = info.limits
        return info

    @property
    def limits(self) -> Limits:
        """What the server accepts; known once connected."""
        if self._limits is None:
            raise RuntimeError("connect first")
        return self._limits

    def require_capacity(self, branch_batch: int) -> None:
        """Raises RewardRejectedError when the server takes fewer videos at once than are sampled together."""
        if self.limits.max_videos_in_flight < branch_batch:
            raise RewardRejectedError(
                f"algorithm.branch_batch is {branch_batch}, but the reward server at {self.config.endpoint} takes "
                f"{self.limits.max_videos_in_flight} videos of a stream at once"
            )

    def require_gradients(self, server: ServerInfo) -> None:
        """Raises RewardRejectedError when the server cannot send gradients of the reward."""
        if not server.has_crop_gradients:
            raise RewardRejectedError(
                f"the reward server at {self.config.endpoint} sends no gradients of the reward; its log says why. With "
                "Triton, export the pack with --gradients; or set algorithm.name=policy_gradient"
            )

    def embed_identity(self, images_rgb: list[NDArray[np.uint8]], what: str) -> IdentityTemplate:
        """Returns the template of a person from frames, uint8 RGB [H, W, 3]; waits out a server that is away.

        Raises:
            RewardRejectedError: the server cannot embed them, for example because no frame shows a face; names `what`.
        """
        most = min(len(images_rgb), self.limits.max_images)
        chosen = [images_rgb[index] for index in np.linspace(0, len(images_rgb) - 1, most).round().astype(int)]
        return self._ask(lambda: self._client.embed_identity(chosen), f"{what}: no identity could be embedded")

    def measure_motion(self, clip_rgb: NDArray[np.uint8], identity: IdentityTemplate, what: str) -> VideoMotion | None:
        """Returns how much a clip, uint8 RGB [T, H, W, 3], moves, which sampled videos are compared with.

        None where the link does not measure motion. Waits and raises like `embed_identity`.
        """
        if not self.measures_motion:
            return None
        options = self.config.score_options()
        return self._ask(
            lambda: self._client.score(clip_rgb, identity, options), f"{what}: its motion could not be measured"
        ).motion

    def _ask(self, call: Callable[[], T], fault: str) -> T:
        """Returns the server's answer; raises RewardRejectedError that begins with `fault` where it is final."""
        patience = Patience(self.config)
        while True:
            try:
                return call()
            except LikenessError as error:
                if error.code not in TRANSIENT_CODES:
                    raise RewardRejectedError(f"{fault}: {error}") from error
                patience.wait_after(error)

    def open_group(
        self,
        identity: IdentityTemplate,
        num_videos: int,
        shape: tuple[int, int, int],
        options: ScoreOptions | None = None,
        reference_motion: VideoMotion | None = None,
    ) -> GroupScoring:
        """Returns the line of one group of videos of shape (num_frames, height, width).

        Args:
            options: those of the recipe when not given.
            reference_motion: what the videos' motion is compared with; their rewards then have that component too.
        """
        options = options or self.config.score_options()
        return GroupScoring(self, identity, num_videos, shape, options, reference_motion)

    def open_stream(self, identity: IdentityTemplate, options: ScoreOptions) -> VideoScoreStream:
        """Returns a stream that scores against one person."""
        return self._client.open_stream(
            options,
            identity=identity,
            deadline_s=self.config.deadline_s,
            expected_fingerprint=self.fingerprint or None,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


class GroupScoring:
    """Scores one group: `put` takes frames as they are decoded, `results` waits for every reward.

    A thread of its own owns the connection. `put` only appends, so sampling never waits for the network; what is held
    is at most the frames of one group.
    """

    def __init__(
        self,
        link: RewardLink,
        identity: IdentityTemplate,
        num_videos: int,
        shape: tuple[int, int, int],
        options: ScoreOptions,
        reference_motion: VideoMotion | None,
    ) -> None:
        num_frames, height, width = shape
        self.reference_motion = reference_motion
        self._options = options
        self._link = link
        self._identity = identity
        self._videos = [_Video(width, height, num_frames) for _ in range(num_videos)]
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._abandoned = False
        self._last_frame_at = self._finished_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="reward-group", daemon=True)
        self._thread.start()

    def put(self, sample: int, first_frame: int, frames_rgb: NDArray[np.uint8]) -> None:
        """Takes frames uint8 RGB [t, H, W, 3] of one video, in order."""
        with self._changed:
            video = self._videos[sample]
            video.chunks.append((first_frame, frames_rgb))
            video.frames_kept += len(frames_rgb)
            self._last_frame_at = time.monotonic()
            self._changed.notify_all()

    def results(self) -> list[VideoReward]:
        """Returns one reward a video, in the order of the group.

        Raises:
            GroupDroppedError: a video could not be scored.
            RewardUnavailableError, RewardRejectedError: see `Patience`.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return [video.result for video in self._videos if video.result is not None]

    @property
    def latency_s(self) -> float:
        """Seconds from the group's last frame to its last result; known once `results` has returned."""
        return max(0.0, self._finished_at - self._last_frame_at)

    def abandon(self) -> None:
        """Stops the thread; the group's results are no longer wanted."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _run(self) -> None:
        patience = Patience(self._link.config)
        try:
            while self._unfinished() and not self._abandoned:
                try:
                    _Attempt(self, self._link.open_stream(self._identity, self._options), patience).run()
                except LikenessError as error:
                    patience.wait_after(error)
        except Exception as error:  # carried to the thread that asks for the results
            self._failure = error
        self._finished_at = time.monotonic()

    def _unfinished(self) -> list[int]:
        return [index for index, video in enumerate(self._videos) if video.result is None]


class _Attempt:
    """One stream: sends every video without a result, and takes results until none is missing or the stream breaks."""

    def __init__(self, group: GroupScoring, stream: VideoScoreStream, patience: Patience) -> None:
        self._group = group
        self._stream = stream
        self._patience = patience
        self._error: LikenessError | None = None
        self._over = False

    def run(self) -> None:
        receiver = threading.Thread(target=self._receive, name="reward-results", daemon=True)
        receiver.start()
        try:
            self._send()
            self._stream.close()
            if self._group._abandoned:
                self._stream.cancel()
        except LikenessError as error:
            self._error = self._error or error
            self._stream.cancel()
        receiver.join()
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        """Sends what is there, interleaved in the order in which frames arrive, until every video is out."""
        sent: dict[int, int] = {}
        due = self._group._unfinished()
        while any(sent.get(index, -1) < self._group._videos[index].num_frames for index in due):
            ready = self._wait_for_frames(due, sent)
            if ready is None:
                return
            index, position, frames = ready
            video, name = self._group._videos[index], str(index)
            if index not in sent:
                motion = self._group.reference_motion
                self._stream.start_video(name, video.width, video.height, video.num_frames, reference_motion=motion)
            self._stream.send_frames(name, position, frames)
            sent[index] = position + len(frames)
            if sent[index] == video.num_frames:
                self._stream.end_video(name)

    def _wait_for_frames(self, due: list[int], sent: dict[int, int]) -> tuple[int, int, NDArray[np.uint8]] | None:
        """Returns (video, first frame, frames) to send next, or None when the attempt is over."""
        with self._group._changed:
            while True:
                if self._over or self._group._abandoned:
                    return None
                for index in due:
                    position = sent.get(index, 0)
                    chunk = next((c for first, c in self._group._videos[index].chunks if first == position), None)
                    if chunk is None or position >= self._group._videos[index].num_frames:
                        continue
                    return index, position, chunk
                self._group._changed.wait()

    def _receive(self) -> None:
        try:
            for name, outcome in self._stream.results():
                self._patience.progress()
                self._take(int(name), outcome)
        except LikenessError as error:
            self._error = error
        finally:
            with self._group._changed:
                self._over = True
                self._group._changed.notify_all()

    def _take(self, index: int, outcome: VideoReward | LikenessError) -> None:
        with self._group._changed:
            video = self._group._videos[index]
            if isinstance(outcome, LikenessError):
                video.failures += 1
                logger.warning("video %d of a group was not scored: %s", index, outcome)
                if video.failures > self._group._link.config.video_retries:
                    self._group._failure = GroupDroppedError(f"video {index} was not scored: {outcome}")
                    self._group._abandoned = True
            else:
                video.result = outcome
                video.chunks.clear()
            self._group._changed.notify_all()
