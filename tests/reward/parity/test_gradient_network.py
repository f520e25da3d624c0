"""A recognizer in the form of InsightFace's residual networks, differentiated as ONNX and by torch."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from likeness_reward.errors import InvalidPack
from likeness_reward.inference.onnx_gradients import OnnxRecognizerGradient
from likeness_reward.pack import gradient_network, vector_jacobian
from likeness_reward.pack.pack import Pack, load_pack

LENGTH = 32
CHANNELS = (8, 12)


class ResidualNetwork:
    """Writes BatchNormalization, Conv, PRelu blocks with a shortcut, then Flatten, Gemm, BatchNormalization."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def weights(self, value: np.ndarray) -> str:
        name = f"weights_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def conv(self, tensor: str, inputs: int, outputs: int, side: int, step: int) -> str:
        kernel = self.rng.standard_normal((outputs, inputs, side, side)) * np.sqrt(2 / (inputs * side * side))
        pads, sides = [side // 2] * 4, [side] * 2
        return self.add(
            "Conv", tensor, self.weights(kernel), self.weights(self.rng.standard_normal(outputs) * 0.1),
            kernel_shape=sides, pads=pads, strides=[step] * 2, group=1, dilations=[1, 1],
        )  # fmt: skip

    def normalization(self, tensor: str, channels: int) -> str:
        gain, variance = self.rng.uniform(0.5, 1.5, (2, channels))
        bias, mean = self.rng.standard_normal((2, channels)) * 0.1
        return self.add("BatchNormalization", tensor, *map(self.weights, (gain, bias, mean, variance)), epsilon=2e-5)

    def prelu(self, tensor: str, channels: int) -> str:
        return self.add("PRelu", tensor, self.weights(self.rng.uniform(0.1, 0.4, (channels, 1, 1))))

    def block(self, tensor: str, inputs: int, outputs: int) -> str:
        found = self.conv(self.normalization(tensor, inputs), inputs, outputs, 3, 1)
        found = self.conv(self.prelu(found, outputs), outputs, outputs, 3, 2)
        return self.add("Add", found, self.conv(tensor, inputs, outputs, 1, 2))

    def save(self, path: Path) -> None:
        tensor = self.prelu(self.conv("input.1", 3, CHANNELS[0], 3, 2), CHANNELS[0])
        for _ in range(2):
            tensor = self.block(tensor, CHANNELS[0], CHANNELS[0])
        tensor = self.normalization(self.block(tensor, *CHANNELS), CHANNELS[1])
        flat = self.add("Flatten", tensor, axis=1)
        matrix = self.rng.standard_normal((LENGTH, CHANNELS[1] * 7 * 7)) / 24
        dense = self.add("Gemm", flat, self.weights(matrix), self.weights(np.zeros(LENGTH)), transB=1)
        output = self.normalization(dense, LENGTH)
        shapes = (("input.1", [1, 3, 112, 112]), (output, [1, LENGTH]))
        given, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes)
        graph = helper.make_graph(self.nodes, "iresnet", [given], [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
        onnx.checker.check_model(model)
        onnx.save(model, str(path))


@pytest.fixture
def residual_pack(written_pack: Path) -> Pack:
    """A pack whose recognizer is of opset 11 and takes one crop at a time, as InsightFace exports them."""
    ResidualNetwork().save(written_pack / "recognizer.onnx")
    return load_pack(written_pack)


@pytest.fixture
def template() -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(LENGTH) / np.sqrt(LENGTH)).astype(np.float32)


def test_a_residual_network_has_the_gradients_that_torch_gives(residual_pack: Pack, template: np.ndarray) -> None:
    """Of rectifiers that open here and not there, rounding may find one in a crop or two."""
    pytest.importorskip("onnx2torch", reason="the [gradients] extra is not installed: no onnx2torch")
    from likeness_reward.inference.torch_gradients import TorchRecognizerGradient

    crops = np.random.default_rng(0).integers(0, 256, (6, 112, 112, 3), np.uint8)
    recognizer = residual_pack.recognizer
    by_torch = TorchRecognizerGradient(recognizer.path, residual_pack.recognizer_config, batched=False)
    by_onnx = OnnxRecognizerGradient(residual_pack, threads=1, provider="cpu")
    expected_similarities, expected = by_torch.similarity_gradients(crops, template)
    similarities, gradients = by_onnx.similarity_gradients(crops, template)
    np.testing.assert_allclose(similarities, expected_similarities, atol=1e-6)
    distances = np.linalg.norm((gradients - expected).reshape(6, -1), axis=1)
    relative = distances / np.linalg.norm(expected.reshape(6, -1), axis=1)
    assert np.median(relative) < 1e-5
    assert relative.max() < 1e-2


def test_a_wrong_rule_is_found_before_any_gradient_is_served(
    residual_pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_slope(reverse, node, gradient) -> None:
        reverse.pass_to(node.input[0], gradient)

    monkeypatch.setitem(vector_jacobian.RULES, "PRelu", forgets_the_slope)
    with pytest.raises(InvalidPack, match="small steps change similarities by .*, its derivative says"):
        gradient_network.gradient_network(residual_pack)
