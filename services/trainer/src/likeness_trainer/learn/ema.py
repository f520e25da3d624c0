"""A running mean of the adapters: what is evaluated and exported when it is switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from likeness_trainer.wan import lora
from likeness_trainer.wan.module import WanModule

States = dict[str, dict[str, torch.Tensor]]
"""Expert name to adapter state, as `lora.lora_state` returns it."""


class AdapterAverage:
    """Exponential moving average of every trained adapter, float32, on the model's device.

    ``m <- d m + (1 - d) w`` after update n = 1, 2, ..., with ``d = min(decay, (1 + n) / (10 + n))``: the untrained
    start must not outweigh the first updates (averaging: Polyak and Juditsky 1992; the warm-up is TensorFlow's).
    """

    def __init__(self, model: WanModule, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._values = [parameter.detach().clone() for parameter in model.lora_parameters()]
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Takes the adapters as they are now into the average."""
        self.num_updates += 1
        decay = min(self._decay, (1.0 + self.num_updates) / (10.0 + self.num_updates))
        for value, parameter in zip(self._values, self._model.lora_parameters(), strict=True):
            value.lerp_(parameter, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model works with the average in place of the adapters."""
        parameters = self._model.lora_parameters()
        trained = [parameter.detach().clone() for parameter in parameters]
        _copy(self._values, parameters)
        try:
            yield
        finally:
            _copy(trained, parameters)

    def state(self) -> States:
        """Returns a copy of the average on the CPU."""
        with self.applied():
            return {name: lora.lora_state(getattr(self._model.pipe, name)) for name in self._model.trained_experts}

    def restore(self, state: States, num_updates: int) -> None:
        """Goes on from what `state` returned after `num_updates` updates."""
        with self.applied():
            for name, tensors in state.items():
                lora.load_lora_state(getattr(self._model.pipe, name), tensors)
            self._values = [parameter.detach().clone() for parameter in self._model.lora_parameters()]
        self.num_updates = num_updates


@torch.no_grad()
def _copy(source: list[torch.Tensor], target: list[torch.nn.Parameter]) -> None:
    for value, parameter in zip(source, target, strict=True):
        parameter.copy_(value)
