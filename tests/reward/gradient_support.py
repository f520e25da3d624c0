"""A recognizer differentiated without the code under test: the graph's few operators, written out with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor


class WrittenOut:
    """Runs an ONNX graph of convolutions, activations and one matrix product, operator by operator."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.graph = onnx.load(str(path)).graph
        self.dtype = dtype
        arrays = {value.name: numpy_helper.to_array(value) for value in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant":
                arrays[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        self.weights = {name: self._tensor(array) for name, array in arrays.items()}

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __call__(self, images: Tensor) -> Tensor:
        known: dict[str, Any] = {**self.weights, self.graph.input[0].name: images}
        for node in self.graph.node:
            if node.op_type == "Constant":
                continue
            options = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            inputs = [known[name] for name in node.input]
            known[node.output[0]] = self.operator(node.op_type, inputs, options)
        return known[self.graph.output[0].name]

    def operator(self, kind: str, inputs: list[Any], options: dict[str, Any]) -> Any:
        """Returns the output of one operator."""
        first = inputs[0]
        match kind:
            case "Conv":
                bias = inputs[2] if len(inputs) > 2 else None
                top, left, bottom, right = options.get("pads", [0, 0, 0, 0])
                padded = F.pad(first, (left, right, top, bottom))
                groups = options.get("group", 1)
                return F.conv2d(padded, inputs[1], bias, stride=tuple(options["strides"]), groups=groups)
            case "Relu":
                return first.clamp(min=0)
            case "Clip":
                return first.clamp(float(inputs[1]), float(inputs[2]))
            case "Add":
                return first + inputs[1]
            case "BatchNormalization":
                _, gain, bias, mean, variance = inputs
                shape = (1, -1) + (1,) * (first.dim() - 2)
                scale = gain / torch.sqrt(variance + options["epsilon"])
                return (first - mean.view(shape)) * scale.view(shape) + bias.view(shape)
            case "Flatten":
                return first.flatten(1)
            case "Gemm":
                return first @ (inputs[1].T if options.get("transB") else inputs[1]) + inputs[2]
            case "Shape" | "Gather" | "Unsqueeze" | "Concat":
                return None
            case "Reshape":
                return first.flatten(1)
        raise NotImplementedError(kind)

    def similarity(self, crops_unit: Tensor, template: Tensor) -> Tensor:
        """Returns the cosine [N] of crops [N, 3, S, S] in 0..1 to a template [D]."""
        raw = self((crops_unit * 255 - 127.5) / 127.5)
        return (raw / raw.norm(dim=1, keepdim=True)) @ template
