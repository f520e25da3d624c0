"""What leaves the device: encoders after caching, the idle expert, activations. No result may change by it.

There is one memory on a machine without a GPU, so an expert is "on the device" as a copy of its own; weak references
to the copies tell which of them live.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from likeness_trainer.config import parse_config
from likeness_trainer.errors import ConfigError
from likeness_trainer.learn.feedback_config import RewardFeedbackConfig
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.reward_feedback import sample_in_graph
from likeness_trainer.learn.rollout import sample_group, sample_latents
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients
from likeness_trainer.wan.expert_swap import ExpertSwap

SHAPE = (1, 16, 3, 8, 8)
SPANNING = {"mid_timestep": 2}
"""A window whose steps 2 to 7 belong to both experts."""


def with_adapters(model):
    """Gives the adapters the numbers that `module` has, so that they do something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.lora_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.grad = None
    return model


def policy_gradient(model, conditioning) -> list[torch.Tensor]:
    advantages = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -0.5]])
    batches = [
        ScoredTrajectory(t, conditioning, advantages) for t, _ in sample_group(model, conditioning, 2, 2, ("m",))
    ]
    accumulate_gradients(model, batches, PolicyGradientConfig(kl_weight=0.1))
    return [parameter.grad for parameter in model.lora_parameters()]


def reward_feedback(model, conditioning) -> list[torch.Tensor]:
    """Gradients of the brightness of a video through decoder and window, with the divergence."""
    config = RewardFeedbackConfig(kl_weight=0.1)
    video = sample_in_graph(model, conditioning, gaussian_noise(SHAPE, "m"), config, lambda *chunk: None)
    (video.pixels.mean() + video.kl.sum()).backward()
    return [parameter.grad for parameter in model.lora_parameters()]


@pytest.fixture(scope="module")
def spanning(make_module):
    return make_module(sampler=SPANNING)


@pytest.fixture(scope="module")
def expected(spanning, conditioning):
    """Gradients of both algorithms where nothing leaves the device."""
    return {learn: learn(with_adapters(spanning), conditioning) for learn in (policy_gradient, reward_feedback)}


def assert_equal_gradients(ours, theirs) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert sum(bool(gradient.any()) for gradient in ours) > len(ours) / 2


@pytest.mark.parametrize("learn", [policy_gradient, reward_feedback])
def test_swapping_experts_changes_no_bit_and_holds_one_at_a_time(
    make_module, conditioning, expected, learn, monkeypatch
) -> None:
    model = make_module(sampler=SPANNING, memory={"swap_idle_expert": True}, use_gradient_checkpointing=True)
    copies: list[weakref.ref] = []
    visited: list[str] = []
    bring = model._swap.bring

    def watched(name: str) -> None:
        if name == model._swap.resident:
            return
        bring(name)
        gc.collect()
        assert all(copy() is None for copy in copies), "the other expert is still on the device"
        weight = getattr(model.pipe, name).blocks[0].ffn[0].base_layer.weight
        visited.append(name)
        copies.append(weakref.ref(weight.data.untyped_storage()))
        assert copies[-1]() is not None

    monkeypatch.setattr(model._swap, "bring", watched)
    assert model.trained_experts == ("dit", "dit2")
    assert_equal_gradients(learn(with_adapters(model), conditioning), expected[learn])
    assert len(visited) > 2
    assert all(a != b for a, b in zip(visited, visited[1:], strict=False)), "only a change of expert moves weights"


def test_frozen_weights_come_and_go_and_trained_ones_stay() -> None:
    experts = {name: nn.ModuleDict({"base": nn.Linear(4, 4), "lora": nn.Linear(4, 2)}) for name in ("dit", "dit2")}
    for expert in experts.values():
        expert["base"].requires_grad_(False)
    originals = {name: expert["base"].weight.data_ptr() for name, expert in experts.items()}
    trained = {name: expert["lora"].weight.data_ptr() for name, expert in experts.items()}
    swap = ExpertSwap(experts, torch.device("cpu"))
    for name, idle in (("dit", "dit2"), ("dit2", "dit"), ("dit", "dit2")):
        swap.bring(name)
        assert swap.resident == name
        assert experts[name]["base"].weight.data_ptr() != originals[name]
        assert experts[idle]["base"].weight.data_ptr() == originals[idle]
        assert {name: expert["lora"].weight.data_ptr() for name, expert in experts.items()} == trained


def test_a_single_expert_cannot_be_swapped(make_module) -> None:
    import likeness_toyworld as toyworld

    paths = {role: path for role, path in toyworld.model_paths().items() if role != "dit2"}
    with pytest.raises(ValueError, match="one DiT only: there is none to swap"):
        make_module(memory={"swap_idle_expert": True}, model_paths=paths)


def test_dropped_encoders_are_freed_and_decoding_goes_on(make_module, conditioning, person_frames) -> None:
    model = make_module()
    latents = sample_latents(model, conditioning, gaussian_noise(SHAPE, "drop"))
    before = np.concatenate(list(model.decode(latents)), axis=1)
    model.encode("a portrait of a person", person_frames[0], 9, 64, 64)
    parts = [weakref.ref(part) for part in (model.pipe.text_encoder, model.pipe.vae.model.encoder)]
    assert {id(kept) for kept in model.pipe.vae.model._enc_feat_map} == {id(None)}, "features of the last picture"
    weight = weakref.ref(model.pipe.text_encoder.token_embedding.weight)
    count = sum(parameter.numel() for parameter in model.parameters())
    model.drop_encoders()
    gc.collect()
    assert [part() for part in (*parts, weight)] == [None] * 3
    assert sum(parameter.numel() for parameter in model.parameters()) < count
    assert np.array_equal(np.concatenate(list(model.decode(latents)), axis=1), before)
    with pytest.raises(ValueError, match="encoders were dropped"):
        model.encode("a portrait", person_frames[0], 9, 64, 64)


@pytest.mark.parametrize("learn", [policy_gradient, reward_feedback])
@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_in_device_or_cpu_memory_give_the_same_gradients(
    spanning, conditioning, expected, learn, offload, monkeypatch
) -> None:
    """What is saved for the backward pass goes through save_on_cpu exactly where offloading is on."""
    settings = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": offload}
    monkeypatch.setattr(spanning, "config", spanning.config.model_copy(update=settings))
    entered = []
    save_on_cpu = torch.autograd.graph.save_on_cpu

    def watched(*arguments, **options):
        entered.append(torch.is_grad_enabled())
        return save_on_cpu(*arguments, **options)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", watched)
    assert_equal_gradients(learn(with_adapters(spanning), conditioning), expected[learn])
    assert bool(entered) is offload
    assert all(entered)


RECIPE = {
    "model": {"model_paths": ["x"], "tokenizer_path": "t"}, "data": {"metadata": "m"}, "reward": {},
    "memory": {"swap_idle_expert": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parallel": {"sharding": "fsdp2"}}, "choose one of the two"),
        ({"algorithm": {"name": "hybrid"}, "model": {**RECIPE["model"], "use_gradient_checkpointing": False}},
         "needs model.use_gradient_checkpointing"),
    ],
)  # fmt: skip
def test_settings_under_which_experts_cannot_be_swapped_are_named(change, told) -> None:
    parse_config(RECIPE)
    with pytest.raises(ConfigError, match=told):
        parse_config({**RECIPE, **change})
