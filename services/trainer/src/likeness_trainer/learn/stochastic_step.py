"""One stochastic step of the sampling chain and its log-density: coefficients-preserving sampling (CPS)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
