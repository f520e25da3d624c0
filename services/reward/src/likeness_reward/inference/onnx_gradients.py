"""The derivative of a recognizer, by onnxruntime: the network of `pack/gradient_network.py` in this process."""

import numpy as np
from numpy.typing import NDArray

from likeness_reward.errors import InferenceFailed
from likeness_reward.inference.onnxruntime import Provider, load_session
from likeness_reward.pack.gradient_network import gradient_network, run
from likeness_reward.pack.pack import Pack


class OnnxRecognizerGradient:
    """A RecognizerGradient in onnxruntime. Threads may share it."""

    def __init__(self, pack: Pack, *, threads: int, provider: Provider) -> None:
        """Differentiates the recognizer and loads the result. Raises InvalidPack or ProviderUnavailable."""
        self._name = f"the derivative of {pack.recognizer.path.name}"
        self._session = load_session(gradient_network(pack).model, threads, provider, self._name)

    def similarity_gradients(
        self, crops: NDArray[np.uint8], template: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See RecognizerGradient."""
        try:
            return run(self._session, crops, template)
        except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
            raise InferenceFailed(f"{self._name} failed on {len(crops)} crops: {error}") from error
