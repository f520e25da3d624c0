"""The adapter alone learns, starts as the identity, can be switched off exactly, and is the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from likeness_trainer.wan.lora import (
    adapter_disabled,
    checksum,
    inject_lora,
    load_lora_state,
    lora_parameters,
    lora_rank_and_alpha,
    lora_state,
)


def test_default_targets_cover_every_linear_of_both_attentions_and_the_ffn(make_dit):
    dit = make_dit()
    inject_lora(dit, rank=4, alpha=4.0)
    # 2 blocks x (4 self-attention + 4 cross-attention + 2 feed-forward layers) x (A and B)
    assert len(lora_parameters(dit)) == 2 * 10 * 2
    assert type(dit).__name__ == "WanModel"


def test_a_target_selects_only_the_layers_of_that_name(make_dit):
    dit = make_dit()
    inject_lora(dit, rank=2, alpha=2.0, target_modules=["q", "ffn.2"])
    layers = {name.rsplit(".lora_", 1)[0] for name in lora_state(dit)}
    assert layers == {f"blocks.{n}.{part}" for n in (0, 1) for part in ("self_attn.q", "cross_attn.q", "ffn.2")}


def test_a_target_that_matches_nothing_is_named_with_what_exists(make_dit):
    with pytest.raises(ValueError, match=r"to_q, ffn\.9 matches no linear.*allowed: ffn\.0, ffn\.2, k, o, q, v"):
        inject_lora(make_dit(), rank=4, alpha=4.0, target_modules="q,to_q,ffn.9")


@pytest.mark.parametrize("target_modules", ["", " , ", []])
def test_an_empty_target_list_is_refused(make_dit, target_modules):
    with pytest.raises(ValueError, match="names nothing"):
        inject_lora(make_dit(), rank=4, alpha=4.0, target_modules=target_modules)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (-1, 1.0), (4, 0.0), (4, float("nan")), (4, float("inf"))])
def test_impossible_rank_or_alpha_is_refused(make_dit, rank, alpha):
    with pytest.raises(ValueError, match="allowed"):
        inject_lora(make_dit(), rank=rank, alpha=alpha)


def test_a_second_adapter_is_refused(make_dit):
    dit = make_dit()
    inject_lora(dit, rank=4, alpha=4.0)
    with pytest.raises(ValueError, match="already carries"):
        inject_lora(dit, rank=4, alpha=4.0)


def test_a_model_without_adapter_is_named(make_dit):
    for use in (lora_parameters, lora_state, checksum, lora_rank_and_alpha):
        with pytest.raises(ValueError, match="carries no LoRA adapter"):
            use(make_dit())


def test_a_fresh_adapter_is_the_identity(make_dit, velocity):
    with torch.no_grad():
        expected = velocity(make_dit())
        dit = make_dit()
        inject_lora(dit, rank=4, alpha=4.0)
        assert torch.equal(velocity(dit), expected)


def test_adapter_off_equals_the_base_and_on_again_equals_before(make_dit, make_trained_dit, velocity):
    with torch.no_grad():
        base = velocity(make_dit())
        dit = make_trained_dit()
        adapted = velocity(dit)
        assert not torch.allclose(adapted, base, atol=1e-3)
        with adapter_disabled(dit):
            assert torch.equal(velocity(dit), base)
            with adapter_disabled(dit):
                assert torch.equal(velocity(dit), base)
            assert torch.equal(velocity(dit), base), "the inner switch must not turn the adapter on"
        assert torch.equal(velocity(dit), adapted)


def test_the_adapter_is_on_again_after_an_error(make_trained_dit, velocity):
    dit = make_trained_dit()
    with torch.no_grad():
        adapted = velocity(dit)
        with pytest.raises(RuntimeError, match="inside"), adapter_disabled(dit):
            raise RuntimeError("inside")
        assert torch.equal(velocity(dit), adapted)


def test_gradients_reach_every_adapter_weight_and_nothing_else(make_trained_dit, velocity):
    dit = make_trained_dit()
    output = velocity(dit)
    with torch.no_grad(), adapter_disabled(dit):
        velocity(dit)  # a reference pass between forward and backward must leave the graph whole
    output.square().mean().backward()
    parameters = lora_parameters(dit)
    assert all(parameter.grad is not None and bool(parameter.grad.abs().max() > 0) for parameter in parameters)
    adapter = {id(parameter) for parameter in parameters}
    others = [parameter for parameter in dit.parameters() if id(parameter) not in adapter]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in others)


def test_a_bfloat16_base_keeps_its_dtype_and_gets_a_float32_adapter(make_dit, velocity):
    dit = make_dit(torch.bfloat16)
    inject_lora(dit, rank=4, alpha=4.0)
    parameters = lora_parameters(dit)
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert dit.blocks[0].self_attn.q.base_layer.weight.dtype == torch.bfloat16
    # 1e-5 is far below half a bfloat16 ULP of 0.05 (2e-4): only a float32 weight can hold the step.
    with torch.no_grad():
        before = parameters[0].clone()
        parameters[0] += 1e-5
    assert not torch.equal(parameters[0], before)
    output = velocity(dit)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in parameters)
    with torch.no_grad(), adapter_disabled(dit):
        assert torch.equal(velocity(dit), velocity(make_dit(torch.bfloat16)))


def test_initial_weights_depend_on_the_seed_and_on_no_global_state(make_dit):
    def first_checksum(global_seed: int, seed: int, dtype: torch.dtype = torch.float32) -> str:
        dit = make_dit(dtype)
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        inject_lora(dit, rank=4, alpha=4.0, seed=seed)
        assert torch.equal(torch.get_rng_state(), state), "injection must not draw from the global generator"
        return checksum(dit)

    assert first_checksum(1, seed=5) == first_checksum(2, seed=5)
    assert first_checksum(1, seed=5) == first_checksum(1, seed=5, dtype=torch.bfloat16)
    assert first_checksum(1, seed=5) != first_checksum(1, seed=6)


def test_initial_a_is_uniform_within_one_over_root_in_features(make_dit):
    dit = make_dit()
    inject_lora(dit, rank=16, alpha=16.0)
    state = lora_state(dit)
    query = state["blocks.0.self_attn.q.lora_A.weight"]  # [16, 96]: uniform in +-1/sqrt(96), std 1/sqrt(3 * 96)
    assert query.abs().max() <= 96**-0.5
    assert query.std().item() == pytest.approx((3 * 96) ** -0.5, rel=0.05)
    assert all(not tensor.any() for name, tensor in state.items() if ".lora_B." in name)


def test_state_round_trip_and_checksum_notice_one_bit(make_dit, make_trained_dit):
    trained = make_trained_dit()
    state = lora_state(trained)
    dit = make_dit()
    inject_lora(dit, rank=4, alpha=6.0, seed=99)
    assert checksum(dit) != checksum(trained)
    load_lora_state(dit, state)
    assert checksum(dit) == checksum(trained)
    assert len(checksum(dit)) == 64
    parameter = lora_parameters(dit)[0]
    with torch.no_grad():
        flat = parameter.view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(10.0))
    assert checksum(dit) != checksum(trained)


def test_state_is_a_copy(make_trained_dit):
    dit = make_trained_dit()
    state = lora_state(dit)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in lora_parameters(dit):
            parameter.zero_()
    assert all(torch.equal(state[name], kept[name]) for name in state)


def test_a_state_that_does_not_fit_is_named_and_writes_nothing(make_trained_dit):
    dit = make_trained_dit()
    before = checksum(dit)
    state = {name: torch.zeros_like(tensor) for name, tensor in lora_state(dit).items()}
    missing = "blocks.0.ffn.0.lora_A.weight"
    del state[missing]
    state["blocks.9.ffn.0.lora_A.weight"] = torch.zeros(4, 96)
    state["blocks.1.ffn.0.lora_A.weight"] = torch.zeros(8, 96)
    with pytest.raises(ValueError) as caught:
        load_lora_state(dit, state)
    message = str(caught.value)
    assert f"missing {missing}" in message
    assert "unexpected blocks.9.ffn.0.lora_A.weight" in message
    assert "blocks.1.ffn.0.lora_A.weight has shape (8, 96), the model needs (4, 96)" in message
    assert checksum(dit) == before
