"""The recognizer with its derivative as one ONNX network: crops and templates in, similarities and gradients out."""

from collections.abc import Mapping
from dataclasses import dataclass

import cv2
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from likeness_reward.errors import InvalidPack
from likeness_reward.inference.onnxruntime import load_session
from likeness_reward.inference.served_models import GRADIENTS, IMAGES, SIMILARITIES, TEMPLATES
from likeness_reward.pack.batching import EMBEDDINGS, TOLERANCE, batched_recognizer, load_model, run_original
from likeness_reward.pack.pack import Pack
from likeness_reward.pack.vector_jacobian import NotDifferentiableError, ReversePass

CROPS_TRIED = 3
SHARE_OF_PIXELS = 0.02
"""Of a crop, that a step of one grey level moves: few enough for the similarity to follow its derivative."""
FAR_OFF = 0.2
"""Share by which a step may differ from what the derivative says."""


@dataclass(frozen=True)
class GradientNetwork:
    """A network from `images_rgb` uint8 [batch, S, S, 3] and `templates` float32 [batch, D] to `similarities` float32
    [batch, 1] and `gradients` float32 [batch, 3, S, S], d(similarity) / d(pixel scaled to 0..1)."""

    model: bytes
    """The ONNX file."""
    image_shape: tuple[int, int, int]
    """S, S, 3."""
    embedding_length: int
    largest_difference: float
    """Of a similarity to that of the pack's own network."""

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape without the batch."""
        height, width, channels = self.image_shape
        return {SIMILARITIES: (1,), GRADIENTS: (channels, height, width)}


def why_not_differentiable(pack: Pack) -> str | None:
    """Returns what of the recognizer's graph has no derivative here, or None."""
    network = pack.recognizer
    try:
        model = load_model(network.path)
        ReversePass(model, network.input.name).run(network.outputs[0].name, "any", network.input.name)
    except NotDifferentiableError as error:
        return str(error)
    return None


def gradient_network(pack: Pack) -> GradientNetwork:
    """Returns the recognizer of a pack with its derivative.

    The similarity is ``s = u . t`` of the unit embedding ``u = e / |e|`` and a template t that need not have length 1,
    so that ``ds/de = (t - s u) / |e|``; the rest is the graph's own derivative. Scores are not taken from here.

    Raises InvalidPack when an operator has no derivative, a batch changes the recognizer's numbers, or a small step
    does not change the similarity as the derivative says.
    """
    recognizer = batched_recognizer(pack)
    size, (length,) = recognizer.image_shape[0], recognizer.outputs[EMBEDDINGS]
    model = onnx.load_model_from_string(recognizer.model)
    graph = model.graph
    graph.input[0].CopyFrom(helper.make_tensor_value_info(IMAGES, TensorProto.UINT8, ["batch", size, size, 3]))
    variable = pack.recognizer.input.name
    try:
        reverse = ReversePass(model, variable)
        norm = reverse.add("Sqrt", reverse.sum_over(reverse.add("Mul", EMBEDDINGS, EMBEDDINGS), [1]))
        unit = reverse.add("Div", EMBEDDINGS, norm)
        similarity = reverse.sum_over(reverse.add("Mul", unit, TEMPLATES), [1])
        across = reverse.add("Sub", TEMPLATES, reverse.add("Mul", similarity, unit))
        gradient = reverse.run(EMBEDDINGS, reverse.add("Div", across, norm), variable)
    except NotDifferentiableError as error:
        name = pack.recognizer.path.name
        raise InvalidPack(f"{name} cannot be differentiated: {error}", file=name) from error
    scale = reverse.constant(np.float32(255.0 / pack.recognizer_config.input_std))
    nodes = ((SIMILARITIES, "Identity", [similarity]), (GRADIENTS, "Mul", [gradient, scale]))
    graph.node.extend(helper.make_node(operator, inputs, [name]) for name, operator, inputs in nodes)
    graph.input.append(helper.make_tensor_value_info(TEMPLATES, TensorProto.FLOAT, ["batch", length]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(SIMILARITIES, TensorProto.FLOAT, ["batch", 1]))
    graph.output.append(helper.make_tensor_value_info(GRADIENTS, TensorProto.FLOAT, ["batch", 3, size, size]))
    data = model.SerializeToString()
    return GradientNetwork(data, recognizer.image_shape, length, compare_with_original(data, pack, size, length))


def compare_with_original(model: bytes, pack: Pack, size: int, length: int) -> float:
    """Returns the largest difference of a similarity to the pack's own recognizer, for crops of smooth noise.

    Raises InvalidPack when it is too large, or the derivative does not say what a small step of the pixels does.
    """
    name, rng = pack.recognizer.path.name, np.random.default_rng(0)
    coarse = rng.integers(1, 255, (CROPS_TRIED, 7, 7, 3), np.uint8)
    crops = np.stack([cv2.resize(each, (size, size), interpolation=cv2.INTER_LINEAR) for each in coarse])
    template = rng.standard_normal(length).astype(np.float32) / np.float32(np.sqrt(length))
    session = load_session(model, 1, "cpu", f"the derivative of {name}")
    similarities, gradients = run(session, crops, template)
    config = pack.recognizer_config
    raw = np.stack([each[0][0] for each in run_original(pack.recognizer, crops, (config.input_mean, config.input_std))])
    expected = raw @ template / np.linalg.norm(raw, axis=1)
    difference = float(np.abs(similarities - expected).max())
    if not difference <= TOLERANCE["fp32"]:
        raise InvalidPack(f"{name}: a similarity differs by {difference:.2g} once differentiated", file=name)
    steps = np.sign(gradients) * (rng.random(gradients.shape) < SHARE_OF_PIXELS)
    said = (gradients * steps).sum(axis=(1, 2, 3)) * 2 / 255
    levels = steps.transpose(0, 2, 3, 1).astype(np.int64)
    above, below = (run(session, (crops + sign * levels).astype(np.uint8), template)[0] for sign in (1, -1))
    if not (np.abs(above - below - said) <= FAR_OFF * np.abs(said) + TOLERANCE["fp32"] * 1e-2).all():
        raise InvalidPack(
            f"{name}: small steps change similarities by {above - below}, its derivative says {said}", file=name
        )
    return difference


def run(
    session: onnxruntime.InferenceSession, crops: NDArray[np.uint8], template: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns similarities float32 [N] and gradients float32 [N, 3, S, S] of crops uint8 [N, S, S, 3]."""
    feed = {IMAGES: np.ascontiguousarray(crops), TEMPLATES: np.repeat(template[None], len(crops), axis=0)}
    similarities, gradients = session.run([SIMILARITIES, GRADIENTS], feed)
    return similarities[:, 0], gradients
