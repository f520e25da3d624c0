"""ONNX surgery: networks of a pack become networks that take a batch of uint8 images as they are.

InsightFace ships SCRFD for one image, its outputs flat: [anchors, columns]. Each output ends
Conv -> Transpose -> Reshape (-> Sigmoid); with the batch kept as first axis by both, the same weights serve any batch.
The normalisation moves into the graph, so that a quarter of the bytes travel and every caller gets the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from likeness_reward.errors import InvalidPack
from likeness_reward.face.detector import INPUT_MEAN, INPUT_STD, STRIDES_BY_OUTPUT_COUNT, anchor_counts
from likeness_reward.inference.onnxruntime import SEVERITY_ERROR, load_session
from likeness_reward.inference.served_models import IMAGES
from likeness_reward.pack.pack import Network, Pack

Precision = Literal["fp32", "fp16"]
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2}
"""Largest difference to the pack's own network, as a share of the output's largest magnitude (at least 1)."""

EMBEDDINGS = "embeddings"
IMAGES_TRIED = 3
KEEPS_ROWS = ("Sigmoid", "Mul", "Identity")
"""What may stand between an SCRFD's Reshape and its output."""


@dataclass(frozen=True)
class BatchedNetwork:
    """A network [batch, H, W, 3] uint8 -> float32 outputs that start with the batch."""

    model: bytes
    """The ONNX file."""
    image_shape: tuple[int, int, int]
    """H, W, 3: of the largest image."""
    outputs: Mapping[str, tuple[int, ...]]
    """Name -> shape without the batch, for the largest image."""
    least_side: int | None
    """Sides may be any multiples of this, up to the largest; None where only the largest image is taken."""
    largest_difference: float
    """To the pack's network on the same images, one by one."""


def batched_detector(pack: Pack, precision: Precision = "fp32") -> BatchedNetwork:
    """Returns the pack's SCRFD with a batch axis, for images of the detector size and, with letterbox fit, less.

    Outputs: `scores_S` [K, 1], `boxes_S` [K, 4], `landmarks_S` [K, 10] for each stride S.
    Raises InvalidPack when the graph has another form or the batch changes its numbers.
    """
    strides, _ = STRIDES_BY_OUTPUT_COUNT[len(pack.detector.outputs)]
    width, height = pack.detector_config.size
    names = [
        (f"{kind}_{stride}", columns)
        for kind, columns in (("scores", 1), ("boxes", 4), ("landmarks", 10))
        for stride in strides
    ]
    counts = anchor_counts(len(names), (width, height))
    outputs = {name: (count, columns) for (name, columns), count in zip(names, counts, strict=True)}
    model = load_model(pack.detector.path)
    add_batch_axis(model.graph, pack.detector)
    least_side = strides[-1] if pack.detector_config.letterbox == "fit" else None
    return finish(model, pack.detector, precision, (height, width, 3), (INPUT_MEAN, INPUT_STD), outputs, least_side)


def batched_recognizer(pack: Pack, precision: Precision = "fp32") -> BatchedNetwork:
    """Returns the pack's ArcFace with a batch axis; output `embeddings` [D], not normalised. Raises InvalidPack."""
    config, network = pack.recognizer_config, pack.recognizer
    size = network.input.shape[2]
    assert size is not None  # load_pack requires it
    crop = np.zeros((1, size, size, 3), np.uint8)
    normalization = (config.input_mean, config.input_std)
    ((embedding,),) = run_original(network, crop, normalization)
    outputs = {EMBEDDINGS: (int(embedding.shape[1]),)}
    return finish(load_model(network.path), network, precision, (size, size, 3), normalization, outputs)


def load_model(path: Path) -> onnx.ModelProto:
    """Returns an ONNX file with its weights. Raises InvalidPack."""
    try:
        return onnx.load(str(path))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise InvalidPack(f"{path.name} cannot be read as ONNX: {error}", file=path.name) from error


def add_batch_axis(graph: onnx.GraphProto, network: Network) -> None:
    """Makes every output of an SCRFD keep the batch as its first axis. Raises InvalidPack naming what it found."""
    producers = {name: node for node in graph.node for name in node.output}
    for output, spec in zip(graph.output, network.outputs, strict=True):
        passed = []
        node = producers.get(output.name)
        while node is not None and node.op_type in KEEPS_ROWS:
            passed.append(node.op_type)
            node = next((producers[name] for name in node.input if name in producers), None)
        transpose = producers.get(node.input[0]) if node is not None and node.op_type == "Reshape" else None
        permutation = permutation_of(transpose)
        if node is None or transpose is None or permutation not in ([2, 3, 0, 1], [0, 2, 3, 1]):
            found = " <- ".join([*passed, *(each.op_type for each in (node, transpose) if each is not None)])
            raise InvalidPack(
                f"{network.path.name}: output {spec} ends in {found} with permutation {permutation}; a batch axis can "
                "be added to Transpose [2, 3, 0, 1] or [0, 2, 3, 1] -> Reshape (-> Sigmoid)",
                file=network.path.name,
                output=output.name,
            )
        transpose.attribute[0].ints[:] = [0, 2, 3, 1]
        columns = spec.shape[-1] or columns_of(graph, network, node)
        target = numpy_helper.from_array(np.array([0, -1, columns], np.int64), f"{output.name}_batched_shape")
        graph.initializer.append(target)
        node.input[1] = target.name


def permutation_of(node: onnx.NodeProto | None) -> list[int] | None:
    """Returns the permutation of a Transpose, or None of anything else."""
    if node is None or node.op_type != "Transpose" or not node.attribute:
        return None
    return list(node.attribute[0].ints)


def columns_of(graph: onnx.GraphProto, network: Network, reshape: onnx.NodeProto) -> int:
    """Returns the last entry of a Reshape's shape, an initializer or a Constant. Raises InvalidPack."""
    name = reshape.input[1]
    tensors = [value for value in graph.initializer if value.name == name]
    tensors += [node.attribute[0].t for node in graph.node if node.op_type == "Constant" and node.output[0] == name]
    if not tensors:
        raise InvalidPack(f"{network.path.name}: the shape of {reshape.name} is not a constant", file=network.path.name)
    return int(numpy_helper.to_array(tensors[0])[-1])


def finish(
    model: onnx.ModelProto,
    network: Network,
    precision: Precision,
    image_shape: tuple[int, int, int],
    normalization: tuple[float, float],
    outputs: Mapping[str, tuple[int, ...]],
    least_side: int | None = None,
) -> BatchedNetwork:
    """Returns a network whose outputs already keep the batch, with new inputs and names, compared with the original."""
    graph = model.graph
    name_input = network.input.name
    # A free side stays free: a fixed one lets onnxruntime choose other kernels, with other last bits.
    sides = [size or name for size, name in zip(network.input.shape[2:], ("height", "width"), strict=True)]
    graph_input = next(value for value in graph.input if value.name == name_input)
    graph_input.CopyFrom(helper.make_tensor_value_info(name_input, TensorProto.FLOAT, ["batch", 3, *sides]))
    set_outputs(graph, outputs)
    del graph.value_info[:]  # shapes of a batch of one
    remove_unused_weights(graph)
    if precision == "fp16":
        model = convert_float_to_float16(model, keep_io_types=True)
    take_uint8_images(model.graph, name_input, sides, normalization)
    data = model.SerializeToString()
    shapes = [image_shape] if least_side is None else [image_shape, (least_side, *image_shape[1:])]
    difference = max(
        compare_with_original(data, network, shape, normalization, TOLERANCE[precision]) for shape in shapes
    )
    return BatchedNetwork(data, image_shape, outputs, least_side, difference)


def set_outputs(graph: onnx.GraphProto, outputs: Mapping[str, tuple[int, ...]]) -> None:
    """Gives the outputs their names and shapes."""
    names = dict(zip((output.name for output in graph.output), outputs, strict=True))
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    del graph.output[:]
    for name, shape in outputs.items():
        axes = [f"{name}_anchors", shape[-1]] if len(shape) == 2 else list(shape)
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *axes]))


def remove_unused_weights(graph: onnx.GraphProto) -> None:
    """Drops the initializers and Constants that no node takes any more."""
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    unused = [value for value in graph.initializer if value.name not in used]
    constants = [node for node in graph.node if node.op_type == "Constant" and node.output[0] not in used]
    for value in unused:
        graph.initializer.remove(value)
    for node in constants:
        graph.node.remove(node)


def take_uint8_images(
    graph: onnx.GraphProto, name: str, sides: Sequence[int | str], normalization: tuple[float, float]
) -> None:
    """Puts (x - mean) / std of uint8 images [batch, H, W, 3] before the input [batch, 3, H, W] of a graph."""
    mean, std = normalization
    constants = {f"{IMAGES}_mean": np.float32(mean), f"{IMAGES}_scale": np.float32(1.0 / std)}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), key) for key, value in constants.items())
    nodes = [
        helper.make_node("Transpose", [IMAGES], [f"{IMAGES}_channels"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", [f"{IMAGES}_channels"], [f"{IMAGES}_float"], to=TensorProto.FLOAT),
        helper.make_node("Sub", [f"{IMAGES}_float", f"{IMAGES}_mean"], [f"{IMAGES}_centred"]),
        helper.make_node("Mul", [f"{IMAGES}_centred", f"{IMAGES}_scale"], [name]),
    ]
    for position, node in enumerate(nodes):
        graph.node.insert(position, node)
    graph_input = next(value for value in graph.input if value.name == name)
    graph_input.CopyFrom(helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, ["batch", *sides, 3]))


def compare_with_original(
    model: bytes,
    network: Network,
    image_shape: tuple[int, int, int],
    normalization: tuple[float, float],
    tolerance: float,
) -> float:
    """Returns the largest difference, as a share of an output's magnitude, of a batch to the pack's own network.

    That one sees the same images one by one.

    Raises InvalidPack when the new graph does not run or the difference exceeds the tolerance.
    """
    images = np.random.default_rng(0).integers(0, 256, (IMAGES_TRIED, *image_shape), np.uint8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SEVERITY_ERROR
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        found = session.run(None, {IMAGES: images})
    except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
        message = f"{network.path.name} does not run on a batch of {IMAGES_TRIED} images: {error}"
        raise InvalidPack(message, file=network.path.name) from error
    serial = run_original(network, images, normalization)
    largest = 0.0
    for position, batched in enumerate(found):
        expected = np.stack([outputs[position].reshape(batched.shape[1:]) for outputs in serial])
        difference = float(np.abs(batched - expected).max() / max(1.0, np.abs(expected).max()))
        if not difference <= tolerance:  # NaN is no agreement either
            raise InvalidPack(
                f"{network.path.name}: output {position} of a batch differs by {difference:.2g} from the network's own "
                f"on single images; at most {tolerance:g} is allowed",
                file=network.path.name,
                found=difference,
            )
        largest = max(largest, difference)
    return largest


def run_original(
    network: Network, images: NDArray[np.uint8], normalization: tuple[float, float]
) -> list[list[NDArray[np.float32]]]:
    """Returns the outputs of the pack's own network for images uint8 [N, H, W, 3], one by one."""
    mean, std = normalization
    session = load_session(network.path, 1, "cpu")
    blobs = (cv2.dnn.blobFromImages([image], 1.0 / std, mean=(mean,) * 3) for image in images)
    return [session.run(None, {network.input.name: blob}) for blob in blobs]
