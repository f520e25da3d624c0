"""Each rule of the reverse pass against finite differences in float64, by ONNX's own reference implementation."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from likeness_reward.pack.vector_jacobian import NotDifferentiableError, ReversePass

RNG = np.random.default_rng(0)
STEP = 1e-6
IMAGE = (3, 7, 6)
"""Channels, height, width of the input: sides that a step of 2 does not divide."""


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def graph_of(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], opset: int = 13, dtype: Any = np.float32,
             row: tuple[int, ...] = IMAGE) -> onnx.ModelProto:  # fmt: skip
    """A graph from x [batch, ...] to y, its constants and input in a precision."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    held = [
        numpy_helper.from_array(value.astype(dtype) if value.dtype == np.float32 else value, name)
        for name, value in constants.items()
    ]
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", kind, ["batch", *row])],
        [helper.make_tensor_value_info("y", kind, None)], held,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(operator: str, inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], name=f"the_{operator}", **attributes)


def conv(output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return node("Conv", "x w b", output, **attributes)


BATCH_STATISTICS = {
    "gain": weights(3), "bias": weights(3), "mean": weights(3), "variance": np.abs(weights(3)) + np.float32(0.1)
}  # fmt: skip
DENSE = {"w": weights(5, 3, 3, 3), "b": weights(5)}
DEPTHWISE = {"w": weights(3, 1, 3, 3), "b": weights(3)}
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], int]] = {
    "conv": ([conv(pads=[1, 1, 1, 1])], DENSE, 13),
    "conv without padding": ([conv(auto_pad="VALID")], DENSE, 13),
    "conv of step 2": ([conv(pads=[1, 1, 1, 1], strides=[2, 2])], DENSE, 11),
    "conv of step 2, padded at its end": ([conv(pads=[0, 0, 1, 1], strides=[2, 2])], DENSE, 13),
    "conv padded beyond its reach": ([conv(pads=[3, 3, 3, 3])], DENSE, 13),
    "conv with holes": ([conv(pads=[2, 2, 2, 2], dilations=[2, 2])], DENSE, 13),
    "conv of pixels": ([conv(strides=[2, 2])], {"w": weights(4, 3, 1, 1), "b": weights(4)}, 13),
    "conv by channel": ([conv(pads=[1, 1, 1, 1], group=3)], DEPTHWISE, 13),
    "conv by channel of step 2": ([conv(pads=[1, 1, 1, 1], strides=[2, 2], group=3)], DEPTHWISE, 13),
    "conv of three groups": ([conv(pads=[1, 1, 1, 1], group=3)], {"w": weights(6, 1, 3, 3), "b": weights(6)}, 13),
    "batch normalization": (
        [node("BatchNormalization", "x gain bias mean variance", epsilon=0.01)], BATCH_STATISTICS, 15
    ),
    "relu": ([node("Relu", "x")], {}, 13),
    "leaky relu": ([node("LeakyRelu", "x", alpha=0.2)], {}, 13),
    "prelu": ([node("PRelu", "x slope")], {"slope": weights(3, 1, 1)}, 13),
    "clip": ([node("Clip", "x low high")], {"low": np.float32(-0.5), "high": np.float32(0.7)}, 13),
    "clip at one end": ([helper.make_node("Clip", ["x", "", "high"], ["y"])], {"high": np.float32(0.7)}, 13),
    "clip of opset 9": ([node("Clip", "x", min=-0.5, max=0.7)], {}, 9),
    "sigmoid": ([node("Sigmoid", "x")], {}, 13),
    "swish": ([node("Sigmoid", "x", "s"), node("Mul", "x s")], {}, 13),
    "a difference from a constant": ([node("Sub", "c x")], {"c": weights(1, 3, 1, 1)}, 13),
    "a quotient": ([node("Div", "x c")], {"c": weights(1, 3, 1, 1)}, 13),
    "a sum of two ways": ([node("Relu", "x", "r"), node("Add", "r x")], {}, 13),
    "a gate of each channel": (
        [node("GlobalAveragePool", "x", "p"), node("Sigmoid", "p", "s"), node("Mul", "s x")], {}, 12
    ),
    "a mean": ([node("GlobalAveragePool", "x")], {}, 13),
    "gemm": ([node("Flatten", "x", "f"), node("Gemm", "f w b", transB=1, alpha=0.5)],
             {"w": weights(4, 126), "b": weights(4)}, 13),
    "gemm of columns": ([node("Flatten", "x", "f"), node("Gemm", "f w b")],
                        {"w": weights(126, 4), "b": weights(4)}, 13),
    "matmul after a transpose": (
        [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("MatMul", "t w")], {"w": weights(3, 4)}, 13
    ),
    "reshape by the input's shape": (
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n axes", "m"),
         node("Concat", "m rest", "target", axis=0), node("Reshape", "x target")],
        {"zero": np.array(0, np.int64), "axes": np.array([0], np.int64), "rest": np.array([-1], np.int64)}, 13,
    ),
    "dropout and identity": ([node("Dropout", "x", "d"), node("Identity", "d")], {}, 13),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_predicts_a_small_step(case: str) -> None:
    nodes, constants, opset = CASES[case]
    images, direction = RNG.standard_normal((2, 2, *IMAGE))
    exact = ReferenceEvaluator(graph_of(nodes, constants, opset, np.float64))
    (output,) = exact.run(None, {"x": images})
    seed = RNG.standard_normal(output.shape)
    (above,), (below,) = (exact.run(None, {"x": images + sign * STEP * direction}) for sign in (1, -1))
    expected = float((seed * (above - below)).sum() / (2 * STEP))

    model = graph_of(nodes, constants, opset)
    model.graph.input.append(helper.make_tensor_value_info("seed", TensorProto.FLOAT, None))
    name = ReversePass(model, "x").run("y", "seed", "x")
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (gradient,) = session.run(None, {"x": images.astype(np.float32), "seed": seed.astype(np.float32)})
    assert gradient.shape == images.shape
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("nodes", "constants", "opset", "reason"),
    [
        ([node("Erf", "x")], {}, 13, "no derivative of Erf the_Erf"),
        ([node("MatMul", "x x")], {}, 13, "input 1 of MatMul the_MatMul is not a constant"),
        ([conv(auto_pad="SAME_UPPER")], DENSE, 13, "Conv the_Conv is not a plain 2-D convolution"),
        ([node("Relu", "x")], {}, 7, "opset 7; at least 9"),
        ([node("Identity", "c")], {"c": weights(3)}, 13, "y does not depend on x"),
    ],
)
def test_what_has_no_rule_is_named(nodes: Any, constants: Any, opset: int, reason: str) -> None:
    with pytest.raises(NotDifferentiableError, match=reason):
        ReversePass(graph_of(nodes, constants, opset), "x").run("y", "y", "x")
