"""The derivative of a recognizer whose operators `pack/vector_jacobian.py` has no rules for, by torch.

Needs the [gradients] extra; the only module here that imports torch.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx2torch import convert

from likeness_reward.errors import InferenceFailed, InvalidPack
from likeness_reward.face.recognizer import LEAST_NORM, RecognizerConfig


class TorchRecognizerGradient:
    """A RecognizerGradient in torch. Threads may share it."""

    def __init__(self, path: Path, config: RecognizerConfig, *, batched: bool, device: str = "cpu") -> None:
        """Loads the network. Raises InvalidPack when its graph has an operator that cannot be differentiated."""
        self._config = config
        self._batched = batched
        self._device = torch.device(device)
        try:
            network = convert(onnx.load(str(path)))
        except (NotImplementedError, ValueError, KeyError) as error:
            raise InvalidPack(f"{path.name} cannot be differentiated: {error}", file=path.name) from error
        self._network = network.eval().requires_grad_(False).to(self._device)

    def similarity_gradients(
        self, crops: NDArray[np.uint8], template: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See RecognizerGradient. Raises InferenceFailed."""
        images = self._input(crops).requires_grad_()
        with torch.enable_grad():
            similarities = self._unit(images) @ torch.from_numpy(template).to(self._device)
            (gradient,) = torch.autograd.grad(similarities.sum(), images)
        scaled = gradient * (255.0 / self._config.input_std)
        return similarities.detach().cpu().numpy(), scaled.cpu().numpy()

    def _input(self, crops: NDArray[np.uint8]) -> torch.Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(crops)).to(self._device).permute(0, 3, 1, 2).float()
        return (pixels - self._config.input_mean) / self._config.input_std

    def _unit(self, images: torch.Tensor) -> torch.Tensor:
        raw = self._network(images) if self._batched else torch.cat([self._network(image) for image in images.split(1)])
        norms = raw.norm(dim=1, keepdim=True)
        if not torch.isfinite(norms).all() or bool((norms < LEAST_NORM).any()):
            raise InferenceFailed("the recognizer gave an embedding that is not finite or has no length")
        return raw / norms
