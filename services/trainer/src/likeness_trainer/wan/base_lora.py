"""LoRA files that become part of the base: read in any common naming, checked as a whole, merged into a DiT.

Few-step distillations of Wan are published as LoRAs for the DiT. Merged before an adapter is injected and before
weights are sharded, such a file is base model from then on: the reference of the divergence and what an adapter that
is switched off computes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffsynth.utils.state_dict_converters.wan_video_dit import WanVideoDiTFromDiffusers
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.lora_files import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME
from likeness_trainer.wan.model_config import BaseLora, MergedLora
from likeness_trainer.wan.model_files import resolve_path

DIFFUSERS_METADATA_KEY = "lora_adapter_metadata"
"""Entry of a safetensors header in which diffusers keeps the PEFT configuration, as JSON."""

_PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.", "model.")
_PARTS = re.compile(
    r"(?P<layer>.+)\.(?:(?P<down>lora_A|lora_down|lora\.down)(?:\.\w+)?\.weight"
    r"|(?P<up>lora_B|lora_up|lora\.up)(?:\.\w+)?\.weight|(?P<other>alpha|diff|diff_b|diff_m))"
)
_SHOWN_FAULTS = 5


@dataclass
class _LayerParts:
    """The tensors that a file holds for one layer."""

    file_layer: str
    """Name in the file, without its prefix; the patterns of a PEFT configuration match this one."""
    down: Tensor | None = None
    """A, [rank, in]."""
    up: Tensor | None = None
    """B, [out, rank]."""
    alpha: Tensor | None = None
    diff: Tensor | None = None
    diff_b: Tensor | None = None
    diff_m: Tensor | None = None

    @property
    def differences(self) -> dict[str, Tensor]:
        """What is added as it stands, by the kind of parameter that it changes."""
        kinds = {"weight": self.diff, "bias": self.diff_b, "modulation": self.diff_m}
        return {kind: difference for kind, difference in kinds.items() if difference is not None}


def merge_base_loras(pipe: Any, loras: Sequence[BaseLora]) -> tuple[MergedLora, ...]:
    """Adds every file of `loras` to the weights of its expert, in place and in order; returns what was merged.

    Raises:
        ModelLoadError: see `merge_lora`; or an expert that the model does not have.
    """
    merged = []
    for lora in loras:
        dit = getattr(pipe, lora.expert)
        if dit is None:
            raise ModelLoadError(
                f"model.base_loras: {lora.path} is for {lora.expert}, but model_paths holds one DiT only"
            )
        merged.append(merge_lora(dit, lora))
    return tuple(merged)


@torch.no_grad()
def merge_lora(dit: nn.Module, lora: BaseLora) -> MergedLora:
    """Adds one file to the weights of `dit`: ``W <- W + strength alpha / r B A``, computed in float32.

    Names may be those of PEFT (`base_model.model.`), ComfyUI (`diffusion_model.`, lora_A or lora_down) or diffusers
    (`transformer.blocks.0.attn1.to_q`). ``alpha`` is the file's tensor of that name, else that of the PEFT
    configuration, else ``r``. A `.diff`, `.diff_b` or `.diff_m` is added to the weight, bias or modulation of a layer,
    times the strength.

    Raises:
        ModelLoadError: names tensors that belong to no layer of the model, halves without the other half, and shapes
            that differ. Nothing is merged then.
    """
    files = _files_of(lora)
    tensors, config = _read(files)
    layers, faults = _by_layer(tensors)
    parameters = dict(dit.named_parameters())
    for layer, parts in layers.items():
        faults += _faults_of(layer, parts, parameters)
    if not faults and not layers:
        faults = ["it holds no LoRA"]
    if faults:
        shown = "; ".join(faults[:_SHOWN_FAULTS])
        more = f"; and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
        raise ModelLoadError(f"model.base_loras: {lora.path} does not fit {lora.expert}: {shown}{more}")
    for layer, parts in layers.items():  # one by one: the changes of all layers together are as large as the model
        _add(layer, parts, parameters, config, lora.strength)
    return MergedLora(lora.expert, lora.path, lora.strength, _sha256(files))


def _files_of(lora: BaseLora) -> list[Path]:
    """Returns the weights, and the configuration beside them where `path` is a PEFT folder."""
    path = Path(resolve_path(lora.path))
    files = [path / PEFT_WEIGHTS_NAME, path / PEFT_CONFIG_NAME] if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"model.base_loras: {file} does not exist")
    return files


def _read(files: list[Path]) -> tuple[dict[str, Tensor], LoraConfig | None]:
    """Returns the tensors of a LoRA, and its PEFT configuration where there is one."""
    try:
        with safe_open(str(files[0]), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            header = opened.metadata() or {}
    except Exception as error:
        raise ModelLoadError(f"model.base_loras: {files[0]} is no safetensors file: {error}") from error
    if len(files) == 2:
        return tensors, _config(json.loads(files[1].read_text(encoding="utf-8")))
    described = json.loads(header.get(DIFFUSERS_METADATA_KEY, "{}"))
    return tensors, _config(described) if described else None


def _config(described: Mapping[str, Any]) -> LoraConfig:
    """Returns what of a PEFT configuration the scale depends on; diffusers prefixes its keys by `transformer.`."""
    values = {name.removeprefix("transformer."): value for name, value in described.items()}
    names = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
    return LoraConfig(**{name: values[name] for name in names if values.get(name) is not None})


def _by_layer(tensors: Mapping[str, Tensor]) -> tuple[dict[str, _LayerParts], list[str]]:
    """Returns DiffSynth's name of each layer with its tensors, and what cannot be read as part of a LoRA."""
    layers: dict[str, _LayerParts] = {}
    faults = []
    for name, tensor in sorted(tensors.items()):
        match = _PARTS.fullmatch(_without_prefixes(name))
        if match is None:
            faults.append(f"{name} is no part of a LoRA that is known")
            continue
        kind = "down" if match["down"] else "up" if match["up"] else match["other"]
        parts = layers.setdefault(_model_name(match["layer"]), _LayerParts(match["layer"]))
        if getattr(parts, kind) is not None:
            faults.append(f"{name} is there twice, under other names")
        setattr(parts, kind, tensor)
    return layers, faults


def _without_prefixes(name: str) -> str:
    stripped = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if stripped is None else _without_prefixes(stripped)


def _model_name(layer: str) -> str:
    """Returns the name that DiffSynth's model has for a layer, given that or diffusers' name."""
    converted = WanVideoDiTFromDiffusers({f"{layer}.weight": None, f"{layer}.bias": None})
    return next((str(name).rsplit(".", 1)[0] for name in converted), layer)


def _faults_of(layer: str, parts: _LayerParts, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns why the tensors of a layer cannot be added to the model's; the shape of a change is that of B A."""
    name, down, up = parts.file_layer, parts.down, parts.up
    changes = list(parts.differences.items())
    faults = []
    if (down is None) != (up is None):
        faults.append(f"{name} has one half of a LoRA only")
    elif down is None and parts.alpha is not None:
        faults.append(f"{name} has an alpha without a LoRA")
    elif down is not None and up is not None:
        if down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
            faults.append(f"{name} has halves that cannot be multiplied, {list(up.shape)} and {list(down.shape)}")
        else:
            changes.append(("weight", torch.empty(up.shape[0], down.shape[1], device="meta")))
    for kind, change in changes:
        parameter = parameters.get(f"{layer}.{kind}")
        if parameter is None:
            faults.append(f"{name} is no layer of the model ({layer}.{kind} does not exist)")
        elif parameter.shape != change.shape:
            faults.append(f"{name} changes {layer}.{kind} {list(parameter.shape)} by {list(change.shape)}")
    return faults


def _add(layer: str, parts: _LayerParts, parameters: Mapping[str, nn.Parameter], config: Any, strength: float) -> None:
    """Adds the change of one layer to the model's weight and bias, in float32 and on their device."""
    for kind, difference in parts.differences.items():
        parameter = parameters[f"{layer}.{kind}"]
        parameter.copy_(parameter.float() + strength * difference.to(parameter.device, torch.float32))
    if parts.down is not None and parts.up is not None:
        weight = parameters[f"{layer}.weight"]
        down, up = (half.to(weight.device, torch.float32) for half in (parts.down, parts.up))
        weight.copy_(weight.float() + strength * _scale(parts, config) * (up @ down))


def _scale(parts: _LayerParts, config: LoraConfig | None) -> float:
    """Returns alpha / r of a layer, or alpha / sqrt(r) where PEFT's rank-stabilised scale was used."""
    assert parts.down is not None
    rank = parts.down.shape[0]
    if parts.alpha is not None:
        return float(parts.alpha.item()) / rank
    if config is None:
        return 1.0
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, parts.file_layer), config.lora_alpha)
    return float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
