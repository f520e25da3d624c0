"""How long the trainer waits for a reward server that is away."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import grpc

from likeness_reward.errors import LikenessError
from likeness_trainer.errors import RewardRejectedError, RewardUnavailableError

if TYPE_CHECKING:
    from likeness_trainer.reward_link import RewardConfig

logger = logging.getLogger(__name__)

TRANSIENT_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED, grpc.StatusCode.UNKNOWN,
    }
)  # fmt: skip
"""Codes after which sending the same video again may succeed."""


class Patience:
    """Exponential backoff between tries that gives up after the configured time without progress."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._since: float | None = None
        self._pause = config.first_backoff_s

    def progress(self) -> None:
        """Notes that the server answered: the clock and the pauses start again at the next failure."""
        self._since = None
        self._pause = self._config.first_backoff_s

    def wait_after(self, error: LikenessError) -> None:
        """Sleeps before the next try; raises when the error is final or patience is over."""
        endpoint = self._config.endpoint
        if error.code not in TRANSIENT_CODES:
            raise RewardRejectedError(f"the reward server at {endpoint} refused: {error}") from error
        if self._since is None:
            self._since = time.monotonic()
        away = time.monotonic() - self._since
        if away + self._pause > self._config.give_up_after_s:
            raise RewardUnavailableError(
                f"the reward server at {endpoint} has not answered for {away:.0f} s ({error}); "
                f"reward.give_up_after_s is {self._config.give_up_after_s:g}. Resume with --resume"
            ) from error
        logger.warning("reward server at %s is away (%s); trying again in %.1f s", endpoint, error, self._pause)
        time.sleep(self._pause)
        self._pause = min(self._pause * 2.0, 10.0)
