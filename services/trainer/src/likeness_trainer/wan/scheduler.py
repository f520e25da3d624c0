"""The Euler chain of a flow-matching video model: its noise levels, its window and the expert of each step.

Notation: ``x_s = (1 - s) x0 + s eps``, velocity ``v = eps - x0``, ``s`` the noise level (sigma):
1 is noise, 0 is video.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffsynth.diffusion import FlowMatchScheduler

from likeness_trainer.wan.sampler_config import SamplerConfig


@dataclass(frozen=True)
class EulerSchedule:
    """Noise levels of the chain and the window inside it."""

    sigmas: tuple[float, ...]
    """N + 1 noise levels, from 1 down to 0."""
    mid: int
    final: int
    boundary: float

    @classmethod
    def from_config(cls, config: SamplerConfig) -> EulerSchedule:
        """Returns the schedule that DiffSynth's FlowMatchScheduler("Wan") uses for these settings."""
        scheduler = FlowMatchScheduler("Wan")
        scheduler.set_timesteps(config.num_inference_steps, shift=config.shift)
        sigmas = (*(float(sigma) for sigma in scheduler.sigmas), 0.0)
        return cls(sigmas, config.mid_timestep, config.final_timestep, config.boundary)

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def prefix(self) -> range:
        """Steps shared by a whole group, run without gradient."""
        return range(self.mid)

    @property
    def window(self) -> range:
        """Steps with gradient, the deterministic last one included."""
        return range(self.mid, self.final + 1)

    @property
    def stochastic_steps(self) -> range:
        """Steps that add noise and so carry a policy gradient: the window without its last step."""
        return range(self.mid, self.final)

    def timestep(self, step: int) -> float:
        """Returns what the DiT is conditioned on: 1000 times the noise level."""
        return 1000.0 * self.sigmas[step]

    def uses_low_noise_expert(self, step: int) -> bool:
        """Returns whether a two-expert model evaluates its low-noise expert (`dit2`) at this step."""
        return self.timestep(step) < self.boundary * 1000.0
