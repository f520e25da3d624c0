"""Settings of the sampling chain. Apart from scheduler.py, because importing DiffSynth takes seconds."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from likeness_trainer.wan.model_config import EXPERTS

StepKind = Literal["cps", "flow_sde"]
GuidanceScale = float | dict[str, float]


class SamplerConfig(BaseModel):
    """How videos are sampled, and which steps are trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_inference_steps: int = Field(8, ge=2, le=1000)
    """Euler steps from noise to video."""
    mid_timestep: int = Field(4, ge=0)
    """First step of the trained window; the steps before it run without gradient."""
    final_timestep: int = Field(7, ge=1)
    """Last step that runs. Before the end of the chain, its one-step prediction of the video is decoded."""
    shift: float = Field(5.0, gt=0)
    """Time shift of the schedule; 5 is what Wan uses."""
    boundary: float = Field(0.9, ge=0, le=1)
    """Noise level below which a two-expert model uses its low-noise expert: 0.9 for I2V, 0.875 for T2V."""
    stochastic_step: StepKind = "cps"
    """How noise enters the steps of the window: `cps` keeps the schedule's amounts of video and noise, `flow_sde` is
    the SDE of Flow-GRPO."""
    noise_level: float = Field(0.7, gt=0, le=1)
    """Amount of fresh noise in the stochastic steps of the window, `a` in both kinds of step."""
    guidance_scale: GuidanceScale = 1.0
    """Classifier-free guidance in rollout, update, evaluation; for two experts also {dit: 3.5, dit2: 3.5}. 1: none,
    and the negative prompt is not evaluated."""
    negative_prompt: str = ""
    """What guidance leads away from; read where guidance_scale is not 1."""

    @property
    def guided(self) -> bool:
        """Whether any step evaluates the negative prompt."""
        return any(self.guidance_scale_of(expert) != 1.0 for expert in EXPERTS)

    def guidance_scale_of(self, expert: str) -> float:
        """Returns the guidance scale of the steps that an expert (`dit` or `dit2`) evaluates."""
        return self.guidance_scale[expert] if isinstance(self.guidance_scale, dict) else self.guidance_scale

    @field_validator("guidance_scale")
    @classmethod
    def _guidance_scales_are_usable(cls, value: GuidanceScale) -> GuidanceScale:
        if isinstance(value, dict) and set(value) != set(EXPERTS):
            raise ValueError(f"guidance_scale names {sorted(value)}; it takes one number, or both of {list(EXPERTS)}")
        for scale in value.values() if isinstance(value, dict) else (value,):
            if not (math.isfinite(scale) and scale >= 0.0):
                raise ValueError(f"guidance_scale is {scale}, allowed: 0 or more")
        return value

    @model_validator(mode="after")
    def _window_lies_inside_the_chain(self) -> SamplerConfig:
        if self.final_timestep >= self.num_inference_steps:
            raise ValueError(
                f"final_timestep is {self.final_timestep}; the last of {self.num_inference_steps} steps has index "
                f"{self.num_inference_steps - 1}"
            )
        if self.mid_timestep >= self.final_timestep:
            raise ValueError(
                f"mid_timestep is {self.mid_timestep}; it must be below final_timestep ({self.final_timestep}), "
                "because the final step is deterministic and cannot carry a policy gradient alone"
            )
        return self
