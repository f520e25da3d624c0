"""Networks run in this process by onnxruntime."""

from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from likeness_reward.errors import InferenceFailed, InvalidPack, ProviderUnavailable
from likeness_reward.inference.session import TensorSpec

Provider = Literal["cpu", "cuda"]
PROVIDER_NAMES: dict[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
SEVERITY_ERROR = 3


class OnnxRuntimeSession:
    """One ONNX file in onnxruntime, on the provider asked for and on no other.

    The network takes images [N, 3, H, W] as (x - mean) / std.
    """

    def __init__(self, path: Path, *, mean: float, std: float, threads: int = 1, provider: Provider = "cpu") -> None:
        """Loads the network. Raises InvalidPack (unreadable) or ProviderUnavailable (another provider is in use)."""
        self._mean, self._std = mean, std
        self._session = load_session(path, threads, provider)
        self._path = path
        network_input, *others = [tensor_spec(value) for value in self._session.get_inputs()]
        if others:
            raise InvalidPack(f"{path.name}: expected one input, found {1 + len(others)}", file=path.name)
        batch, channels, height, width = network_input.shape
        self._input = TensorSpec(network_input.name, (batch, height, width, channels))
        self._outputs = tuple(tensor_spec(value) for value in self._session.get_outputs())

    @property
    def provider(self) -> str:
        """The execution provider in use, as onnxruntime names it."""
        return str(self._session.get_providers()[0])

    @property
    def input(self) -> TensorSpec:
        """Its only input."""
        return self._input

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs."""
        return self._outputs

    def run(self, images_rgb: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Returns all outputs for images uint8 [N, H, W, 3]. Raises InferenceFailed naming the file and the shape."""
        images = normalized(images_rgb, self._mean, self._std)
        try:
            outputs: list[NDArray[np.float32]] = self._session.run(None, {self._input.name: images})
        except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
            shape = "x".join(map(str, images.shape))
            raise InferenceFailed(f"{self._path.name} failed on {shape}: {error}", file=self._path.name) from error
        return outputs


def normalized(images_rgb: NDArray[np.uint8], mean: float, std: float) -> NDArray[np.float32]:
    """Returns (x - mean) / std of images uint8 [N, H, W, 3] as float32 [N, 3, H, W], as cv2.dnn.blobFromImages does.

    The numbers are the same to the last bit. Working plane by plane takes about a tenth of blobFromImages' time.
    """
    count, height, width, channels = images_rgb.shape
    planes = np.empty((count, channels, height, width), np.float32)
    scale = np.float32(1.0 / std)
    for image, target in zip(images_rgb, planes, strict=True):
        for source, plane in zip(cv2.split(image), target, strict=True):
            np.subtract(source, np.float32(mean), out=plane, dtype=np.float32)
            np.multiply(plane, scale, out=plane)
    return planes


def load_session(
    source: Path | bytes, threads: int, provider: Provider, name: str | None = None
) -> onnxruntime.InferenceSession:
    """Returns the onnxruntime session of a file, or of the bytes of one. Raises InvalidPack or ProviderUnavailable.

    Args:
        name: what messages call it; a file's name when not given.
    """
    name = name or (source.name if isinstance(source, Path) else "the network")
    wanted = PROVIDER_NAMES[provider]
    available = onnxruntime.get_available_providers()
    if wanted not in available:
        raise ProviderUnavailable(f"provider {wanted} is not available; there are {', '.join(available)}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = SEVERITY_ERROR
    try:
        model = str(source) if isinstance(source, Path) else source
        session = onnxruntime.InferenceSession(model, options, providers=[wanted])
    except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
        where = source if isinstance(source, Path) else name
        raise InvalidPack(f"cannot load {where}: {error}", file=name) from error
    in_use = session.get_providers()
    if in_use[0] != wanted:
        raise ProviderUnavailable(f"{name}: provider {wanted} was asked for, {in_use[0]} is in use")
    return session


def tensor_spec(value: onnxruntime.NodeArg) -> TensorSpec:
    """Returns name and shape of an onnxruntime input or output; symbolic and non-positive axes are free."""
    return TensorSpec(value.name, tuple(size if isinstance(size, int) and size > 0 else None for size in value.shape))
