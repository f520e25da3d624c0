"""The two ways to score from the command line, behind one Protocol: a server, or a pack in this process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import typer
from numpy.typing import NDArray

from likeness_reward.client import RewardClient
from likeness_reward.credentials import client_keys, read_token
from likeness_reward.domain import FaceObservation, IdentityTemplate, Pooling, ScoreOptions, VideoReward
from likeness_reward.extras import require_embedded_extra
from likeness_reward.many import VideoToScore
from likeness_reward.video_stream import VideoOutcome
from likeness_reward.videos import read_video

MOST_IDENTITY_FRAMES = 8
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0


class Scorer(Protocol):
    """What RewardClient and EmbeddedScorer have in common."""

    def embed_identity_with_observations(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean"
    ) -> tuple[IdentityTemplate, list[FaceObservation]]:
        """Returns the identity of images, and what was seen in each."""
        ...

    def score(
        self, frames_rgb: NDArray[np.uint8], identity: IdentityTemplate, options: ScoreOptions | None = None
    ) -> VideoReward:
        """Returns the reward of a video uint8 [T, H, W, 3]."""
        ...

    def score_many(
        self, videos: Iterable[VideoToScore], options: ScoreOptions | None = None, *, concurrency: int = 4
    ) -> Iterator[VideoOutcome]:
        """Yields (video_id, reward or that video's error) of every video, in order of completion."""
        ...


@dataclass(frozen=True)
class Connection:
    """How the command line reaches a server."""

    endpoint: str
    token: str | None
    token_file: Path | None
    tls: bool
    """Whether to speak TLS although no file below is given."""
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None

    def open(self, timeout_s: float = TIMEOUT_S) -> RewardClient:
        """Returns a client whose calls have this deadline. Raises InvalidCredentials."""
        token = read_token(self.token_file) if self.token_file is not None else self.token
        tls = client_keys(self.tls, self.tls_ca, self.tls_cert, self.tls_key)
        return RewardClient(self.endpoint, timeout_s=timeout_s, token=token, tls=tls)


def open_scorer(
    connection: Connection | None,
    pack: Path | None,
    detector_size: tuple[int, int] | None,
    letterbox: Literal["fit", "full"] | None,
    threads: int,
) -> Scorer:
    """Returns a client, or a scorer of `pack`. Raises typer.BadParameter unless exactly one of them is given."""
    if (connection is None) == (pack is None):
        raise typer.BadParameter("give exactly one of --endpoint HOST:PORT and --pack DIR")
    if connection is not None:
        if detector_size is not None or letterbox is not None:
            option = "--detector-size" if detector_size is not None else "--letterbox"
            raise typer.BadParameter(f"{option} belongs to --pack; a server has its own")
        client = connection.open()
        client.wait_until_ready(CONNECT_TIMEOUT_S)
        return client
    require_embedded_extra("--pack")
    from likeness_reward.embedded import EmbeddedScorer

    assert pack is not None
    return EmbeddedScorer(pack, detector_size=detector_size, letterbox=letterbox, threads=threads)


def identity_from_path(scorer: Scorer, path: Path) -> IdentityTemplate:
    """Returns the identity in a template file, a photo, or evenly spread frames of a video or folder.

    Raises InvalidTemplate, UnreadableVideo or NoFaceInImages.
    """
    if path.suffix.lower() == ".json":
        return IdentityTemplate.load(path)
    frames = read_video(path)
    chosen = np.unique(np.linspace(0, len(frames) - 1, MOST_IDENTITY_FRAMES).round().astype(int))
    return scorer.embed_identity_with_observations([frames[index] for index in chosen])[0]
