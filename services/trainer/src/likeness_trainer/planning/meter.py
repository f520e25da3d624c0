"""What tensor operations cost, without running them: FLOPs, and the bytes that are alive at once on one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import diffsynth.models.wan_video_dit as diffsynth_dit
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from likeness_trainer.wan import decoding


class Meter(TorchDispatchMode):
    """While it is on: counts the FLOPs of every operation by torch's formulas, and follows every storage from the
    operation that makes it to the moment at which nothing refers to it any more.

    Runs in the backward pass too, and on the meta device. torch's FlopCounterMode is not used because it keeps tensors
    of checkpointed blocks alive. Memory that a kernel takes for itself is not seen.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        """
        Args:
            device: tensors elsewhere are not counted.
            known: what is there before, such as parameters; neither it nor views of it are counted.
        """
        super().__init__()
        self.flops = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.peak_host_bytes = 0
        self._device_type = device.type
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._follow(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                self._follow(storage, storage.nbytes())
        return result

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def move_to_host(self, tensor: Tensor) -> _OnHost:
        """Returns what stands for a tensor that lies in the memory of the machine until it is dropped."""
        self.host_bytes += tensor.nbytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        moved = _OnHost(tensor)
        weakref.finalize(moved, self._drop_from_host, tensor.nbytes)
        return moved

    def _drop_from_host(self, size: int) -> None:
        self.host_bytes -= size


class _OnHost:
    """Shape of a tensor that was moved away."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def back(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """What `scaled_dot_product_attention` runs on GPUs. On the meta device it would take the unfused way and hold all
    scores, N x N for N tokens."""
    if attn_mask is not None:
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    output: Tensor = fused(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return output


_plain_attention = F.scaled_dot_product_attention


@contextmanager
def as_on_a_gpu(meter: Meter) -> Iterator[None]:
    """Inside, meta tensors take the ways that tensors on a GPU take: fused attention, and checkpoints that
    `use_gradient_checkpointing_offload` moves to the host really leave the device."""

    class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(meter.move_to_host, _OnHost.back)

    with (
        patch.object(F, "scaled_dot_product_attention", _fused_attention),
        patch.object(torch.autograd.graph, "save_on_cpu", SaveOnHost),
        patch.object(decoding, "save_on_cpu", SaveOnHost),
        patch.multiple(
            diffsynth_dit, FLASH_ATTN_3_AVAILABLE=False, FLASH_ATTN_2_AVAILABLE=False, SAGE_ATTN_AVAILABLE=False
        ),
    ):
        yield
