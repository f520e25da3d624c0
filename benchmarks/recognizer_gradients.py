"""The recognizer's derivative by onnxruntime and by torch: seconds of a batch, and errors against float64.

`PYTHONPATH=tests/reward python benchmarks/recognizer_gradients.py [PACK]...` takes the toy's pack when none is named.
Eight painted faces a batch, one thread each; the two take turns. The reference is the graph written out with torch in
float64. A crop counts as a jump when its gradient is off by more than 1e-5: a rectifier whose input is rounding alone
is open in one and shut in the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from gradient_support import WrittenOut

import likeness_toyworld as toyworld
from likeness_reward.inference.onnx_gradients import OnnxRecognizerGradient
from likeness_reward.inference.session import RecognizerGradient
from likeness_reward.inference.torch_gradients import TorchRecognizerGradient
from likeness_reward.pack.pack import load_pack
from likeness_toyworld import painter

BATCHES, BATCH, REPEATS = 8, 8, 9
JUMP = 1e-5


def main() -> None:
    """Prints a line for each pack and way."""
    torch.set_num_threads(1)
    for directory in map(Path, sys.argv[1:] or [toyworld.face_pack_path()]):
        pack = load_pack(directory)
        path, config = pack.recognizer.path, pack.recognizer_config
        batched = pack.recognizer.input.shape[0] is None
        ways: dict[str, RecognizerGradient] = {
            "onnxruntime": OnnxRecognizerGradient(pack, threads=1, provider="cpu"),
            "torch": TorchRecognizerGradient(path, config, batched=batched),
        }
        errors = errors_of(ways, WrittenOut(path, torch.float64), template_for(path))
        seconds = seconds_of(ways, template_for(path))
        for name, found in errors.items():
            jumps = [error for error in found if error > JUMP]
            rest = max(error for error in found if error <= JUMP)
            print(f"{directory.name}, {name}: {statistics.median(seconds[name]) * 1e3:.1f} ms a batch of {BATCH}")
            jumping = f"{len(jumps)} of {len(found)} crops jump, by {max(jumps, default=0):.1e} at most"
            print(f"  relative error at most {rest:.1e}; {jumping}")


def faces(seed: int) -> np.ndarray:
    """Returns painted crops, uint8 [BATCH, 112, 112, 3]."""
    motion = painter.sample_motion(np.random.default_rng(seed))
    return painter.paint_clip(painter.sample_identity(seed), motion, BATCH, 112)[0]


def template_for(path: Path) -> np.ndarray:
    """Returns a template of the recognizer's length, float32 [D]."""
    length = WrittenOut(path)(torch.zeros(1, 3, 112, 112)).shape[1]
    return (np.random.default_rng(0).standard_normal(length) / np.sqrt(length)).astype(np.float32)


def errors_of(
    ways: dict[str, RecognizerGradient], reference: WrittenOut, template: np.ndarray
) -> dict[str, list[float]]:
    """Returns the relative error of each crop's gradient."""
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(BATCHES):
        crops = faces(seed)
        pixels = (torch.from_numpy(crops).double().permute(0, 3, 1, 2) / 255).requires_grad_()
        similarity = reference.similarity(pixels, torch.from_numpy(template).double())
        (expected,) = torch.autograd.grad(similarity.sum(), pixels)
        for name, way in ways.items():
            _, found = way.similarity_gradients(crops, template)
            distances = (torch.from_numpy(found) - expected).flatten(1).norm(dim=1)
            errors[name] += (distances / expected.flatten(1).norm(dim=1)).tolist()
    return errors


def seconds_of(ways: dict[str, RecognizerGradient], template: np.ndarray) -> dict[str, list[float]]:
    """Returns the seconds of one batch, each time."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    crops = faces(0)
    for _ in range(REPEATS):
        for name, way in ways.items():
            began = time.perf_counter()
            way.similarity_gradients(crops, template)
            seconds[name].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
