"""The stochastic step against closed forms and torch.distributions."""

import math

import pytest
import torch

from likeness_trainer.learn.stochastic_step import (
    cps_mean_and_std,
    euler_step,
    flow_sde_mean_and_std,
    gaussian_log_prob,
    next_latents_distribution,
    predict_video,
    velocity_kl,
)


def pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 2, 4, 4, generator=generator), torch.randn(2, 3, 2, 4, 4, generator=generator)


def test_cps_without_noise_is_the_euler_step() -> None:
    latents, velocity = pair()
    mean, std = cps_mean_and_std(latents, velocity, 0.75, 0.625, 1e-9)
    assert std == pytest.approx(0.0, abs=1e-8)
    torch.testing.assert_close(mean, euler_step(latents, velocity, 0.75, 0.625), atol=1e-6, rtol=0)


def test_cps_keeps_the_amounts_of_video_and_noise() -> None:
    """With the true velocity of x = (1-s) x0 + s e the next latents hold (1-s') x0 and noise of variance s'^2."""
    video, noise = pair(1)
    sigma, sigma_next = 0.8333, 0.75
    latents = (1 - sigma) * video + sigma * noise
    mean, std = cps_mean_and_std(latents, noise - video, sigma, sigma_next, 0.7)
    assert std == pytest.approx(sigma_next * math.sin(0.35 * math.pi))
    kept = math.sqrt(sigma_next**2 - std**2)
    torch.testing.assert_close(mean, (1 - sigma_next) * video + kept * noise)


def test_the_last_step_is_deterministic_and_is_the_prediction_of_the_video() -> None:
    latents, velocity = pair(2)
    mean, std = cps_mean_and_std(latents, velocity, 0.4167, 0.0, 0.7)
    assert std == 0.0
    torch.testing.assert_close(mean, predict_video(latents, velocity, 0.4167))


SIGMAS = (1.0, 0.97222, 0.9375, 0.89286, 0.83333, 0.75, 0.625, 0.41667, 0.0)


def test_flow_sde_without_noise_is_the_euler_step() -> None:
    latents, velocity = pair()
    mean, std = flow_sde_mean_and_std(latents, velocity, 0.75, 0.625, 1e-6, 0.9722)
    assert std == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(mean, euler_step(latents, velocity, 0.75, 0.625))


def test_flow_sde_at_pure_noise_takes_the_noise_level_of_the_next_step_in_its_denominator() -> None:
    latents, velocity = pair()
    mean, std = next_latents_distribution("flow_sde", latents, velocity, SIGMAS, 0, 0.7)
    h = 0.7 * math.sqrt(1.0 / (1.0 - SIGMAS[1]))
    delta = SIGMAS[1] - 1.0
    assert std == pytest.approx(h * math.sqrt(-delta))
    torch.testing.assert_close(mean, latents * (1 + h**2 * delta / 2) + velocity * delta)


@pytest.mark.parametrize(
    ("kind", "stochastic", "final_std"),
    [
        ("cps", (), 0.053),
        ("cps", (4, 5, 6), 0.0526),
        ("flow_sde", (4, 5, 6), 0.0646),
        ("flow_sde", (4, 5, 6, 7), 0.406),
    ],
)
def test_the_spread_of_a_gaussian_data_set_after_the_chain(kind, stochastic, final_std) -> None:
    """Data N(0, 0.2^2), exact velocity: every step is linear, so its variance follows in closed form."""
    data_std, variance = 0.2, 1.0
    for step in range(8):
        sigma = SIGMAS[step]
        slope = (sigma - (1 - sigma) * data_std**2) / ((1 - sigma) ** 2 * data_std**2 + sigma**2)
        velocity = torch.tensor(slope)
        if step in stochastic:
            mean, std = next_latents_distribution(kind, torch.ones(()), velocity, SIGMAS, step, 0.7)
        else:
            mean, std = euler_step(torch.ones(()), velocity, sigma, SIGMAS[step + 1]), 0.0
        variance = float(mean) ** 2 * variance + std**2
    assert math.sqrt(variance) == pytest.approx(final_std, rel=0.01)


@pytest.mark.parametrize("kind", ["cps", "flow_sde"])
def test_log_density_equals_torch_distributions(kind) -> None:
    sample, latents = pair(3)
    velocity, _ = pair(6)
    mean, std = next_latents_distribution(kind, latents, velocity, SIGMAS, 5, 0.7)
    expected = torch.distributions.Normal(mean, std).log_prob(sample).mean(dim=(1, 3, 4))
    torch.testing.assert_close(gaussian_log_prob(sample, mean, std), expected)


def test_log_density_refuses_narrow_floats() -> None:
    sample, mean = pair(4)
    with pytest.raises(TypeError, match="float32"):
        gaussian_log_prob(sample.bfloat16(), mean, 0.3)


def test_velocity_kl_equals_the_kl_of_one_step_predictions() -> None:
    """x0 = x - s v with deviation s^2 on both sides: KL = |x0 - x0'|^2 / (2 s^4) = |v - v'|^2 / (2 s^2)."""
    velocity, reference = pair(5)
    sigma = 0.625
    ours, theirs = (torch.distributions.Normal(-sigma * v, sigma**2) for v in (velocity, reference))
    expected = torch.distributions.kl_divergence(ours, theirs).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(velocity_kl(velocity, reference, sigma), expected)
