"""One expert of a two-expert model on the device at a time: the chain evaluates them one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class ExpertSwap:
    """Moves frozen weights of experts to a device when they are needed, and frees those of the others there.

    The originals stay where they were loaded, on the CPU: frozen weights do not change, so leaving costs no copy.
    Trained parameters are on the device all the time, whatever is swapped, and so is the optimizer's state.
    """

    def __init__(self, experts: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._originals = {
            name: [(t, t.data) for t in (*expert.parameters(), *expert.buffers()) if not t.requires_grad]
            for name, expert in experts.items()
        }
        self.resident: str | None = None
        for expert in experts.values():
            for parameter in expert.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(device)

    def bring(self, name: str) -> None:
        """Puts the weights of an expert on the device, after freeing those of the one that is there.

        A graph of the other expert that is still to be backpropagated must recompute its evaluations (checkpointing)
        and call this again when it does: the weights that it saw are gone.
        """
        if name == self.resident:
            return
        if self.resident is not None:
            for tensor, original in self._originals[self.resident]:
                tensor.data = original
        for tensor, original in self._originals[name]:
            tensor.data = original.to(self._device, copy=True)  # a copy of its own also where that is the CPU
        self.resident = name
