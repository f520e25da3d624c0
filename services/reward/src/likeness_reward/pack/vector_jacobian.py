"""Reverse differentiation of an ONNX graph as more ONNX: nodes that take a gradient of an output back to an input.

The rules are those of the operators that recognizers are made of: convolutions, activations, normalisation with fixed
statistics, sums, products and one matrix product. The graph stays one that any ONNX runtime executes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, shape_inference

PREFIX = "gradient/"
LEAST_OPSET = 9
AXES_ARE_INPUTS_SINCE = 13
NO_GRADIENT = ("Shape", "Constant")
"""Operators whose outputs count as constants."""


class NotDifferentiableError(ValueError):
    """A graph has a node for which there is no rule; names the node and why."""


class ReversePass:
    """Adds to a graph the nodes that compute gradients by one of its tensors."""

    def __init__(self, model: onnx.ModelProto, variable: str) -> None:
        """Reads shapes and constants. `variable` is the tensor by which is differentiated.

        Raises NotDifferentiableError when a node between it and an output has no rule.
        """
        self.graph = model.graph
        self.opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        self.constants = constants_of(self.graph)
        self._shapes = shapes_of(model)
        self._gradients: dict[str, str] = {}
        self._count = 0
        self.active = {variable}
        self._order: list[onnx.NodeProto] = []
        for node in self.graph.node:
            if node.op_type in NO_GRADIENT or not self.active.intersection(node.input):
                continue
            if node.op_type not in RULES:
                raise NotDifferentiableError(f"there is no derivative of {described(node)}")
            self.active.add(node.output[0])
            self._order.append(node)
        if self.opset < LEAST_OPSET:
            raise NotDifferentiableError(f"the graph has opset {self.opset}; at least {LEAST_OPSET} is needed")

    def run(self, output: str, seed: str, variable: str) -> str:
        """Returns the name of sum(seed * output)'s gradient by `variable`; `seed` is a tensor of the output's shape.

        Raises NotDifferentiableError.
        """
        self._gradients = {output: seed}
        for node in reversed(self._order):
            gradient = self._gradients.get(node.output[0])
            if gradient is not None:
                RULES[node.op_type](self, node, gradient)
        if variable not in self._gradients:
            raise NotDifferentiableError(f"{output} does not depend on {variable}")
        return self._gradients[variable]

    def constant(self, value: NDArray[Any] | np.generic) -> str:
        """Returns the name of a new initializer."""
        name = self._new_name("constant")
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Returns the output of a new node."""
        name = self._new_name(operator)
        self.graph.node.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def sum_over(self, tensor: str, axes: Sequence[int]) -> str:
        """Returns a tensor summed over axes, which stay with size 1."""
        if self.opset < AXES_ARE_INPUTS_SINCE:
            return self.add("ReduceSum", tensor, axes=list(axes), keepdims=1)
        return self.add("ReduceSum", tensor, self.constant(np.array(axes, np.int64)), keepdims=1)

    def pass_to(self, tensor: str, gradient: str) -> None:
        """Adds a gradient to what came to a tensor from other nodes."""
        known = self._gradients.get(tensor)
        self._gradients[tensor] = gradient if known is None else self.add("Add", known, gradient)

    def pass_to_broadcast(self, node: onnx.NodeProto, tensor: str, gradient: str) -> None:
        """As `pass_to`, where `tensor` was perhaps repeated along axes to the shape of the node's output."""
        of_output, of_tensor = self.shape(node.output[0], node), self.shape(tensor, node)
        if len(of_output) != len(of_tensor):
            raise NotDifferentiableError(f"{described(node)} takes shapes {of_tensor} to {of_output}")
        repeated = [axis for axis, (a, b) in enumerate(zip(of_output, of_tensor, strict=True)) if b == 1 and a != 1]
        self.pass_to(tensor, self.sum_over(gradient, repeated) if repeated else gradient)

    def where(self, gradient: str, condition: str) -> str:
        """Returns a gradient where a boolean tensor is true, else 0."""
        return self.add("Mul", gradient, self.as_float(condition))

    def as_float(self, condition: str) -> str:
        """Returns 1 where a boolean tensor is true, else 0."""
        return self.add("Cast", condition, to=TensorProto.FLOAT)

    def shape(self, tensor: str, node: onnx.NodeProto) -> tuple[int | None, ...]:
        """Returns the shape of a tensor, None for the batch. Raises NotDifferentiableError when it is not known."""
        if tensor in self.constants:
            return self.constants[tensor].shape
        if tensor not in self._shapes:
            raise NotDifferentiableError(f"the shape of {tensor} at {described(node)} is not known")
        return self._shapes[tensor]

    def weights(self, node: onnx.NodeProto, position: int) -> NDArray[Any]:
        """Returns the constant that a node takes at a position. Raises NotDifferentiableError when it is none."""
        name = node.input[position]
        if name not in self.constants:
            raise NotDifferentiableError(f"input {position} of {described(node)} is not a constant")
        return self.constants[name]

    def _new_name(self, what: str) -> str:
        self._count += 1
        return f"{PREFIX}{what}_{self._count}"


def constants_of(graph: onnx.GraphProto) -> dict[str, NDArray[Any]]:
    """Returns the initializers and Constants of a graph by name."""
    constants = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return constants


def shapes_of(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Returns the shapes that ONNX infers, by name; None stands for a free axis."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    return {
        value.name: tuple(axis.dim_value or None for axis in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def described(node: onnx.NodeProto) -> str:
    """Returns "Conv node_7" for messages."""
    return f"{node.op_type} {node.name or node.output[0]}"


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Returns a node's attributes by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def convolution(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Steps of 1: the convolution with the turned kernel. Longer ones: the transposed convolution."""
    given, kernel = attributes_of(node), reverse.weights(node, 1)
    source, target = (reverse.shape(name, node)[2:] for name in (node.input[0], node.output[0]))
    if kernel.ndim != 4 or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or None in (*source, *target):
        raise NotDifferentiableError(f"{described(node)} is not a plain 2-D convolution of a known size")
    strides, dilations, pads = given.get("strides", [1, 1]), given.get("dilations", [1, 1]), given.get("pads", [0] * 4)
    groups = given.get("group", 1)
    reach = [(size - 1) * dilation for size, dilation in zip(kernel.shape[2:], dilations, strict=True)]
    # What the last step of the kernel did not reach of the input.
    rest = [
        source[axis] - (strides[axis] * (target[axis] - 1) + reach[axis] + 1 - pads[axis] - pads[axis + 2])  # type: ignore[operator]
        for axis in (0, 1)
    ]
    before = [reach[axis] - pads[axis] for axis in (0, 1)]
    after = [reach[axis] - pads[axis + 2] + rest[axis] for axis in (0, 1)]
    if list(strides) == [1, 1] and min(*before, *after) >= 0:
        turned = reverse.constant(turned_kernel(kernel, groups))
        sizes = {"kernel_shape": list(kernel.shape[2:]), "pads": before + after}
        result = reverse.add("Conv", gradient, turned, dilations=dilations, group=groups, **sizes)
    else:
        result = reverse.add(
            "ConvTranspose", gradient, node.input[1], kernel_shape=list(kernel.shape[2:]), strides=strides,
            dilations=dilations, pads=pads, group=groups, output_padding=rest,
        )  # fmt: skip
    reverse.pass_to(node.input[0], result)


def turned_kernel(kernel: NDArray[Any], groups: int) -> NDArray[Any]:
    """Returns weights [M, C / groups, h, w] as [C, M / groups, h, w], both sides of each kernel reversed."""
    outputs, inputs, *sides = kernel.shape
    split = kernel.reshape(groups, outputs // groups, inputs, *sides)[..., ::-1, ::-1]
    return split.transpose(0, 2, 1, 3, 4).reshape(groups * inputs, outputs // groups, *sides)


def batch_normalization(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """The statistics are constants."""
    gain, variance = reverse.weights(node, 1), reverse.weights(node, 4)
    scale = gain / np.sqrt(variance + attributes_of(node).get("epsilon", 1e-5))
    sides = len(reverse.shape(node.input[0], node)) - 2
    per_channel = reverse.constant(scale.astype(np.float32).reshape(1, -1, *[1] * sides))
    reverse.pass_to(node.input[0], reverse.add("Mul", gradient, per_channel))


def relu(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """0 at 0, as torch has it."""
    positive = reverse.add("Greater", node.output[0], reverse.constant(np.float32(0)))
    reverse.pass_to(node.input[0], reverse.where(gradient, positive))


def leaky_relu(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """LeakyRelu and PRelu: 1 above 0, the slope elsewhere."""
    if node.op_type == "PRelu":
        slope = reverse.weights(node, 1)
        if slope.ndim == 1 and slope.size > 1:
            raise NotDifferentiableError(f"{described(node)} has a slope for each place of its last axis")
    else:
        slope = np.array(attributes_of(node).get("alpha", 0.01), np.float32)
    positive = reverse.as_float(reverse.add("Greater", node.input[0], reverse.constant(np.float32(0))))
    above = reverse.add("Mul", positive, reverse.constant(1 - slope))
    reverse.pass_to(node.input[0], reverse.add("Mul", gradient, reverse.add("Add", above, reverse.constant(slope))))


def clip(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """0 at and beyond either end."""
    given = attributes_of(node)
    for position, (inside, name) in enumerate((("Greater", "min"), ("Less", "max")), 1):
        if len(node.input) > position and node.input[position]:
            end = reverse.weights(node, position)
        elif name in given:
            end = np.array(given[name])
        else:
            continue
        condition = reverse.add(inside, node.output[0], reverse.constant(end.astype(np.float32)))
        gradient = reverse.where(gradient, condition)
    reverse.pass_to(node.input[0], gradient)


def sigmoid(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """y (1 - y)."""
    rest = reverse.add("Sub", reverse.constant(np.float32(1)), node.output[0])
    slope = reverse.add("Mul", node.output[0], rest)
    reverse.pass_to(node.input[0], reverse.add("Mul", gradient, slope))


def sum_or_difference(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Add and Sub."""
    for position, name in enumerate(node.input):
        if name in reverse.active:
            negative = node.op_type == "Sub" and position == 1
            reverse.pass_to_broadcast(node, name, reverse.add("Neg", gradient) if negative else gradient)


def product(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Each factor's gradient is the other times what comes."""
    for name, other in zip(node.input, reversed(node.input), strict=True):
        if name in reverse.active:
            reverse.pass_to_broadcast(node, name, reverse.add("Mul", gradient, other))


def quotient(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Of a tensor and a constant."""
    reverse.weights(node, 1)
    reverse.pass_to_broadcast(node, node.input[0], reverse.add("Div", gradient, node.input[1]))


def matrix_product(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """MatMul and Gemm of rows with constant weights."""
    given, weights = attributes_of(node), reverse.weights(node, 1)
    if weights.ndim != 2 or given.get("transA", 0):
        raise NotDifferentiableError(f"{described(node)} is not a product of rows with a matrix")
    matrix = weights if given.get("transB", 0) else weights.T
    scaled = (matrix * np.float32(given.get("alpha", 1.0))).astype(np.float32)
    reverse.pass_to(node.input[0], reverse.add("MatMul", gradient, reverse.constant(scaled)))


def reshape(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Back to the input's shape."""
    reverse.pass_to(node.input[0], reverse.add("Reshape", gradient, reverse.add("Shape", node.input[0])))


def transpose(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """The inverse permutation."""
    rank = len(reverse.shape(node.input[0], node))
    permutation = attributes_of(node).get("perm", list(range(rank))[::-1])
    inverse = [int(axis) for axis in np.argsort(permutation)]
    reverse.pass_to(node.input[0], reverse.add("Transpose", gradient, perm=inverse))


def global_average(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """An equal share for every place."""
    sides = reverse.shape(node.input[0], node)[2:]
    if None in sides:
        raise NotDifferentiableError(f"{described(node)} has a picture of unknown size {list(sides)}")
    places = math.prod(side for side in sides if side is not None)
    share = reverse.add("Mul", gradient, reverse.constant(np.float32(1 / places)))
    reverse.pass_to(node.input[0], reverse.add("Expand", share, reverse.add("Shape", node.input[0])))


def unchanged(reverse: ReversePass, node: onnx.NodeProto, gradient: str) -> None:
    """Identity, and Dropout outside of training."""
    reverse.pass_to(node.input[0], gradient)


RULES: dict[str, Callable[[ReversePass, onnx.NodeProto, str], None]] = {
    "Add": sum_or_difference,
    "BatchNormalization": batch_normalization,
    "Clip": clip,
    "Conv": convolution,
    "Div": quotient,
    "Dropout": unchanged,
    "Flatten": reshape,
    "Gemm": matrix_product,
    "GlobalAveragePool": global_average,
    "Identity": unchanged,
    "LeakyRelu": leaky_relu,
    "MatMul": matrix_product,
    "Mul": product,
    "PRelu": leaky_relu,
    "Relu": relu,
    "Reshape": reshape,
    "Sigmoid": sigmoid,
    "Squeeze": reshape,
    "Sub": sum_or_difference,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
