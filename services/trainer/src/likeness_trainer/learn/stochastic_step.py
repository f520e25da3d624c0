"""One stochastic step of the sampling chain and its log-density: CPS or Flow-SDE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from likeness_trainer.wan.sampler_config import StepKind


def euler_step(latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Returns the latents after one deterministic step: ``x + (s' - s) v``."""
    return latents + (sigma_next - sigma) * velocity


def predict_video(latents: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """Returns the one-step prediction of the clean latents: ``x0 = x - s v``."""
    return latents - sigma * velocity


def cps_mean_and_std(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> tuple[Tensor, float]:
    """Returns mean and standard deviation of the next latents under coefficients-preserving sampling.

    With ``x0 = x - s v``, ``x1 = x + (1 - s) v`` and ``q = s' sin(a pi / 2)`` the next latents are Gaussian with
    mean ``(1 - s') x0 + sqrt(s'^2 - q^2) x1`` and standard deviation ``q``: the amounts of video and noise stay those
    of the schedule (Flow-CPS, arXiv 2509.05952). At ``s' = 0`` the deviation is 0 and the step is deterministic.

    Args:
        latents, velocity: float32 [B, C, T, h, w].
        noise_level: ``a`` in (0, 1].
    """
    video = predict_video(latents, velocity, sigma)
    noise = latents + (1.0 - sigma) * velocity
    std = sigma_next * math.sin(noise_level * math.pi / 2.0)
    mean = (1.0 - sigma_next) * video + math.sqrt(sigma_next**2 - std**2) * noise
    return mean, std


def flow_sde_mean_and_std(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float, largest_sigma: float
) -> tuple[Tensor, float]:
    """Returns mean and standard deviation of the next latents under the SDE that shares the flow's marginals.

    With ``D = s' - s`` and ``h = a sqrt(s / (1 - s))``: mean ``x (1 + h^2 D / (2 s)) + v (1 + h^2 (1 - s) / (2 s)) D``
    and standard deviation ``h sqrt(-D)`` (Eq. 9 of Flow-GRPO, arXiv 2505.05470). One Euler-Maruyama step leaves more
    noise than the schedule says, and it is not deterministic at ``s' = 0``: the last step must be an `euler_step`.

    Args:
        latents, velocity: float32 [B, C, T, h, w].
        noise_level: ``a`` in (0, 1].
        largest_sigma: noise level of step 1, which stands for ``s`` in the denominator of ``h`` at pure noise (s = 1).
    """
    delta = sigma_next - sigma
    h_squared = noise_level**2 * sigma / (1.0 - min(sigma, largest_sigma))
    drift = latents * (1.0 + h_squared * delta / (2.0 * sigma))
    mean = drift + velocity * ((1.0 + h_squared * (1.0 - sigma) / (2.0 * sigma)) * delta)
    return mean, math.sqrt(h_squared * -delta)


def next_latents_distribution(
    kind: StepKind, latents: Tensor, velocity: Tensor, sigmas: Sequence[float], step: int, noise_level: float
) -> tuple[Tensor, float]:
    """Returns mean and standard deviation of the latents after a stochastic step of the chain.

    Args:
        latents, velocity: float32 [B, C, T, h, w].
        sigmas: noise levels of the whole chain, from 1 down to 0.
        step: index of the step that goes from ``sigmas[step]`` to ``sigmas[step + 1]``.
    """
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    if kind == "cps":
        return cps_mean_and_std(latents, velocity, sigma, sigma_next, noise_level)
    return flow_sde_mean_and_std(latents, velocity, sigma, sigma_next, noise_level, largest_sigma=sigmas[1])


def gaussian_log_prob(sample: Tensor, mean: Tensor, std: float) -> Tensor:
    """Returns log N(sample; mean, std^2), averaged over the elements of each latent frame: float32 [B, T].

    Args:
        sample, mean: float32 [B, C, T, h, w]; anything narrower biases the ratio by about its clip range.
        std: standard deviation, above 0.
    """
    if sample.dtype != torch.float32 or mean.dtype != torch.float32:
        raise TypeError(f"log-densities need float32, got {sample.dtype} and {mean.dtype}")
    log_prob = -((sample - mean) ** 2) / (2.0 * std**2) - math.log(std) - 0.5 * math.log(2.0 * math.pi)
    return log_prob.mean(dim=(1, 3, 4))


def velocity_kl(velocity: Tensor, reference: Tensor, sigma: float) -> Tensor:
    """Returns the divergence from the reference model, one value a sample: float32 [B].

    ``mean((v - v_ref)^2) / (2 s^2)``, the KL divergence of one-step predictions in velocity space.
    """
    return ((velocity - reference) ** 2).mean(dim=(1, 2, 3, 4)) / (2.0 * sigma**2)
