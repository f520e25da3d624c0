"""ArcFace (arXiv 1801.07698): aligned crops to unit embeddings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from likeness_reward.errors import InferenceFailed
from likeness_reward.inference.session import InferenceSession

BATCH_SIZE = 32
LEAST_NORM = 1e-6


class RecognizerConfig(BaseModel):
    """How crops enter the recognizer. Part of the fingerprint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_mean: float = 127.5
    """Subtracted from each channel."""
    input_std: float = Field(default=127.5, gt=0.0)
    """Divides each channel."""


class FaceRecognizer:
    """Turns aligned crops into unit embeddings."""

    def __init__(self, session: InferenceSession, config: RecognizerConfig) -> None:
        self._session = session
        self.config = config
        self.crop_size = session.input.shape[2] or 112
        self._batched = session.input.shape[0] is None

    def embedding_length(self) -> int:
        """Returns the length of an embedding, read from the network by running it on a black crop."""
        black = np.zeros((self.crop_size, self.crop_size, 3), np.uint8)
        return int(self._run([black]).shape[1])

    def embed(self, crops: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Returns unit embeddings float32 [N, D] of RGB crops uint8 [S, S, 3]; N > 0. Raises InferenceFailed."""
        step = BATCH_SIZE if self._batched else 1
        parts = [self._run(crops[start : start + step]) for start in range(0, len(crops), step)]
        return unit_embeddings(np.concatenate(parts))

    def _run(self, crops: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        raw = np.asarray(self._session.run(np.stack(crops))[0], np.float32)
        if raw.ndim != 2 or len(raw) != len(crops):
            raise InferenceFailed(f"the recognizer gave shape {list(raw.shape)} for {len(crops)} crops")
        return raw


def unit_embeddings(raw: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns rows [N, D] scaled to length 1. Raises InferenceFailed when one is not finite or has no length."""
    norms = np.linalg.norm(raw.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all() or (norms < LEAST_NORM).any():
        raise InferenceFailed("the recognizer gave an embedding that is not finite or has no length")
    return (raw / norms).astype(np.float32)
