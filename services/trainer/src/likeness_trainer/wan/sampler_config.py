"""Settings of the sampling chain. Apart from scheduler.py, because importing DiffSynth takes seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

StepKind = Literal["cps", "flow_sde"]


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
