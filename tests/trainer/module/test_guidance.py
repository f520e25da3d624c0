"""Classifier-free guidance: what it computes, what it evaluates, and that rollout and update agree under it."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from likeness_trainer.learn.feedback_config import RewardFeedbackConfig
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.reward_feedback import sample_in_graph
from likeness_trainer.learn.rollout import sample_group, sample_latents
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients
from likeness_trainer.wan.sampler_config import SamplerConfig

SHAPE = (1, 16, 3, 8, 8)
PROMPT, NEGATIVE = "a portrait of a person", "a dark picture of nobody"
ALGORITHM = PolicyGradientConfig(kl_weight=0.1)


@pytest.fixture
def guide(module, monkeypatch):
    """Returns a function that sets the guidance of the toy model for one test."""

    def set_guidance(scale: float | dict[str, float], negative_prompt: str = NEGATIVE) -> None:
        update = {"guidance_scale": scale, "negative_prompt": negative_prompt}
        monkeypatch.setattr(module, "sampler", module.sampler.model_copy(update=update))

    return set_guidance


@pytest.fixture
def evaluated(module, monkeypatch) -> list[str]:
    """The expert of each DiT evaluation, in order."""
    experts: list[str] = []
    model_fn = module.pipe.model_fn

    def count(dit: Any, **inputs: Any) -> torch.Tensor:
        experts.append("dit" if dit is module.pipe.dit else "dit2")
        return model_fn(dit=dit, **inputs)

    monkeypatch.setattr(module.pipe, "model_fn", count)
    return experts


def encode(module, person_frames):
    return module.encode(PROMPT, person_frames[0], 9, 64, 64)


def step_of_training(module, conditioning, config=ALGORITHM):
    """One rollout of 2 samples and its update; returns the update's statistics."""
    batches = [
        ScoredTrajectory(trajectory, conditioning, torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -0.5]]))
        for trajectory, _ in sample_group(module, conditioning, 2, 2, ("guidance",))
    ]
    return accumulate_gradients(module, batches, config)


def test_without_guidance_the_negative_prompt_is_neither_encoded_nor_evaluated(
    module, guide, person_frames, evaluated
) -> None:
    guide(1.0)
    conditioning = encode(module, person_frames)
    assert conditioning.negative_inputs == {}
    step_of_training(module, conditioning)
    # 4 steps of the prefix, 4 of the branches, and 4 of the update with their references.
    assert evaluated == ["dit"] * 3 + ["dit2"] * (1 + 4 + 8)


def test_with_guidance_every_step_evaluates_both_prompts(module, guide, person_frames, evaluated) -> None:
    guide(3.0)
    step_of_training(module, encode(module, person_frames))
    assert evaluated == ["dit"] * 6 + ["dit2"] * (2 + 8 + 16)


def test_each_expert_has_its_own_scale(module, guide, person_frames, evaluated) -> None:
    guide({"dit": 3.0, "dit2": 1.0})
    step_of_training(module, encode(module, person_frames))
    assert evaluated == ["dit"] * 6 + ["dit2"] * (1 + 4 + 8)


@pytest.mark.parametrize("step", [1, 5])
def test_the_guided_velocity_is_the_weighted_difference(module, guide, person_frames, step) -> None:
    latents = gaussian_noise(SHAPE, "guided")
    with torch.no_grad():
        positive = module.velocity(latents, step, encode(module, person_frames))
        negative = module.velocity(latents, step, module.encode(NEGATIVE, person_frames[0], 9, 64, 64))
        guide({"dit": 2.5, "dit2": 4.0})
        guided = module.velocity(latents, step, encode(module, person_frames))
    scale = 2.5 if step == 1 else 4.0
    assert (positive - negative).abs().max() > 1e-3
    torch.testing.assert_close(guided, (1.0 - scale) * negative + scale * positive, atol=1e-5, rtol=0)


def test_the_guided_chain_equals_diffsynths_own_pipeline(module, guide, person_frames) -> None:
    guide(3.0)
    noise = gaussian_noise(SHAPE, "pipeline")
    with module.without_adapters():
        latents = sample_latents(module, encode(module, person_frames), noise)
        ours = np.concatenate([chunk[0] for chunk in module.decode(latents)])
        module.pipe.generate_noise = lambda *args, **kwargs: noise
        try:
            theirs = module.pipe(
                prompt=PROMPT, negative_prompt=NEGATIVE, input_image=Image.fromarray(person_frames[0]), height=64,
                width=64, num_frames=9, num_inference_steps=8, sigma_shift=5.0, cfg_scale=3.0, switch_DiT_boundary=0.9,
                tiled=False, progress_bar_cmd=lambda steps: steps,
            )  # fmt: skip
        finally:
            del module.pipe.generate_noise
    difference = np.abs(ours.astype(int) - np.stack([np.asarray(frame) for frame in theirs]).astype(int))
    assert difference.max() <= 1  # DiffSynth truncates where we round


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ratios_are_1_before_the_first_update_and_both_branches_carry_gradient(
    module, guide, person_frames, checkpointing, monkeypatch
) -> None:
    """The gradient of a guided step is that of the two predictions, each weighted, computed apart."""
    settings = module.config.model_copy(update={"use_gradient_checkpointing": checkpointing})
    monkeypatch.setattr(module, "config", settings)
    guide(3.0)
    conditioning = encode(module, person_frames)
    statistics = step_of_training(module, conditioning)
    assert statistics.ratio_deviation == 0.0
    assert statistics.kl > 0.0

    latents, direction = gaussian_noise(SHAPE, "latents"), gaussian_noise(SHAPE, "direction")
    guided = gradients(module, lambda: (module.velocity(latents, 5, conditioning) * direction).sum())
    parts = []
    for inputs in (conditioning.inputs, {**conditioning.inputs, **conditioning.negative_inputs}):
        evaluate = module._evaluate
        parts.append(gradients(module, lambda i=inputs, e=evaluate: (e(latents, 5, i) * direction).sum()))
    for ours, positive, negative in zip(guided, *parts, strict=True):
        torch.testing.assert_close(ours, 3.0 * positive - 2.0 * negative, atol=1e-4, rtol=1e-4)
    assert max(float(negative.abs().max()) for negative in parts[1]) > 1e-3


def gradients(module, objective) -> list[torch.Tensor]:
    for parameter in module.lora_parameters():
        parameter.grad = None
    objective().backward()
    return [parameter.grad.clone() for parameter in module.lora_parameters()]


def test_the_divergence_is_that_of_the_guided_velocities(module, guide, person_frames) -> None:
    guide(3.0)
    conditioning, latents = encode(module, person_frames), gaussian_noise(SHAPE, "reference")
    reference = module.reference_velocity(latents, 5, conditioning)
    with torch.no_grad(), module.without_adapters():
        assert torch.equal(reference, module.velocity(latents, 5, conditioning))
        guide(1.0)
        assert not torch.equal(reference, module.velocity(latents, 5, conditioning))


def test_reward_feedback_goes_through_the_guided_chain(module, guide, person_frames, evaluated) -> None:
    guide(3.0)
    config = RewardFeedbackConfig(last_steps=1, kl_weight=0.0)
    noise = gaussian_noise(SHAPE, "feedback")
    conditioning = encode(module, person_frames)
    video = sample_in_graph(module, conditioning, noise, config, lambda *chunk: None)
    assert len(evaluated) == 2 * 8
    expected = module.decode(sample_latents(module, conditioning, noise))
    ours = ((video.pixels[0].detach().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    assert np.array_equal(ours, np.concatenate(list(expected), axis=1)[0])


def test_a_conditioning_without_the_negative_prompt_is_refused(module, guide, person_frames) -> None:
    conditioning = encode(module, person_frames)
    guide(3.0)
    with pytest.raises(ValueError, match="no negative prompt"):
        module.velocity(gaussian_noise(SHAPE, "x"), 0, conditioning)


@pytest.mark.parametrize(
    ("scale", "told"),
    [(-1.0, "guidance_scale is -1"), (float("nan"), "guidance_scale is nan"), ({"dit": 3.0}, "both of"),
     ({"dit": 3.0, "low": 3.0}, r"names \['dit', 'low'\]"), ({"dit": 3.0, "dit2": float("inf")}, "inf")],
)  # fmt: skip
def test_scales_that_mean_nothing_are_named(scale, told) -> None:
    with pytest.raises(ValueError, match=told):
        SamplerConfig(guidance_scale=scale)


def test_two_scales_for_one_dit_are_refused(make_module) -> None:
    import likeness_toyworld as toyworld

    paths = {role: path for role, path in toyworld.model_paths().items() if role != "dit2"}
    with pytest.raises(ValueError, match="holds one DiT only"):
        make_module(sampler={"guidance_scale": {"dit": 3.0, "dit2": 2.0}}, model_paths=paths)
