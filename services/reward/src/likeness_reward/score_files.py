"""Scores video files: the next is read while others are scored, and results come in the order of the files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from likeness_reward.domain import IdentityTemplate, ScoreOptions, VideoMotion, VideoReward
from likeness_reward.errors import LikenessError
from likeness_reward.many import VideoToScore
from likeness_reward.scorers import Scorer
from likeness_reward.videos import read_video

FileOutcome = tuple[Path, VideoReward | LikenessError]


def score_files(
    scorer: Scorer,
    paths: Sequence[Path],
    identity: IdentityTemplate,
    options: ScoreOptions,
    *,
    concurrency: int,
    reference_motion: VideoMotion | None = None,
) -> Iterator[FileOutcome]:
    """Yields (path, reward or that file's error) in the order given; `concurrency` files are scored at once.

    `reference_motion` is what the motion of each is measured by. Raises the LikenessError of a server that stays away.
    """
    unreadable: dict[int, LikenessError] = {}

    def readable() -> Iterator[VideoToScore]:
        for position, path in enumerate(paths):
            try:
                yield VideoToScore(str(position), read_video(path), identity, reference_motion)
            except LikenessError as error:
                unreadable[position] = error

    scored: dict[int, VideoReward | LikenessError] = {}
    following = 0
    for name, outcome in scorer.score_many(readable(), options, concurrency=concurrency):
        scored[int(name)] = outcome
        while following in scored or following in unreadable:
            yield paths[following], unreadable[following] if following in unreadable else scored.pop(following)
            following += 1
    for position in range(following, len(paths)):
        yield paths[position], unreadable[position]
