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
