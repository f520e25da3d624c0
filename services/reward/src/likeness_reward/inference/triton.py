"""Networks run by Triton: the models that `likeness-reward pack export-triton` writes."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult, model_config_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from likeness_reward.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InferenceServerUnavailable,
    InvalidRepository,
    LikenessError,
)
from likeness_reward.inference.call import CURRENT_CALL, MARGIN_S
from likeness_reward.inference.served_models import (
    DETECTOR,
    GRADIENT,
    GRADIENTS,
    IMAGES,
    RECOGNIZER,
    SIMILARITIES,
    TEMPLATES,
    ModelParameters,
)
from likeness_reward.inference.session import TensorSpec
from likeness_reward.inference.shared_memory import TIMEOUT_S, Region, RegionPool, SharedMemoryMode, open_pool

LARGEST_MESSAGE = 2**31 - 1
LONGEST_RECONNECT_MS = 2000
POLL_S = 0.2
POLL_TIMEOUT_S = 2.0
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", LARGEST_MESSAGE),
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
]
TRANSIENT = {f"StatusCode.{name}" for name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND")}
LOST_REGION = "Unable to find shared memory region"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputTensor:
    """A float32 output."""

    name: str
    row: tuple[int | None, ...]
    """Shape of one image's part; None where it depends on the size of the image."""

    def with_rows(self, count: int) -> "OutputTensor":
        """Returns the output for images that give `count` rows."""
        return OutputTensor(self.name, (count, *self.row[1:]))

    def shape(self, count: int) -> tuple[int, ...]:
        """Returns the shape for so many images."""
        assert None not in self.row  # with_rows has been asked
        return (count, *(size for size in self.row if size is not None))

    def byte_size(self, count: int) -> int:
        """Returns the size for so many images."""
        return math.prod(self.shape(count)) * np.dtype(np.float32).itemsize


class RegionLost(Exception):
    """Triton does not know a region of shared memory any more: it has been restarted."""


class TritonConnection:
    """A Triton server at HOST:PORT (gRPC)."""

    def __init__(self, url: str, *, timeout_s: float, shared_memory: SharedMemoryMode = "auto") -> None:
        """Connects when first used. `timeout_s` is the longest that one inference may take."""
        self.url = url
        self.timeout_s = timeout_s
        self.last_success_s = -math.inf
        """time.monotonic() of the last inference that succeeded."""
        self._mode = shared_memory
        self._pool: RegionPool | None = None
        self._client = InferenceServerClient(url, channel_args=CHANNEL_OPTIONS)
        self._sending = threading.Lock()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns once the models are ready, that of gradients too if it is being loaded.

        Raises InferenceServerUnavailable naming what is missing.
        """
        give_up_at = time.monotonic() + timeout_s
        while (missing := self._what_is_missing()) is not None:
            if time.monotonic() > give_up_at:
                raise InferenceServerUnavailable(f"Triton at {self.url}: {missing} after {timeout_s:g} s", url=self.url)
            time.sleep(POLL_S)
        self._pool = open_pool(self._client, self._mode)

    def _what_is_missing(self) -> str | None:
        try:
            for name in (DETECTOR, RECOGNIZER):
                if not self._client.is_model_ready(name, client_timeout=POLL_TIMEOUT_S):
                    return f"model {name} was not ready"
            if self._state_of_gradient() == "LOADING":
                return f"model {GRADIENT} was not ready"
        except InferenceServerException as error:
            return f"no answer ({error.message()})"
        return None

    def _state_of_gradient(self) -> str | None:
        index = self._client.get_model_repository_index(client_timeout=POLL_TIMEOUT_S)
        return next((model.state for model in index.models if model.name == GRADIENT), None)

    def has_gradient(self) -> bool:
        """Returns whether Triton has the recognizer with its derivative. Raises InferenceServerUnavailable."""
        try:
            return self._state_of_gradient() == "READY"
        except InferenceServerException as error:
            raise self.error_of(error, GRADIENT, POLL_TIMEOUT_S) from error

    @property
    def shares_memory(self) -> bool:
        """Whether images and outputs go through shared memory."""
        return self._pool is not None

    def model_config(self, name: str) -> model_config_pb2.ModelConfig:
        """Returns a model's configuration. Raises InferenceServerUnavailable."""
        try:
            return self._client.get_model_config(name, client_timeout=self.timeout_s).config
        except InferenceServerException as error:
            raise self.error_of(error, name, self.timeout_s) from error

    def infer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[OutputTensor]
    ) -> list[NDArray[Any]]:
        """Returns the outputs of a model for one batch, waiting no longer than the current call does.

        Args:
            inputs: by name, each with the batch as first axis, in C order.

        Raises DeadlineExceeded, InferenceServerUnavailable or InferenceFailed.
        """
        try:
            return self._infer(model, inputs, outputs)
        except RegionLost:
            if self._pool is not None:
                self._pool.clear()
        try:
            return self._infer(model, inputs, outputs)
        except RegionLost as error:
            raise InferenceServerUnavailable(f"Triton at {self.url}: {error}", url=self.url) from error

    def _infer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[OutputTensor]
    ) -> list[NDArray[Any]]:
        count = len(next(iter(inputs.values())))
        sizes = [values.nbytes for values in inputs.values()] + [output.byte_size(count) for output in outputs]
        region = self._take_region(model, sum(sizes))
        try:
            found = self._request(model, inputs, outputs, region, count)
        except BaseException:
            if region is not None:
                region.release()
            raise
        if region is not None and self._pool is not None:
            self._pool.give_back(region)
        self.last_success_s = time.monotonic()
        return found

    def _take_region(self, model: str, byte_size: int) -> Region | None:
        """Returns shared memory for a request, or None when bytes are to be sent."""
        if self._pool is None:
            return None
        try:
            timeout_s = min(TIMEOUT_S, self._time_left_s())
            return self._pool.take(byte_size, timeout_s)
        except (InferenceServerException, OSError) as error:
            if isinstance(error, InferenceServerException) and is_transient(error):
                raise self.error_of(error, model, timeout_s) from error
            if self._mode == "on":
                raise InferenceServerUnavailable(f"no shared memory with Triton at {self.url}: {error}") from error
            logger.warning("no shared memory with Triton any more, sending bytes: %s", error)
            self._pool = None
            return None

    def _request(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[OutputTensor],
        region: Region | None,
        count: int,
    ) -> list[NDArray[Any]]:
        given = [
            InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)) for name, values in inputs.items()
        ]
        requested = [InferRequestedOutput(output.name) for output in outputs]
        if region is None:
            for request_input, values in zip(given, inputs.values(), strict=True):
                request_input.set_data_from_numpy(values)
            result = self._wait(model, given, requested)
            return [checked(result, model, output, count) for output in outputs]
        offset = 0
        for request_input, values in zip(given, inputs.values(), strict=True):
            region.write(values, offset)
            request_input.set_shared_memory(region.name, values.nbytes, offset)
            offset += values.nbytes
        places: list[int] = []
        for request_output, output in zip(requested, outputs, strict=True):
            request_output.set_shared_memory(region.name, output.byte_size(count), offset)
            places.append(offset)
            offset += output.byte_size(count)
        result = self._wait(model, given, requested)
        for output in outputs:
            check_shape(result.get_output(output.name).shape, model, output, count)
        return [region.read(output.shape(count), place) for output, place in zip(outputs, places, strict=True)]

    def _time_left_s(self) -> float:
        """Returns how long the current call lets Triton work. Raises DeadlineExceeded when it has ended."""
        call = CURRENT_CALL.get()
        timeout_s = self.timeout_s if call is None else min(self.timeout_s, call.remaining_s)
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline of the call has passed")
        return timeout_s

    def _wait(self, model: str, inputs: list[InferInput], outputs: list[InferRequestedOutput]) -> InferResult:
        """Returns Triton's answer; gives up when the call ends."""
        call, timeout_s = CURRENT_CALL.get(), self._time_left_s()
        answers: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = queue.SimpleQueue()
        with self._sending:  # async_infer keeps its future in the client for a moment
            request = self._client.async_infer(
                model,
                inputs,
                lambda result, error: answers.put((result, error)),
                outputs=outputs,
                client_timeout=timeout_s,
            )
        with contextlib.nullcontext() if call is None else call.watched(request.cancel):
            result, error = answers.get()
        if error is not None:
            if LOST_REGION in error.message():
                raise RegionLost(error.message()) from error
            raise self.error_of(error, model, timeout_s) from error
        assert result is not None
        return result

    def error_of(self, error: InferenceServerException, model: str, timeout_s: float) -> LikenessError:
        """Returns what an error of Triton means to the caller."""
        call = CURRENT_CALL.get()
        if call is not None and call.remaining_s < MARGIN_S:
            return DeadlineExceeded(f"Triton at {self.url} did not answer for {model} before the call's deadline")
        where = f"Triton at {self.url}, model {model}"
        if error.status() == "StatusCode.DEADLINE_EXCEEDED":
            return InferenceServerUnavailable(f"{where}: no answer within {timeout_s:g} s", url=self.url, model=model)
        kind = InferenceServerUnavailable if is_transient(error) else InferenceFailed
        return kind(f"{where}: {error.status()}: {error.message()}", url=self.url, model=model)

    def close(self) -> None:
        """Releases the shared memory and the connection."""
        if self._pool is not None:
            self._pool.close()
        self._client.close()


class TritonSession:
    """One of the models on Triton that take images alone."""

    def __init__(
        self,
        connection: TritonConnection,
        model: str,
        rows_of: Callable[[int, tuple[int, int]], Sequence[int]] | None = None,
    ) -> None:
        """Reads the model's configuration. Raises InvalidRepository unless `pack export-triton` wrote it.

        A model that takes images of several sizes needs `rows_of`: how many rows each of its outputs has, from their
        number and the (width, height) of an image.
        """
        config = connection.model_config(model)
        self._connection, self._model = connection, model
        self._max_batch: int = config.max_batch_size
        self.parameters = parameters_of(config, model, connection.url)
        self._rows_of = rows_of
        self._input = TensorSpec(IMAGES, (None, *free_axes(config.input[0].dims)))
        self._outputs = [OutputTensor(output.name, free_axes(output.dims)) for output in config.output]

    @property
    def input(self) -> TensorSpec:
        """Its only input: uint8 RGB images [N, H, W, 3]."""
        return self._input

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs."""
        return tuple(TensorSpec(output.name, (None, *output.row)) for output in self._outputs)

    def run(self, images_rgb: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Returns all outputs for images uint8 [N, H, W, 3].

        Raises DeadlineExceeded, InferenceServerUnavailable or InferenceFailed.
        """
        images = np.ascontiguousarray(images_rgb)
        batches = [images[start : start + self._max_batch] for start in range(0, len(images), self._max_batch)]
        outputs = self._outputs_for((images.shape[2], images.shape[1]))
        parts = [self._connection.infer(self._model, {IMAGES: batch}, outputs) for batch in batches]
        return parts[0] if len(parts) == 1 else [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    def _outputs_for(self, size: tuple[int, int]) -> list[OutputTensor]:
        """Returns the outputs for images of `size` (width, height)."""
        if self._rows_of is None or self._input.shape[1] is not None:
            return self._outputs
        rows = self._rows_of(len(self._outputs), size)
        return [output.with_rows(count) for output, count in zip(self._outputs, rows, strict=True)]


def free_axes(dims: Sequence[int]) -> tuple[int | None, ...]:
    """Returns the sizes of config.pbtxt, None for an axis of any size."""
    return tuple(size if size > 0 else None for size in dims)


class TritonRecognizerGradient:
    """A RecognizerGradient in Triton. Threads may share it."""

    def __init__(self, connection: TritonConnection) -> None:
        """Reads the model's configuration. Raises InvalidRepository unless `pack export-triton` wrote it."""
        config = connection.model_config(GRADIENT)
        self._connection = connection
        self._max_batch: int = config.max_batch_size
        self.parameters = parameters_of(config, GRADIENT, connection.url)
        shapes = {output.name: tuple(output.dims) for output in config.output}
        self._outputs = [OutputTensor(name, shapes[name]) for name in (SIMILARITIES, GRADIENTS)]

    def similarity_gradients(
        self, crops: NDArray[np.uint8], template: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See RecognizerGradient. Also raises DeadlineExceeded or InferenceServerUnavailable."""
        parts = []
        for start in range(0, len(crops), self._max_batch):
            batch = np.ascontiguousarray(crops[start : start + self._max_batch])
            templates = np.repeat(template[None].astype(np.float32), len(batch), axis=0)
            parts.append(self._connection.infer(GRADIENT, {IMAGES: batch, TEMPLATES: templates}, self._outputs))
        similarities, gradients = (np.concatenate(outputs) for outputs in zip(*parts, strict=True))
        return similarities[:, 0], gradients


def parameters_of(config: model_config_pb2.ModelConfig, model: str, url: str) -> ModelParameters:
    """Returns what the export wrote of a model. Raises InvalidRepository when it did not write this one."""
    values = {key: value.string_value for key, value in config.parameters.items()}
    try:
        return ModelParameters.model_validate(values)
    except ValidationError as error:
        raise InvalidRepository(
            f"model {model} on Triton at {url} was not written by `likeness-reward pack export-triton`: "
            f"parameter {error.errors()[0]['loc'][0]} is missing",
            url=url,
            model=model,
        ) from error


def checked(result: InferResult, model: str, output: OutputTensor, count: int) -> NDArray[Any]:
    """Returns an output sent as bytes. Raises InferenceFailed when it is missing or has another shape."""
    found = result.as_numpy(output.name)
    check_shape(() if found is None else found.shape, model, output, count)
    assert found is not None
    return found


def check_shape(found: Sequence[int], model: str, output: OutputTensor, count: int) -> None:
    """Raises InferenceFailed when the output for `count` images has another shape than it should."""
    if tuple(found) != output.shape(count):
        raise InferenceFailed(f"model {model} gave {output.name} {list(found)}, expected {list(output.shape(count))}")


def is_transient(error: InferenceServerException) -> bool:
    """Returns whether a later try may succeed: Triton is away, starting, stopping or full."""
    return error.status() in TRANSIENT
