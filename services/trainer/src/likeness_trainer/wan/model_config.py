"""Settings of the model. Apart from module.py, because importing DiffSynth takes seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

DTYPES = ("float32", "bfloat16", "float16")
EXPERTS = ("dit", "dit2")


class BaseLora(BaseModel):
    """A LoRA that becomes part of the base model when it is loaded, such as a few-step distillation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """A safetensors file with PEFT's, ComfyUI's or diffusers' names, or a PEFT folder."""
    expert: Literal["dit", "dit2"]
    """Which DiT it is merged into: `dit` (high noise, or the only one) or `dit2` (low noise)."""
    strength: float = 1.0
    """What the change of the weights is multiplied by."""

    @field_validator("strength")
    @classmethod
    def _finite_and_not_zero(cls, value: float) -> float:
        if not math.isfinite(value) or value == 0.0:
            raise ValueError(f"strength is {value}; allowed: any number but 0")
        return value


@dataclass(frozen=True)
class MergedLora:
    """What a checkpoint records of a file that was merged into its base."""

    expert: str
    path: str
    strength: float
    sha256: str
    """Of the weights, and of their adapter_config.json where there is one."""

    @property
    def contents(self) -> tuple[str, float, str]:
        """What was merged, wherever the file lay."""
        return self.expert, self.strength, self.sha256

    def __str__(self) -> str:
        return f"{self.path} ({self.expert}, strength {self.strength:g}, SHA-256 {self.sha256[:12]})"


class WanModelConfig(BaseModel):
    """Which model to load and which adapters to train in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_paths: dict[str, str | list[str]] | list[str | list[str]] | str
    """Mapping of dit, dit2, vae, text_encoder to a file, its shards or their .safetensors.index.json; or a list of
    files; or a JSON file of either."""
    tokenizer_path: str
    """Folder with the tokenizer of the text encoder."""
    base_loras: list[BaseLora] = []
    """LoRA files merged into the base, in this order, before the adapters are added."""
    architecture: str = "wan"
    """Architecture named in the header of exported LoRA files, for example wan-2.2-i2v-a14b."""
    trainable_models: list[str] = ["dit"]
    """`dit`: every DiT expert that the window evaluates; `dit2`: the low-noise expert alone."""
    lora_target_modules: str = "q,k,v,o,ffn.0,ffn.2"
    """Comma-separated layers of each block that get an adapter."""
    lora_rank: int = Field(32, ge=1)
    """Rank of the adapters."""
    lora_alpha: float | None = Field(None, gt=0)
    """Scale of the adapters times their rank; the rank itself when not set."""
    torch_dtype: str = "bfloat16"
    """Precision of the frozen weights: float32, bfloat16 or float16. Adapters are always float32."""
    device: str = "auto"
    """`auto` takes CUDA when there is one."""
    use_gradient_checkpointing: bool = True
    """Recompute DiT blocks in the backward pass instead of keeping their activations."""
    use_gradient_checkpointing_offload: bool = False
    """Keep the checkpoints themselves in CPU memory."""

    @field_validator("trainable_models")
    @classmethod
    def _known_experts(cls, value: list[str]) -> list[str]:
        if not value or set(value) - set(EXPERTS):
            raise ValueError(f"trainable_models is {value}; choose from {list(EXPERTS)}")
        return value

    @field_validator("torch_dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"torch_dtype is {value!r}; choose from {list(DTYPES)}")
        return value
