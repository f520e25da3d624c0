"""The recognizer with its derivative as one ONNX network: crops and templates in, similarities and gradients out."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from likeness_reward.errors import InvalidPack
from likeness_reward.inference.served_models import GRADIENTS, IMAGES, SIMILARITIES, TEMPLATES
from likeness_reward.pack.batching import EMBEDDINGS, batched_recognizer, load_model
from likeness_reward.pack.pack import Pack
from likeness_reward.pack.vector_jacobian import NotDifferentiableError, ReversePass


@dataclass(frozen=True)
class GradientNetwork:
    """A network from `images_rgb` uint8 [batch, S, S, 3] and `templates` float32 [batch, D] to `similarities` float32
    [batch, 1] and `gradients` float32 [batch, 3, S, S], d(similarity) / d(pixel scaled to 0..1)."""

    model: bytes
    """The ONNX file."""
    crop_size: int
    embedding_length: int


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

    Raises InvalidPack when an operator has no derivative, or a batch changes the recognizer's numbers.
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
    return GradientNetwork(model.SerializeToString(), size, length)
