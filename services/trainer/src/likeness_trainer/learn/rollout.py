"""Sampling a group: one shared prefix, then stochastic branches; frames leave while the next branch is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.stochastic_step import (
    euler_step,
    gaussian_log_prob,
    next_latents_distribution,
    predict_video,
)
from likeness_trainer.learn.window import Window, whole_window
from likeness_trainer.wan.module import Conditioning, WanModule

FrameSink = Callable[[int, int, NDArray[np.uint8]], None]
"""Takes (sample index in the group, index of the first frame, uint8 RGB frames [t, H, W, 3])."""


@dataclass(frozen=True)
class Trajectory:
    """What the update needs of one batch of branches. Everything is float32: a bf16 latent would bias the ratio."""

    samples: range
    """Indices of the branches in their group."""
    window: Window
    inputs: list[Tensor]
    """Latents [B, C, T, h, w] entering each stochastic step, and those after the last of them."""
    old_mean: list[Tensor]
    """Mean [B, C, T, h, w] of the latents after each stochastic step when it was sampled."""
    old_log_prob: list[Tensor]
    """Log-density [B, T] of each stochastic step when it was sampled."""


@torch.no_grad()
def run_prefix(model: WanModule, conditioning: Conditioning, noise: Tensor, num_steps: int | None = None) -> Tensor:
    """Returns the latents [B, C, T, h, w] after the steps that a group shares, from noise of the same shape.

    Args:
        num_steps: how many; those before the configured window when not given.
    """
    latents = noise.to(model.device)
    for step in range(model.schedule.mid if num_steps is None else num_steps):
        latents = ode_step(model, latents, step, conditioning)
    return latents


@torch.no_grad()
def run_branches(
    model: WanModule,
    conditioning: Conditioning,
    start: Tensor,
    branch_noise: Tensor,
    samples: range,
    window: Window | None = None,
) -> tuple[Trajectory, Tensor]:
    """Returns the trajectory of a batch of branches and their final latents [B, C, T, h, w].

    Args:
        start: latents [1, C, T, h, w] shared by the group, those that enter the window's first step.
        branch_noise: float32 [S, B, C, T, h, w], standard normal, one slice a stochastic step.
        window: the configured window when not given.
    """
    window = window or whole_window(model.schedule)
    sigmas, sampler = model.schedule.sigmas, model.sampler
    latents = start.expand(branch_noise.shape[1], *start.shape[1:]).contiguous()
    trajectory = Trajectory(samples, window, [latents], [], [])
    for step, noise in zip(window.stochastic, branch_noise, strict=True):
        velocity = model.velocity(latents, step, conditioning)
        mean, std = next_latents_distribution(
            sampler.stochastic_step, latents, velocity, sigmas, step, sampler.noise_level
        )
        latents = mean + std * noise.to(mean)
        trajectory.old_mean.append(mean)
        trajectory.old_log_prob.append(gaussian_log_prob(latents, mean, std))
        latents = keep_first_frame(latents, conditioning)
        trajectory.inputs.append(latents)
    final = model.schedule.final
    for step in range(window.stochastic[-1] + 1, final):
        latents = ode_step(model, latents, step, conditioning)
    video = predict_video(latents, model.velocity(latents, final, conditioning), sigmas[final])
    return trajectory, keep_first_frame(video, conditioning)


def sample_group(
    model: WanModule,
    conditioning: Conditioning,
    group_size: int,
    branch_batch: int,
    seed: tuple[int | str, ...],
    window: Window | None = None,
) -> Iterator[tuple[Trajectory, Tensor]]:
    """Yields (trajectory, final latents [B, C, T, h, w]) of each batch of branches; the next is computed on demand.

    Args:
        conditioning: on the model's device.
        seed: what the noise depends on, for example (run seed, step, prompt index).
        window: the configured window when not given.
    """
    window = window or whole_window(model.schedule)
    shape = conditioning.latent_shape
    start = run_prefix(model, conditioning, gaussian_noise((1, *shape), *seed, "prefix"), window.start)
    for first in range(0, group_size, branch_batch):
        samples = range(first, min(first + branch_batch, group_size))
        noise = [gaussian_noise((len(window.stochastic), *shape), *seed, "branch", g) for g in samples]
        yield run_branches(model, conditioning, start, torch.stack(noise, dim=1), samples, window)


def send_decoded(model: WanModule, video_latents: Tensor, samples: range, sink: FrameSink) -> None:
    """Decodes a batch of latents [B, C, T, h, w] latent frame by latent frame and hands each chunk to `sink`."""
    first_frame = 0
    for frames in model.decode(video_latents):
        for row, sample in enumerate(samples):
            sink(sample, first_frame, frames[row])
        first_frame += frames.shape[1]


@torch.no_grad()
def sample_latents(model: WanModule, conditioning: Conditioning, noise: Tensor) -> Tensor:
    """Returns latents sampled without stochastic steps, as the model is used after training: [B, C, T, h, w].

    All steps of the chain run, whatever the window is.
    """
    latents = noise.to(model.device)
    for step in range(model.schedule.num_steps):
        latents = ode_step(model, latents, step, conditioning)
    return latents


def ode_step(model: WanModule, latents: Tensor, step: int, conditioning: Conditioning) -> Tensor:
    """Returns the latents after one deterministic step, its first latent frame held where the model fixes it."""
    sigmas = model.schedule.sigmas
    latents = keep_first_frame(latents, conditioning)
    latents = euler_step(latents, model.velocity(latents, step, conditioning), sigmas[step], sigmas[step + 1])
    return keep_first_frame(latents, conditioning)


def keep_first_frame(latents: Tensor, conditioning: Conditioning) -> Tensor:
    """Returns latents whose first frame is the given picture, for models that work so (TI2V); else the latents."""
    fixed = conditioning.first_frame_latents
    if fixed is None:
        return latents
    return torch.cat([fixed.to(latents).expand(latents.shape[0], *fixed.shape[1:]), latents[:, :, 1:]], dim=2)
