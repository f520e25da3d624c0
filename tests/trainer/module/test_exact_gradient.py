"""A chain whose policy gradient is known exactly: one number as video, a linear model, a quadratic reward.

Every step is linear and Gaussian, so the expected reward is a polynomial of the step's own coefficients; the estimator
has to have that gradient as its mean, whatever the step kind, the window and the baseline are.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from likeness_trainer.learn.advantage import group_advantages
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import run_branches
from likeness_trainer.learn.stochastic_step import next_latents_distribution
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients
from likeness_trainer.learn.window import Window

SAMPLES = 200_000
SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.0)
START, TARGET = 0.8, 0.5


class LinearModel:
    """velocity = weight[step] x, with one weight a step."""

    def __init__(self, kind: str) -> None:
        self.weights = torch.tensor([0.5, 0.4, 0.3, 0.6], requires_grad=True)
        self.sampler = SimpleNamespace(stochastic_step=kind, noise_level=0.7)
        self.schedule = SimpleNamespace(sigmas=SIGMAS, mid=1, final=3)

    def velocity(self, latents: torch.Tensor, step: int, conditioning: object) -> torch.Tensor:
        return self.weights[step] * latents


def exact_gradient(kind: str, stochastic: tuple[int, ...]) -> torch.Tensor:
    """Returns d E[-(x - target)^2] / d weight of each step, by propagating mean and variance; 0 for other steps."""
    model = LinearModel(kind)
    mean, variance = torch.tensor(START), torch.tensor(0.0)
    for step in range(stochastic[0], 4):
        if step in stochastic:
            slope, std = next_latents_distribution(kind, torch.ones(()), model.weights[step], SIGMAS, step, 0.7)
        else:
            slope, std = 1.0 + (SIGMAS[step + 1] - SIGMAS[step]) * model.weights[step].detach(), 0.0
        mean, variance = slope * mean, slope**2 * variance + std**2
    (-((mean - TARGET) ** 2) - variance).backward()
    return model.weights.grad


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("stochastic", [(1, 2), (1,), (2,)])
@pytest.mark.parametrize("kind", ["cps", "flow_sde"])
def test_the_mean_of_the_estimator_is_the_policy_gradient(kind, stochastic, baseline) -> None:
    model = LinearModel(kind)
    conditioning = SimpleNamespace(first_frame_latents=None)
    noise = torch.randn(len(stochastic), SAMPLES, 1, 1, 1, 1, generator=torch.Generator().manual_seed(3))
    start = torch.full((1, 1, 1, 1, 1), START)
    window = Window(stochastic, stochastic)
    trajectory, video = run_branches(model, conditioning, start, noise, range(SAMPLES), window)
    rewards = -((video.flatten().double().numpy() - TARGET) ** 2)
    advantages = group_advantages(rewards[:, None], baseline, std=np.array(1.0 - 1e-4), clip=1e9)
    scored = ScoredTrajectory(trajectory, conditioning, torch.from_numpy(advantages).float())
    accumulate_gradients(model, [scored], PolicyGradientConfig(kl_weight=0.0, baseline=baseline))
    estimate = -model.weights.grad * len(stochastic)  # the objective is a mean over the window's steps
    torch.testing.assert_close(estimate, exact_gradient(kind, stochastic), atol=0.01, rtol=0.03)
