"""Memory that the backward pass through the decoder needs, by length of the video, without a GPU and without weights.

`python benchmarks/feedback_memory.py [--height 480 --width 832]` runs the decoder of Wan 2.1 (that of the 14B models,
bfloat16) on tensors that have shapes and no contents, and prints the most bytes that were alive at once: everything
kept, one checkpoint for each latent frame, and these checkpoints in CPU memory. Weights, kernels' workspaces and the
fragments of an allocator are not counted.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffsynth.models.wan_video_vae import WanVideoVAE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from likeness_trainer.wan import decoding

LATENT_FRAMES = (1, 6, 11, 21)
KEPT_UP_TO = 6
"""Longest video for which the backward without checkpoints is run: it holds every activation."""


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, torch.Tensor):
                self._see(result.untyped_storage())
        return results

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextmanager
def saved_elsewhere() -> Iterator[None]:
    """Stands for `save_on_cpu`: what is saved is not counted, and comes back as a tensor of the same shape."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        return tensor.shape, tensor.dtype

    def unpack(kept: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        return torch.empty(kept[0], dtype=kept[1])

    with saved_tensors_hooks(pack, unpack):
        yield


def backward_bytes(latent_frames: int, height: int, width: int, checkpointing: bool, offload: bool) -> tuple[int, int]:
    """Returns the most bytes alive, and those alive between the forward and the backward pass."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        vae = WanVideoVAE(z_dim=16).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        shape = (1, 16, latent_frames, height // 8, width // 8)
        latents = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        with AliveBytes() as alive:
            chunks = decoding.decode_latent_frames(vae, latents, checkpointing, offload)
            pixels = torch.cat(list(chunks), dim=2)
            between = alive.now
            pixels.float().mean().backward()
        return alive.most, between


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    arguments = parser.parse_args()
    decoding.save_on_cpu = saved_elsewhere  # type: ignore[assignment]
    ways = {"everything kept": (False, False), "checkpoints": (True, False), "checkpoints on the CPU": (True, True)}
    print(f"frames of {arguments.width}x{arguments.height}, GiB at most (and between forward and backward)")
    for latent_frames in LATENT_FRAMES:
        cells = []
        for name, (checkpointing, offload) in ways.items():
            if not checkpointing and latent_frames > KEPT_UP_TO:
                continue
            most, between = backward_bytes(latent_frames, arguments.height, arguments.width, checkpointing, offload)
            cells.append(f"{name} {most / 2**30:.1f} ({between / 2**30:.1f})")
        print(f"{4 * latent_frames - 3:3d} frames: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
