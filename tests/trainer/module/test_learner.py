"""The learner: steps that are not finite, the average of the adapters, the adapted weight, and its checkpoint."""

import math
from pathlib import Path

import pytest
import torch

from likeness_trainer.config import OptimizerConfig
from likeness_trainer.learn.learner import Learner
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import sample_group
from likeness_trainer.learn.update import ScoredTrajectory
from likeness_trainer.run.checkpoint import Retention, load_checkpoint, save_checkpoint

ALGORITHM = PolicyGradientConfig(kl_weight=0.1, kl_target=0.01)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, ema_decay=0.5)


@pytest.fixture
def learner(module) -> Learner:
    return Learner(module, OPTIMIZER, ALGORITHM)


@pytest.fixture
def batches(module, conditioning) -> list[ScoredTrajectory]:
    advantages = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -0.5]])
    return [ScoredTrajectory(t, conditioning, advantages) for t, _ in sample_group(module, conditioning, 2, 2, ("l",))]


def adapters(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.lora_parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_a_fault_before_the_update_moves_nothing_and_is_counted(learner, module, batches) -> None:
    before = learner.checksum()
    assert learner.update(batches, 0, "the reward is broken") == {
        "skipped": 1, "skipped_because": "the reward is broken",
    }  # fmt: skip
    assert learner.update([], 1, "again")["skipped"] == 1
    assert learner.skipped_in_a_row == 2
    assert learner.checksum() == before
    assert not learner.optimizer.state


def test_a_loss_that_is_not_finite_moves_nothing(learner, module, batches) -> None:
    before = learner.checksum()
    batches[0].advantages[0, 0] = float("nan")
    metrics = learner.update(batches, 0)
    assert metrics == {"skipped": 1, "skipped_because": "the loss is nan"}
    assert learner.checksum() == before
    assert learner.kl_weight == 0.1


def test_a_gradient_that_is_not_finite_is_named_by_its_parameter(learner, module, batches) -> None:
    before = learner.checksum()
    block = module.pipe.dit2.blocks[2].self_attn.q.lora_B["default"].weight
    handle = block.register_hook(lambda gradient: gradient * float("inf"))
    metrics = learner.update(batches, 0)
    handle.remove()
    assert "dit2.blocks.2.self_attn.q.lora_B.default.weight is not finite" in metrics["skipped_because"]
    assert learner.checksum() == before
    assert all(parameter.grad is None for parameter in module.lora_parameters())


def test_a_finite_step_ends_the_row_of_skipped_ones(learner, batches) -> None:
    learner.update([], 0, "broken")
    metrics = learner.update(batches, 1)
    assert metrics["skipped"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert learner.skipped_in_a_row == 0


def test_without_batches_nothing_moves_and_nothing_counts(learner) -> None:
    before = learner.checksum()
    assert learner.update([], 0) == {"skipped": 0}
    assert (learner.checksum(), learner.skipped_in_a_row) == (before, 0)


def test_the_weight_of_the_divergence_moves_after_each_step(learner, batches) -> None:
    first = learner.update(batches, 0)
    second = learner.update(batches, 1)
    assert first["kl_weight"] == 0.1
    error = max(-0.2, min(0.2, first["kl"] / 0.01 - 1.0))
    assert second["kl_weight"] == pytest.approx(0.1 * (1.0 + 0.1 * error))
    assert second["kl_weight"] != 0.1


def test_the_adapted_weight_is_the_one_in_the_loss(module, batches) -> None:
    learner = Learner(module, OptimizerConfig(learning_rate=1e-12), ALGORITHM)
    first = learner.update(batches, 0)
    learner.kl_weight = 2.1
    second = learner.update(batches, 1)
    assert second["loss"] - first["loss"] == pytest.approx(2.0 * first["kl"], rel=1e-3)


def test_the_average_follows_its_recurrence(learner, module, batches) -> None:
    expected = adapters(module)
    for step in range(3):
        learner.update(batches, step)
        decay = min(0.5, (2.0 + step) / (11.0 + step))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, adapters(module), strict=True)]
    trained = adapters(module)
    with learner.evaluated():
        for ours, theirs in zip(adapters(module), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert not equal(adapters(module), trained)
    assert equal(adapters(module), trained)


def test_without_an_average_the_adapters_themselves_are_evaluated(module, batches) -> None:
    learner = Learner(module, OptimizerConfig(), ALGORITHM)
    trained = adapters(module)
    with learner.evaluated():
        assert equal(adapters(module), trained)
    assert learner.checkpoint(0).published is not learner.checkpoint(0).average


def test_a_restored_learner_goes_on_bit_for_bit(learner, module, batches, tmp_path: Path) -> None:
    learner.update(batches, 0)
    learner.update([], 1, "broken")
    path = save_checkpoint(tmp_path, learner.checkpoint(2), Retention(1))
    metrics = learner.update(batches, 2)
    expected = adapters(module)
    with learner.evaluated():
        expected_average = adapters(module)

    restored = Learner(module, OPTIMIZER, ALGORITHM)
    restored.restore(load_checkpoint(path))
    assert restored.skipped_in_a_row == 1
    assert restored.update(batches, 2) == metrics
    assert equal(adapters(module), expected)
    with restored.evaluated():
        assert equal(adapters(module), expected_average)
