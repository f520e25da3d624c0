"""ONNX files and pack.json of the tiny face pack, as insightface.app.FaceAnalysis reads them."""

import json
from pathlib import Path

import onnx
import torch
from torch import nn

from likeness_toyworld.face_pack.networks import CROP_SIDE, STRIDES

DETECTOR_FILE, RECOGNIZER_FILE, DESCRIPTION_FILE = "detector.onnx", "recognizer.onnx", "pack.json"
DETECTOR_SIZE = (128, 128)
OPSET = 13


def write_description(folder: Path) -> Path:
    """pack.json: the pack's name and the detector's input size (width, height) that suits 64-pixel frames."""
    path = folder / DESCRIPTION_FILE
    path.write_text(json.dumps({"name": "likeness-toy", "detector_size": list(DETECTOR_SIZE)}, indent=2) + "\n")
    return path


def export_detector(detector: nn.Module, folder: Path) -> Path:
    """folder/detector.onnx: input [1, 3, ?, ?], nine flat outputs as SCRFD ships them."""
    names = [f"{kind}_{stride}" for kind in ("score", "box", "landmark") for stride in STRIDES]
    picture = torch.zeros(1, 3, DETECTOR_SIZE[1], DETECTOR_SIZE[0])
    axes = {"input": {2: "height", 3: "width"}} | {name: {0: f"anchors_{name.split('_')[1]}"} for name in names}
    return _export(detector, picture, folder / DETECTOR_FILE, names, axes)


def export_recognizer(recognizer: nn.Module, folder: Path) -> Path:
    """folder/recognizer.onnx: input [batch, 3, 112, 112], output [batch, 128]."""
    crops = torch.zeros(2, 3, CROP_SIDE, CROP_SIDE)
    axes = {"input": {0: "batch"}, "embedding": {0: "batch"}}
    return _export(recognizer, crops, folder / RECOGNIZER_FILE, ["embedding"], axes)


def _export(
    network: nn.Module, example: torch.Tensor, path: Path, output_names: list[str], axes: dict[str, dict[int, str]]
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The TorchScript exporter writes one file of plain operators and needs no further package.
    torch.onnx.export(
        network.eval(), (example,), str(path), input_names=["input"], output_names=output_names,
        dynamic_axes=axes, opset_version=OPSET, dynamo=False,
    )  # fmt: skip
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return path
