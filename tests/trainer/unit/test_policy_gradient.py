"""The clipped objective: its value, its gradient, and its agreement with an exactly known policy gradient."""

import pytest
import torch

from likeness_trainer.learn.policy_gradient import clipped_policy_loss, guard_log_ratio, standard_log_ratio
from likeness_trainer.learn.stochastic_step import gaussian_log_prob


def test_before_the_first_update_the_gradient_is_minus_advantage_times_score() -> None:
    log_prob = torch.tensor([[0.3, -0.2], [0.1, 0.7]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    result = clipped_policy_loss(standard_log_ratio(log_prob, log_prob.detach()), advantages, 1e-3)
    result.loss.backward()
    assert result.ratio.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert result.loss.item() == pytest.approx(-advantages.mean().item())
    torch.testing.assert_close(log_prob.grad, -advantages / 4)


@pytest.mark.parametrize(
    ("advantage", "shift", "moves"), [(1.0, 0.1, False), (1.0, -0.1, True), (-1.0, -0.1, False), (-1.0, 0.1, True)]
)
def test_the_clip_stops_only_moves_that_went_far_enough_already(advantage: float, shift: float, moves: bool) -> None:
    log_prob = torch.tensor([[shift]], requires_grad=True)
    result = clipped_policy_loss(log_prob, torch.tensor([[advantage]]), 0.01)
    result.loss.backward()
    assert bool(log_prob.grad.abs() > 0) is moves
    assert result.clipped.item() is (not moves)


def test_the_estimator_agrees_with_the_exact_policy_gradient_of_a_bandit() -> None:
    """One Gaussian action N(m, 1), reward -(a - 2)^2: d E[reward] / dm = -2 (m - 2), exactly."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor(0.5, requires_grad=True)
    actions = mean.detach() + torch.randn(200_000, generator=generator)
    rewards = -((actions - 2.0) ** 2)
    log_prob = torch.distributions.Normal(mean, 1.0).log_prob(actions)
    result = clipped_policy_loss(standard_log_ratio(log_prob, log_prob.detach()), rewards - rewards.mean(), 1e-3)
    result.loss.backward()
    assert -mean.grad.item() == pytest.approx(3.0, abs=0.05)


def test_the_guarded_ratio_is_the_noise_times_the_shift_of_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    shape, std = (3, 2, 4, 5, 5), 0.3
    old_mean, noise, shift = (torch.randn(shape, generator=generator) for _ in range(3))
    sample, mean = old_mean + std * noise, old_mean + 0.01 * shift
    result = guard_log_ratio(
        gaussian_log_prob(sample, mean, std), gaussian_log_prob(sample, old_mean, std), mean, old_mean, std
    )
    torch.testing.assert_close(result, (noise * 0.01 * shift).mean(dim=(1, 3, 4)), atol=1e-6, rtol=1e-4)


def test_the_guarded_ratio_is_centred_where_the_standard_one_has_drifted() -> None:
    generator = torch.Generator().manual_seed(1)
    old_mean, std = torch.zeros(20_000, 1, 1, 1, 1), 0.3
    mean = old_mean + 0.3
    sample = old_mean + std * torch.randn(old_mean.shape, generator=generator)
    densities = gaussian_log_prob(sample, mean, std), gaussian_log_prob(sample, old_mean, std)
    drifted, guarded = standard_log_ratio(*densities), guard_log_ratio(*densities, mean, old_mean, std)
    assert drifted.mean().item() == pytest.approx(-0.5, abs=0.03)  # -d^2 / (2 std^2) with d = std
    assert guarded.mean().item() == pytest.approx(0.0, abs=0.01)


def test_the_guarded_gradient_is_the_standard_one_times_the_deviation() -> None:
    generator = torch.Generator().manual_seed(2)
    old_mean, std = torch.zeros(2, 3, 2, 4, 4), 0.3
    sample = std * torch.randn(old_mean.shape, generator=generator)
    gradients = []
    for guard in (False, True):
        mean = old_mean.clone().requires_grad_()
        densities = gaussian_log_prob(sample, mean, std), gaussian_log_prob(sample, old_mean, std)
        log_ratio = guard_log_ratio(*densities, mean, old_mean, std) if guard else standard_log_ratio(*densities)
        result = clipped_policy_loss(log_ratio, torch.ones(2, 2), 1e-3)
        assert (result.ratio == 1.0).all()
        result.loss.backward()
        gradients.append(mean.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * std)
