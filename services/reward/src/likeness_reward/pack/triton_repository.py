"""Writes a pack as a Triton model repository: two models that take batches of uint8 images, or three.

    OUT/face_detector/config.pbtxt     OUT/face_detector/1/model.onnx
    OUT/face_recognizer/config.pbtxt   OUT/face_recognizer/1/model.onnx
    OUT/face_gradient/config.pbtxt     OUT/face_gradient/1/model.onnx     the recognizer with its derivative, if wanted

With the runtime "python" a model.py beside each model.onnx runs it by onnxruntime in Triton's python backend.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from likeness_reward.errors import InvalidRepository
from likeness_reward.face.detector import DetectorConfig
from likeness_reward.face.recognizer import RecognizerConfig
from likeness_reward.inference.served_models import DETECTOR, GRADIENT, IMAGES, RECOGNIZER, TEMPLATES, ModelParameters
from likeness_reward.pack import triton_python_model
from likeness_reward.pack.batching import BatchedNetwork, Precision, batched_detector, batched_recognizer
from likeness_reward.pack.gradient_network import GradientNetwork, gradient_network
from likeness_reward.pack.pack import Network, Pack, fingerprint_of, network_hash

Device = Literal["cpu", "cuda"]
Runtime = Literal["onnxruntime", "python"]

MODEL_FILE = "model.onnx"
VERSION_FOLDER = "1"
FREE = -1
"""What config.pbtxt says for an axis of any size."""
TENSORRT_WORKSPACE_BYTES = 2**30


@dataclass(frozen=True)
class ExportOptions:
    """How Triton runs the models."""

    device: Device = "cpu"
    max_batch: int = 16
    """Most images in one run of a network."""
    precision: Precision = "fp32"
    instances: int = 1
    """Copies of each network: on each GPU, or on the CPU."""
    threads: int = 1
    """Threads inside one run on the CPU."""
    tensorrt: bool = False
    """Whether onnxruntime hands the networks to TensorRT."""
    runtime: Runtime = "onnxruntime"
    gradients: bool = False
    """Whether to write the recognizer with its derivative too. It never runs by TensorRT, which rounds."""

    def __post_init__(self) -> None:
        if self.tensorrt and (self.device, self.runtime) != ("cuda", "onnxruntime"):
            raise InvalidRepository(
                f"TensorRT was asked for with device {self.device} and runtime {self.runtime}; "
                "it needs device cuda and runtime onnxruntime"
            )
        if self.gradients and self.precision != "fp32":
            raise InvalidRepository(
                f"gradients were asked for with precision {self.precision}; they are those of scores in fp32"
            )
        for name in ("max_batch", "instances", "threads"):
            if getattr(self, name) < 1:
                raise InvalidRepository(f"{name} is {getattr(self, name)}; at least 1 is allowed")


@dataclass(frozen=True)
class ExportedModel:
    """One network as it was written."""

    name: str
    source: Path
    input: str
    outputs: tuple[str, ...]
    largest_difference: float
    """Between a batch of the exported network and single images through the pack's; of similarities for gradients."""


@dataclass(frozen=True)
class ExportedRepository:
    """What was written, for people to read."""

    directory: Path
    models: tuple[ExportedModel, ...]
    fingerprint: str
    """Fingerprint of rewards that these models give."""


def export_repository(pack: Pack, directory: Path, options: ExportOptions) -> ExportedRepository:
    """Writes the whole repository or nothing; returns what was written.

    `directory` must not exist or be empty. Raises InvalidRepository or InvalidPack.
    """
    check_target(directory)
    networks: dict[str, tuple[Network, BatchedNetwork, DetectorConfig | RecognizerConfig]] = {
        DETECTOR: (pack.detector, batched_detector(pack, options.precision), pack.detector_config),
        RECOGNIZER: (pack.recognizer, batched_recognizer(pack, options.precision), pack.recognizer_config),
    }
    with written_at_once(directory) as folder:
        for name, (source, network, config) in networks.items():
            parameters = parameters_of(pack, source, config, options.precision)
            write_model(folder / name, network, model_config(name, network, parameters, options), options.runtime)
        if options.gradients:
            gradient = gradient_network(pack)
            parameters = parameters_of(pack, pack.recognizer, pack.recognizer_config, options.precision)
            without_tensorrt = model_config(GRADIENT, gradient, parameters, replace(options, tensorrt=False))
            write_model(folder / GRADIENT, gradient, without_tensorrt, options.runtime)
    models = [exported_model(name, source, network) for name, (source, network, _) in networks.items()]
    if options.gradients:
        models.append(exported_model(GRADIENT, pack.recognizer, gradient))
    hashes = [hash_at(source, options.precision) for source in (pack.detector, pack.recognizer)]
    return ExportedRepository(
        directory, tuple(models), fingerprint_of(hashes[0], hashes[1], pack.detector_config, pack.recognizer_config)
    )


def exported_model(name: str, source: Network, network: BatchedNetwork | GradientNetwork) -> ExportedModel:
    """Returns the description of a model."""
    return ExportedModel(
        name,
        source.path,
        input_text(network),
        tuple(f"{output} float32 {shape_text(shape)}" for output, shape in network.outputs.items()),
        network.largest_difference,
    )


def inputs_of(network: BatchedNetwork | GradientNetwork) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape without the batch: images, and templates where there are gradients."""
    templates = {TEMPLATES: (network.embedding_length,)} if isinstance(network, GradientNetwork) else {}
    return {IMAGES: network.image_shape, **templates}


def type_of_input(tensor: str) -> model_config_pb2.DataType:
    """Returns Triton's name of a type."""
    return model_config_pb2.TYPE_UINT8 if tensor == IMAGES else model_config_pb2.TYPE_FP32


def least_side_of(network: BatchedNetwork | GradientNetwork) -> int | None:
    """Returns the least side of images, of which their sides are multiples; None where there is one size."""
    return network.least_side if isinstance(network, BatchedNetwork) else None


def parameters_of(
    pack: Pack, network: Network, config: DetectorConfig | RecognizerConfig, precision: Precision
) -> ModelParameters:
    """Returns what config.pbtxt says of a network."""
    return ModelParameters(
        pack_name=pack.name, network_hash=hash_at(network, precision), config=config.model_dump_json()
    )


def hash_at(network: Network, precision: Precision) -> str:
    """Returns what stands for a network in the fingerprint: its hash, which another precision changes."""
    file_hash = network_hash(network)
    return file_hash if precision == "fp32" else f"{file_hash}-{precision}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns "[N, 640, 640, 3]" of (640, 640, 3)."""
    return f"[N, {', '.join(map(str, shape))}]"


def input_text(network: BatchedNetwork | GradientNetwork) -> str:
    """Returns "images_rgb uint8 [N, 640, 640, 3]" and so on, and which other sizes are taken."""
    text = ", ".join(
        f"{tensor} {'uint8' if tensor == IMAGES else 'float32'} {shape_text(shape)}"
        for tensor, shape in inputs_of(network).items()
    )
    side = least_side_of(network)
    return text if side is None else f"{text}, or less in steps of {side}"


def check_target(directory: Path) -> None:
    """Raises InvalidRepository unless a repository can be written there."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise InvalidRepository(f"{directory} exists; name a new or an empty folder", path=directory)
    if not directory.absolute().parent.is_dir():
        raise InvalidRepository(f"{directory.absolute().parent} is no folder", path=directory)


@contextlib.contextmanager
def written_at_once(directory: Path) -> Iterator[Path]:
    """Gives a folder to write into; it becomes `directory` at the end, or goes away on an error."""
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.absolute().parent))
        try:
            yield partial
            partial.chmod(0o755)
            os.rename(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InvalidRepository(f"cannot write {directory}: {error.strerror}", path=directory) from error


def write_model(
    folder: Path, network: BatchedNetwork | GradientNetwork, config: model_config_pb2.ModelConfig, runtime: Runtime
) -> None:
    """Writes one model's folder."""
    version = folder / VERSION_FOLDER
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    (version / MODEL_FILE).write_bytes(network.model)
    if runtime == "python":
        shutil.copyfile(triton_python_model.__file__, version / "model.py")


def model_config(
    name: str, network: BatchedNetwork | GradientNetwork, parameters: ModelParameters, options: ExportOptions
) -> model_config_pb2.ModelConfig:
    """Returns a model's config.pbtxt."""
    config = model_config_pb2.ModelConfig(name=name, max_batch_size=options.max_batch)
    fixed = least_side_of(network) is None
    for tensor, shape in inputs_of(network).items():
        dims = shape if fixed else (FREE, FREE, shape[-1])
        config.input.add(name=tensor, data_type=type_of_input(tensor), dims=dims)
    for output, shape in network.outputs.items():
        dims = shape if fixed else (FREE, *shape[1:])
        config.output.add(name=output, data_type=model_config_pb2.TYPE_FP32, dims=dims)
    if options.runtime == "python":
        config.backend = "python"
    else:
        config.platform, config.backend = "onnxruntime_onnx", "onnxruntime"
        config.default_model_filename = MODEL_FILE
    kinds = model_config_pb2.ModelInstanceGroup
    kind = kinds.KIND_GPU if options.device == "cuda" else kinds.KIND_CPU
    config.instance_group.add(kind=kind, count=options.instances)
    set_batching(config, options.max_batch)
    add_warmups(config, network, options.max_batch)
    if options.device == "cpu":
        config.parameters["intra_op_thread_count"].string_value = str(options.threads)
    if options.tensorrt:
        set_tensorrt(config, options.precision)
    for key, value in parameters.model_dump().items():
        config.parameters[key].string_value = value
    return config


def add_warmups(
    config: model_config_pb2.ModelConfig, network: BatchedNetwork | GradientNetwork, max_batch: int
) -> None:
    """Lets Triton run the least and the greatest input before it is ready."""
    greatest, side = inputs_of(network), least_side_of(network)
    least = greatest if side is None else {tensor: (side, side, shape[-1]) for tensor, shape in greatest.items()}
    ends = [(1, least), (max_batch, greatest)]
    for batch, shapes in ends[:1] if ends[0] == ends[1] else ends:
        height, width = shapes[IMAGES][:2]
        warmup = config.model_warmup.add(name=f"{batch} of {width}x{height}", batch_size=batch)
        for tensor, shape in shapes.items():
            zeros = warmup.inputs[tensor]
            zeros.data_type, zeros.zero_data = type_of_input(tensor), True
            zeros.dims[:] = shape


def set_batching(config: model_config_pb2.ModelConfig, max_batch: int) -> None:
    """Lets Triton join waiting requests to powers of two, without waiting for more.

    No queue policy: with one, Triton now and then lets a request wait for half a second. What may wait is bounded by
    the service, which sends one request per worker.
    """
    powers = [2**power for power in range(1, 16) if 2**power < max_batch]
    config.dynamic_batching.preferred_batch_size[:] = [*powers, max_batch]


def set_tensorrt(config: model_config_pb2.ModelConfig, precision: Precision) -> None:
    """Lets onnxruntime hand what it can to TensorRT."""
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="tensorrt")
    values: Mapping[str, str] = {
        "precision_mode": precision.upper(),
        "max_workspace_size_bytes": str(TENSORRT_WORKSPACE_BYTES),
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": "/tmp/likeness-tensorrt",
    }
    for key, value in values.items():
        accelerator.parameters[key] = value
