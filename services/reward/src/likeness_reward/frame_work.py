"""One batch of frames on the server: decoded and scored by a thread, and counted."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor

from likeness_reward.domain import FrameScore, IdentityTemplate, ScoreOptions
from likeness_reward.embedded import FaceScorer
from likeness_reward.frames import FrameReader
from likeness_reward.inference.call import CURRENT_CALL
from likeness_reward.metrics import ServerMetrics


class FrameWork:
    """Hands batches of frames to the threads that score them."""

    def __init__(self, scorer: FaceScorer, executor: Executor, metrics: ServerMetrics) -> None:
        self._scorer = scorer
        self._executor = executor
        self._metrics = metrics

    async def score(
        self,
        reader: FrameReader,
        encoded: Sequence[bytes],
        first_index: int,
        identity: IdentityTemplate,
        options: ScoreOptions,
    ) -> list[FrameScore]:
        """Returns the scores of consecutive frames as they came over the wire.

        Raises InvalidVideo, InvalidImage or InferenceFailed.
        """
        observe, submitted = self._metrics.observe_stage, time.perf_counter()

        def work() -> list[FrameScore]:
            began = time.perf_counter()
            observe("queue", began - submitted)
            frames = [reader.read(first_index + offset, data) for offset, data in enumerate(encoded)]
            observe("decode", time.perf_counter() - began)
            return self._scorer.score_frames(frames, first_index, identity, options)

        scores = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._metrics.observe_frames(scores)
        call = CURRENT_CALL.get()
        if call is not None:
            call.frame_count += len(scores)
        return scores
