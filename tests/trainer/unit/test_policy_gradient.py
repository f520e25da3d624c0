"""The clipped objective: its value, its gradient, and its agreement with an exactly known policy gradient."""

import pytest
import torch

from likeness_trainer.learn.policy_gradient import clipped_policy_loss, guard_log_ratio, standard_log_ratio


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
