"""Seeds that depend only on names and indices: a resumed run draws what the undisturbed one would have drawn."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed made from the parts; different parts give unrelated seeds."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gaussian_noise(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Returns standard normal noise on the CPU, float32, reproducible from the parts on every rank and machine."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(derive_seed(*parts)), dtype=torch.float32)
