"""LoRA on a DiffSynth WanModel: inject, switch off, snapshot, checksum.

The adapter lives in float32 whatever the base model's dtype: with a learning rate of 1e-5 an AdamW step is smaller than
one bfloat16 ULP of most weights, so a bfloat16 adapter stops moving. PEFT's `inject_adapter_in_model` is used rather
than `get_peft_model` because it keeps the class and the parameter names of the model. The files are in `lora_files.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

DEFAULT_TARGET_MODULES = "q,k,v,o,ffn.0,ffn.2"
ADAPTER_NAME = "default"

_BLOCK_LINEAR = re.compile(r"blocks\.\d+\.(?:(?:self_attn|cross_attn)\.)?(?P<target>.+)")


def inject_lora(
    dit: nn.Module, rank: int, alpha: float, target_modules: str | Sequence[str] = DEFAULT_TARGET_MODULES, seed: int = 0
) -> None:
    """Freezes `dit` and adds a trainable float32 LoRA of `rank` to its target layers, in place.

    The adapter starts as the identity: lora_B is zero, lora_A uniform in +-1/sqrt(in_features) as PEFT and
    torch.nn.Linear draw it, from a generator of its own, so that neither the global random state nor anything drawn
    before has an influence, and none is drawn from it.

    Raises ValueError for a rank below 1, a non-positive alpha, an adapter that is already there, and a target that
    matches no linear layer.
    """
    if rank < 1:
        raise ValueError(f"lora rank is {rank}, allowed: 1 or more")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"lora alpha is {alpha}, allowed: a positive number")
    if any(isinstance(module, LoraLayer) for module in dit.modules()):
        raise ValueError("the model already carries a LoRA adapter; load the base model again")
    names = select_target_layers(dit, target_modules)
    dit.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_pattern(names), lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, dit, adapter_name=ADAPTER_NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _named_lora_parameters(dit):
        parameter.data = _initial_value(name, parameter, generator)
        parameter.requires_grad_(True)


def lora_parameters(dit: nn.Module) -> list[nn.Parameter]:
    """Returns the adapter's parameters, float32, in the order of their names (stable between runs and ranks)."""
    return [parameter for _, parameter in _named_lora_parameters(dit)]


def lora_rank_and_alpha(dit: nn.Module) -> tuple[int, float]:
    """Returns (rank, alpha) of the injected adapter. Raises ValueError where `dit` carries none."""
    for module in dit.modules():
        if isinstance(module, LoraLayer):
            return int(module.r[ADAPTER_NAME]), float(module.lora_alpha[ADAPTER_NAME])
    raise ValueError("the model carries no LoRA adapter; call inject_lora first")


@contextmanager
def adapter_disabled(dit: nn.Module) -> Iterator[None]:
    """Inside, `dit` computes exactly what the base model computes, bit for bit.

    Used for the reference velocity of the KL term. PEFT's own `enable_adapters(False)` also clears requires_grad of
    every adapter weight, which would cut the gradient of graphs that are already built; only the switch is turned here.
    """
    layers = [module for module in dit.modules() if isinstance(module, LoraLayer)]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def lora_state(dit: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a copy of the adapter on the CPU: {"blocks.0.self_attn.q.lora_A.weight": float32 [rank, in], ...}.

    lora_B is [out, rank] and unscaled: the layer adds (alpha / rank) B A x.
    """
    return {
        name: parameter.detach().to(device="cpu", copy=True).contiguous()
        for name, parameter in _named_lora_parameters(dit)
    }


def load_lora_state(dit: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Writes `state` (as `lora_state` returns it) into the adapter of `dit`, in place.

    Raises ValueError that names missing keys, unexpected keys and shapes that differ; nothing is written then.
    """
    parameters = dict(_named_lora_parameters(dit))
    faults = [f"missing {name}" for name in sorted(parameters.keys() - state.keys())]
    faults += [f"unexpected {name}" for name in sorted(state.keys() - parameters.keys())]
    faults += [
        f"{name} has shape {tuple(state[name].shape)}, the model needs {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in state and state[name].shape != parameter.shape
    ]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ValueError(f"the LoRA state does not fit the model: {shown}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def checksum(dit: nn.Module) -> str:
    """Returns the SHA-256 (64 hex digits) of the adapter's names, shapes and float32 bytes: equal on every rank."""
    digest = hashlib.sha256()
    for name, tensor in lora_state(dit).items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype};".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def select_target_layers(dit: nn.Module, target_modules: str | Sequence[str]) -> list[str]:
    """Returns the names of the linear layers in the blocks of `dit` that `target_modules` select, sorted.

    A target is the name of a linear layer within self_attn or cross_attn ("q" selects both) or within the block
    ("ffn.0"). Raises ValueError that names every target without a layer, and the targets that exist.
    """
    listed = target_modules.split(",") if isinstance(target_modules, str) else target_modules
    targets = [target.strip() for target in listed if target.strip()]
    layers: dict[str, list[str]] = {}
    for name, module in dit.named_modules():
        match = _BLOCK_LINEAR.fullmatch(name)
        if match and isinstance(module, nn.Linear):
            layers.setdefault(match["target"], []).append(name)
    unknown = [target for target in targets if target not in layers]
    if unknown or not targets:
        raise ValueError(
            f"lora_target_modules is {target_modules!r}: {', '.join(unknown) or 'it names nothing'} matches no linear "
            f"layer in the model's blocks; allowed: {', '.join(sorted(layers)) or 'none, the model has no such block'}"
        )
    return sorted(name for target in set(targets) for name in layers[target])


def target_pattern(names: Sequence[str]) -> str:
    """Returns the regular expression that PEFT matches fully against module names, for layers in numbered blocks."""
    suffixes = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in names})
    return rf"blocks\.\d+\.({'|'.join(re.escape(suffix) for suffix in suffixes)})"


def _named_lora_parameters(dit: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (name without the adapter's name, parameter) of every adapter weight, sorted by name."""
    marker = f".{ADAPTER_NAME}.weight"
    found = [
        (name.removesuffix(marker) + ".weight", parameter)
        for name, parameter in dit.named_parameters()
        if name.endswith((f".lora_A{marker}", f".lora_B{marker}"))
    ]
    if not found:
        raise ValueError("the model carries no LoRA adapter; call inject_lora first")
    return sorted(found, key=lambda item: item[0])


def _initial_value(name: str, parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    value = torch.zeros(parameter.shape, dtype=torch.float32)
    if name.endswith(".lora_A.weight"):
        bound = 1.0 / math.sqrt(parameter.shape[1])
        value.uniform_(-bound, bound, generator=generator)
    return value.to(parameter.device)
