"""The Protocol behind which a network runs."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of a network's input or output."""

    name: str
    shape: tuple[int | None, ...]
    """None for an axis that is free."""

    def __str__(self) -> str:
        return f"{self.name} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"


class RecognizerGradient(Protocol):
    """A recognizer that is differentiated; may be asked by several threads at once."""

    def similarity_gradients(
        self, crops: NDArray[np.uint8], template: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the similarities float32 [N] and their gradients float32 [N, 3, S, S] by pixels scaled to 0..1.

        Whether they are finite, and the similarities those of the network that scores, is for the caller to check.

        Args:
            crops: uint8 RGB [N, S, S, 3].
            template: float32 [D], not unit length.

        Raises:
            InferenceFailed: the network could not be run.
        """
        ...


class InferenceSession(Protocol):
    """A network that may be run by several threads at once."""

    @property
    def input(self) -> TensorSpec:
        """Its only input: uint8 RGB images [N, H, W, 3]."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs, in the order in which `run` returns them."""
        ...

    def run(self, images_rgb: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Returns all outputs for images uint8 [N, H, W, 3]; normalising them is the session's work.

        Raises InferenceFailed.
        """
        ...
