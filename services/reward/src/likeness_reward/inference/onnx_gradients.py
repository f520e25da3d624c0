"""The derivative of a recognizer, by onnxruntime: the network of `pack/gradient_network.py` in this process."""

import numpy as np
from numpy.typing import NDArray

from likeness_reward.errors import InferenceFailed
from likeness_reward.inference.onnxruntime import Provider, load_session
from likeness_reward.inference.served_models import GRADIENTS, IMAGES, SIMILARITIES, TEMPLATES
from likeness_reward.pack.gradient_network import gradient_network
from likeness_reward.pack.pack import Pack


class OnnxRecognizerGradient:
    """A RecognizerGradient in onnxruntime. Threads may share it."""

    def __init__(self, pack: Pack, *, threads: int, provider: Provider) -> None:
        """Differentiates the recognizer and loads the result. Raises InvalidPack or ProviderUnavailable."""
        network = gradient_network(pack)
        self._name = pack.recognizer.path.name
        self._session = load_session(network.model, threads, provider, self._name)

    def similarity_gradients(
        self, crops: NDArray[np.uint8], template: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See RecognizerGradient."""
        templates = np.repeat(template[None].astype(np.float32), len(crops), axis=0)
        try:
            similarities, gradients = self._session.run(
                [SIMILARITIES, GRADIENTS], {IMAGES: np.ascontiguousarray(crops), TEMPLATES: templates}
            )
        except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
            message = f"the derivative of {self._name} failed on {len(crops)} crops: {error}"
            raise InferenceFailed(message, file=self._name) from error
        return similarities[:, 0], gradients
