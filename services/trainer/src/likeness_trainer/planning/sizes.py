"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from likeness_trainer.errors import ConfigError

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def parse_size(text: str, option: str) -> int:
    """Returns bytes of a text such as 80GiB. Raises ConfigError naming the option and what it takes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"{option} is {text!r}, allowed: a number with {', '.join(UNITS)}, for example 80GiB")
    return round(float(match[1]) * UNITS[match[2]])


def gib(size: float) -> str:
    """Returns bytes in GiB, with as many digits as are of use."""
    value = size / 2**30
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def flops(count: float) -> str:
    """Returns a number of floating-point operations in a unit that keeps it short."""
    for unit, factor in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e9:.1f} GFLOP"
