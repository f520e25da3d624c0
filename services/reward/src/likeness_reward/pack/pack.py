"""Reading a pack: which file is which network, are its shapes right, and what is its fingerprint."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, ValidationError

from likeness_reward.errors import InvalidPack
from likeness_reward.face.detector import STRIDES_BY_OUTPUT_COUNT, DetectorConfig, LetterboxKind
from likeness_reward.face.recognizer import RecognizerConfig
from likeness_reward.inference.session import TensorSpec

PIPELINE_VERSION = 1
"""Raised whenever the code between the networks changes a number."""
PACK_FILE = "pack.json"
LEAST_DETECTOR_OUTPUTS = 5
NODES_WITH_NORMALISATION = 8

Role = Literal["detector", "recognizer", "unused"]


class PackFile(BaseModel):
    """The optional pack.json beside the networks."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str | None = None
    """Name of the pack; default the folder's."""
    detector_size: tuple[int, int] | None = None
    """Width and height of the detector's canvas, pixels; default 640x640."""
    letterbox: LetterboxKind | None = None
    """fit or full, see DetectorConfig; default fit where the network takes images of any size."""


@dataclass(frozen=True)
class Network:
    """One ONNX file of a pack."""

    path: Path
    role: Role
    input: TensorSpec
    outputs: tuple[TensorSpec, ...]
    normalises_itself: bool
    """Whether the graph starts with its own subtraction and scaling, as MXNet's ArcFace exports do."""


@dataclass(frozen=True, kw_only=True)
class PackDescription:
    """What the face pipeline must know of a pack, wherever its networks run."""

    name: str
    detector_config: DetectorConfig
    recognizer_config: RecognizerConfig
    fingerprint: str
    """SHA-256, hexadecimal, of both networks and of everything that decides how frames enter and leave them."""


@dataclass(frozen=True, kw_only=True)
class Pack(PackDescription):
    """A validated pack."""

    directory: Path
    networks: tuple[Network, ...]
    detector: Network
    recognizer: Network


def load_pack(
    directory: Path, *, detector_size: tuple[int, int] | None = None, letterbox: LetterboxKind | None = None
) -> Pack:
    """Returns the pack in a folder. `detector_size` (width, height) and `letterbox` override pack.json's.

    The roles are InsightFace's: five outputs or more detect, a square input recognises, the first by file name wins.
    Raises InvalidPack naming the file, what was found and what is expected.
    """
    settings = read_pack_file(directory)
    networks = tuple(read_network(path) for path in onnx_files(directory))
    detector = network_of(networks, "detector", directory)
    recognizer = network_of(networks, "recognizer", directory)
    check_detector(detector)
    check_recognizer(recognizer)
    detector_config = detector_config_of(
        detector, detector_size or settings.detector_size, letterbox or settings.letterbox
    )
    mean, std = (0.0, 1.0) if recognizer.normalises_itself else (127.5, 127.5)
    recognizer_config = RecognizerConfig(input_mean=mean, input_std=std)
    return Pack(
        name=settings.name or directory.resolve().name,
        directory=directory,
        networks=networks,
        detector=detector,
        recognizer=recognizer,
        detector_config=detector_config,
        recognizer_config=recognizer_config,
        fingerprint=fingerprint_of(
            network_hash(detector), network_hash(recognizer), detector_config, recognizer_config
        ),
    )


def read_pack_file(directory: Path) -> PackFile:
    """Returns the folder's pack.json, or defaults without one. Raises InvalidPack."""
    path = directory / PACK_FILE
    if not path.exists():
        return PackFile()
    try:
        return PackFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidPack(f"{path}: {error}", file=PACK_FILE) from error


def onnx_files(directory: Path) -> list[Path]:
    """Returns the ONNX files of a folder by name. Raises InvalidPack when there are none."""
    if not directory.is_dir():
        raise InvalidPack(f"pack {directory}: no such folder", directory=directory)
    files = sorted(directory.glob("*.onnx"))
    if not files:
        found = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        message = f"pack {directory}: expected a detector and a recognizer as *.onnx, found {found}"
        raise InvalidPack(message, directory=directory)
    return files


def read_network(path: Path) -> Network:
    """Returns shapes and role of an ONNX file. Raises InvalidPack."""
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except (OSError, DecodeError, ValueError) as error:
        raise InvalidPack(f"{path.name} cannot be read as ONNX: {error}", file=path.name) from error
    weights = {value.name for value in graph.initializer}
    inputs = [tensor_spec(value) for value in graph.input if value.name not in weights]
    outputs = tuple(tensor_spec(value) for value in graph.output)
    if not inputs or not outputs:
        raise InvalidPack(f"{path.name} is no network: {len(inputs)} inputs, {len(outputs)} outputs", file=path.name)
    first_names = [node.name for node in graph.node[:NODES_WITH_NORMALISATION]]
    subtracts = any(name.startswith(("Sub", "_minus")) for name in first_names)
    scales = any(name.startswith(("Mul", "_mul")) for name in first_names)
    return Network(path, role_of(inputs, outputs), inputs[0], outputs, subtracts and scales)


def tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Returns name and shape of a graph's input or output; an axis without a positive size is free."""
    axes = value.type.tensor_type.shape.dim
    return TensorSpec(value.name, tuple(axis.dim_value if axis.dim_value > 0 else None for axis in axes))


def role_of(inputs: list[TensorSpec], outputs: tuple[TensorSpec, ...]) -> Role:
    """Returns what InsightFace would use a network for, by its shapes."""
    shape = inputs[0].shape
    if len(outputs) >= LEAST_DETECTOR_OUTPUTS:
        return "detector"
    if len(inputs) != 1 or len(shape) != 4 or shape in ((1, 3, 192, 192), (None, 3, 192, 192)):
        return "unused"
    height, width = shape[2:]
    square = height is not None and height == width and height >= 112 and height % 16 == 0
    return "recognizer" if square and height != 192 else "unused"


def network_of(networks: tuple[Network, ...], role: Role, directory: Path) -> Network:
    """Returns the first network of a role. Raises InvalidPack listing what the folder has instead."""
    for network in networks:
        if network.role == role:
            return network
    expected = {
        "detector": "an SCRFD with 9 or 15 outputs",
        "recognizer": "an ArcFace with an input [N, 3, 112, 112] and one output",
    }[role]
    found = "; ".join(
        f"{network.path.name}: input {network.input}, {len(network.outputs)} outputs" for network in networks
    )
    raise InvalidPack(f"pack {directory} has no {role}: expected {expected}, found {found}", role=role)


def check_detector(network: Network) -> None:
    """Raises InvalidPack unless the network has the inputs and outputs of an SCRFD with landmarks."""
    check_image_input(network)
    count = len(network.outputs)
    if count not in STRIDES_BY_OUTPUT_COUNT:
        expected = "9 or 15 (scores, boxes and landmarks of 3 or 5 strides)"
        raise InvalidPack(
            f"{network.path.name}: found {count} outputs, expected {expected}", file=network.path.name, found=count
        )
    for index, output in enumerate(network.outputs):
        columns = (1, 4, 10)[index // (count // 3)]
        if len(output.shape) not in (2, 3) or output.shape[-1] not in (None, columns):
            message = f"{network.path.name}: output {index} is {output}, expected [anchors, {columns}]"
            raise InvalidPack(message, file=network.path.name, found=output)


def check_recognizer(network: Network) -> None:
    """Raises InvalidPack unless the network has the inputs and outputs of an ArcFace."""
    check_image_input(network)
    if (network.input.shape[2] or 0) % 112 != 0:
        message = f"{network.path.name}: input is {network.input}, expected sides of 112 or a multiple"
        raise InvalidPack(message, file=network.path.name, found=network.input)
    if len(network.outputs) != 1 or len(network.outputs[0].shape) != 2:
        found = ", ".join(map(str, network.outputs))
        message = f"{network.path.name}: outputs are {found}, expected one [N, embedding length]"
        raise InvalidPack(message, file=network.path.name, found=found)


def check_image_input(network: Network) -> None:
    """Raises InvalidPack unless the input is [N or 1, 3, H, W]."""
    shape = network.input.shape
    if len(shape) != 4 or shape[0] not in (None, 1) or shape[1] not in (None, 3):
        message = f"{network.path.name}: input is {network.input}, expected [N, 3, H, W]"
        raise InvalidPack(message, file=network.path.name, found=network.input)


def detector_config_of(
    network: Network, size: tuple[int, int] | None, letterbox: LetterboxKind | None
) -> DetectorConfig:
    """Returns the detector's settings. A size fixed in the graph wins; asking for another raises InvalidPack."""
    height, width = network.input.shape[2:]
    fixed = (width, height) if width is not None and height is not None else None
    if fixed is not None and size is not None and size != fixed:
        message = (
            f"{network.path.name} takes only {fixed[0]}x{fixed[1]}; the detector size asked for is {size[0]}x{size[1]}"
        )
        raise InvalidPack(message, file=network.path.name)
    if fixed is not None and letterbox == "fit":
        message = f"{network.path.name} takes only {fixed[0]}x{fixed[1]}; the letterbox fit needs other sizes as well"
        raise InvalidPack(message, file=network.path.name)
    kind = letterbox or ("fit" if fixed is None else "full")
    wanted = fixed or size
    try:
        return DetectorConfig(letterbox=kind) if wanted is None else DetectorConfig(size=wanted, letterbox=kind)
    except ValidationError as error:
        raise InvalidPack(f"{network.path.name}: {error.errors()[0]['msg']}", file=network.path.name) from error


def network_hash(network: Network) -> str:
    """Returns the SHA-256, hexadecimal, of a network's file."""
    return hashlib.sha256(network.path.read_bytes()).hexdigest()


def fingerprint_of(
    detector_hash: str, recognizer_hash: str, detector_config: DetectorConfig, recognizer_config: RecognizerConfig
) -> str:
    """Returns the SHA-256, hexadecimal, of everything that decides the numbers."""
    parts = {
        "pipeline": PIPELINE_VERSION,
        "detector": detector_hash,
        "recognizer": recognizer_hash,
        "detector_config": detector_config.model_dump(mode="json"),
        "recognizer_config": recognizer_config.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
