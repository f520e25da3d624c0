"""The toy's plan, and what real runs of the toy take."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from likeness_trainer.config import TrainConfig, load_config

RECIPES = Path(__file__).parents[3] / "recipes"
SIZE = (9, 64, 64)
KERNELS = {
    "aten::mkldnn_convolution", "aten::add", "aten::addmm", "aten::mm", "aten::bmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
"""Operations of CPUs that take memory for themselves, which no arithmetic on tensors can see: convolutions that reorder
their input, narrow products and attention, sums of two precisions."""


def toy_recipe(*overrides: str) -> TrainConfig:
    """Returns the toy's recipe."""
    pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    return load_config(RECIPES / "toy.yaml", overrides, environment={})


def allocated_peak(work: Callable[[], Any], folder: Path, without_scratch: bool = False) -> int:
    """Returns the most bytes that torch's CPU allocator gave out at once during `work`, beyond those of before.

    Args:
        without_scratch: leave out what one of `KERNELS` takes and gives back by itself.
    """
    trace = folder / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in KERNELS)
    spans = allocations([event for event in events if event["name"] == "[memory]"])
    if without_scratch:
        spans = [span for span in spans if not within_one(kernels, span[1], span[2])]
    changes = sorted([(begin, 1, size) for size, begin, _ in spans] + [(end, 0, -size) for size, _, end in spans])
    return max(accumulate(size for _, _, size in changes))


def within_one(kernels: list[tuple[float, float]], begin: float, end: float) -> bool:
    """Returns whether a span lies inside one of the sorted kernels, which do not overlap."""
    last = bisect_right(kernels, (begin, math.inf)) - 1
    return last >= 0 and end <= kernels[last][1]


def allocations(memory: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Returns (bytes, begin, end) of all that was allocated; the end is infinite for what outlives the trace."""
    started: dict[int, tuple[int, float]] = {}
    spans = []
    for event in sorted(memory, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            started[address] = (size, event["ts"])
        elif address in started:  # else it was there before
            spans.append((*started.pop(address), event["ts"]))
    return spans + [(size, begin, math.inf) for size, begin in started.values()]


def zero_gradients(module: Any) -> None:
    """Gives every adapter weight a gradient, as all steps but the first find them."""
    for parameter in module.lora_parameters():
        parameter.grad = torch.zeros_like(parameter)
