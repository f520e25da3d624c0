"""The update's invariants on the toy model."""

import pytest
import torch

from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import sample_group
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients, objective_terms, step_terms


def scored(module, conditioning, branch_batch: int = 4, name: str = "update") -> list[ScoredTrajectory]:
    advantages = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, 0.5], [0.3, 0.2, -1.5], [-0.3, -0.2, 0.5]])
    return [
        ScoredTrajectory(trajectory, conditioning, advantages[list(trajectory.samples)])
        for trajectory, _ in sample_group(module, conditioning, 4, branch_batch, (name,))
    ]


def gradients(module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.lora_parameters()]


@pytest.mark.parametrize("ratio", ["standard", "guard"])
@pytest.mark.parametrize("kind", ["cps", "flow_sde"])
@pytest.mark.parametrize("branch_batch", [1, 3])
def test_every_ratio_is_exactly_1_before_the_first_update(
    module, conditioning, branch_batch, kind, ratio, monkeypatch
) -> None:
    monkeypatch.setattr(module, "sampler", module.sampler.model_copy(update={"stochastic_step": kind}))
    config = PolicyGradientConfig(ratio=ratio)
    statistics = accumulate_gradients(module, scored(module, conditioning, branch_batch), config)
    assert len(statistics.ratios) == 3 * len(range(0, 4, branch_batch))
    assert statistics.ratio_deviation == 0.0
    assert statistics.clip_fraction == 0.0


@pytest.mark.parametrize("ratio", ["standard", "guard"])
def test_ratios_leave_1_once_the_adapters_have_moved(module, conditioning, ratio) -> None:
    batches = scored(module, conditioning)
    with torch.no_grad():
        for parameter in module.lora_parameters():
            parameter *= 1.1
    assert accumulate_gradients(module, batches, PolicyGradientConfig(ratio=ratio)).ratio_deviation > 0.0


def peak_bytes_saved_for_backward(model, conditioning, config) -> int:
    """Returns the most memory that graphs held at once during an update, measured."""
    batches = [
        ScoredTrajectory(trajectory, conditioning, torch.ones(2, 3))
        for trajectory, _ in sample_group(model, conditioning, 2, 2, ("memory",))
    ]
    held = peak = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal held, peak
            self.tensor = tensor
            held += tensor.nbytes
            peak = max(peak, held)

        def __del__(self) -> None:
            nonlocal held
            held -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        accumulate_gradients(model, batches, config)
    assert held == 0
    return peak


def test_the_memory_of_the_update_does_not_grow_with_the_window(make_module, conditioning) -> None:
    config = PolicyGradientConfig(kl_weight=0.1)
    short, long = (
        peak_bytes_saved_for_backward(make_module({"mid_timestep": mid, "final_timestep": 7}), conditioning, config)
        for mid in (6, 3)
    )
    assert short > 1_000_000
    assert long == pytest.approx(short, rel=0.02)


def test_gradients_reach_the_adapters_and_nothing_else(module, conditioning) -> None:
    accumulate_gradients(module, scored(module, conditioning), PolicyGradientConfig())
    adapters = {id(parameter) for parameter in module.lora_parameters()}
    assert all(parameter.grad.abs().max() > 0 for parameter in module.lora_parameters())
    assert all(parameter.grad is None for parameter in module.parameters() if id(parameter) not in adapters)


def test_the_deterministic_last_step_carries_no_policy_gradient(module, conditioning) -> None:
    (batch,) = scored(module, conditioning)
    terms = step_terms(module, batch, 3, PolicyGradientConfig(kl_weight=0.0))
    assert not terms.policy_loss.requires_grad
    assert terms.policy_loss.item() == 0.0


def test_the_divergence_has_a_gradient_and_is_zero_without_an_adapter(module, conditioning) -> None:
    (batch,) = scored(module, conditioning)
    terms = step_terms(module, batch, 3, PolicyGradientConfig(kl_weight=1.0))
    assert terms.kl.item() > 0
    terms.kl.backward()
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in module.lora_parameters())
    with torch.no_grad():
        for parameter in module.lora_parameters():
            parameter.zero_()
    assert step_terms(module, batch, 3, PolicyGradientConfig(kl_weight=1.0)).kl.item() == 0.0


def test_backpropagating_step_by_step_equals_one_backward_of_the_sum(module, conditioning) -> None:
    config = PolicyGradientConfig(kl_weight=0.1)
    batches = scored(module, conditioning, branch_batch=2)
    accumulate_gradients(module, batches, config)
    by_step = gradients(module)
    for parameter in module.lora_parameters():
        parameter.grad = None
    sum(term for term, _, _ in objective_terms(module, batches, config)).backward()
    for ours, whole in zip(by_step, gradients(module), strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-8, rtol=1e-4)


def test_batches_of_branches_give_the_gradient_of_the_whole_group(module, conditioning) -> None:
    config = PolicyGradientConfig(kl_weight=0.1)
    accumulate_gradients(module, scored(module, conditioning, branch_batch=4), config)
    whole = gradients(module)
    for parameter in module.lora_parameters():
        parameter.grad = None
    accumulate_gradients(module, scored(module, conditioning, branch_batch=3), config)
    for ours, theirs in zip(gradients(module), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-2)


def test_gradient_checkpointing_gives_the_same_gradients(make_module, module, conditioning) -> None:
    checkpointed = make_module(use_gradient_checkpointing=True)
    with torch.no_grad():
        for ours, theirs in zip(checkpointed.lora_parameters(), module.lora_parameters(), strict=True):
            ours.copy_(theirs)
    config = PolicyGradientConfig(kl_weight=0.1)
    batches = scored(module, conditioning)
    accumulate_gradients(module, batches, config)
    accumulate_gradients(checkpointed, batches, config)
    for ours, theirs in zip(gradients(checkpointed), gradients(module), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_uphill_raises_the_density_of_what_was_preferred(module, conditioning) -> None:
    (batch,) = scored(module, conditioning)
    config = PolicyGradientConfig(kl_weight=0.0, clip_range=1.0)
    before = accumulate_gradients(module, [batch], config)
    with torch.no_grad():
        for parameter in module.lora_parameters():
            parameter -= 1e-2 * parameter.grad / parameter.grad.norm()
    after = accumulate_gradients(module, [batch], config)
    assert after.loss < before.loss
