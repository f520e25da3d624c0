"""The sampling chain of the toy model: schedule, experts, prefix, branches, decode."""

import numpy as np
import pytest
import torch

from likeness_trainer.learn.rollout import run_prefix, sample_group, sample_latents
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.stochastic_step import cps_mean_and_std, gaussian_log_prob

SHAPE = (1, 16, 3, 8, 8)


def test_the_schedule_is_the_published_one(module) -> None:
    expected = [1, 0.9722, 0.9375, 0.8929, 0.8333, 0.75, 0.625, 0.4167, 0]
    assert module.schedule.sigmas == pytest.approx(expected, abs=5e-5)
    assert list(module.schedule.prefix) == [0, 1, 2, 3]
    assert list(module.schedule.stochastic_steps) == [4, 5, 6]


def test_high_noise_steps_use_dit_and_low_noise_steps_dit2(module) -> None:
    assert [module.expert_name(step) for step in range(8)] == ["dit"] * 3 + ["dit2"] * 5
    assert module.trained_experts == ("dit2",)


def test_a_window_that_spans_both_experts_trains_both(make_module) -> None:
    module = make_module(sampler={"mid_timestep": 1})
    assert module.trained_experts == ("dit", "dit2")


def test_an_expert_that_the_window_never_evaluates_is_refused(make_module) -> None:
    with pytest.raises(ValueError, match="nothing would be trained"):
        make_module(sampler={"mid_timestep": 0, "final_timestep": 2}, trainable_models=["dit2"])


def test_our_chain_equals_diffsynths_own_pipeline(module, conditioning, person_frames) -> None:
    """With the adapter off, ODE sampling gives what WanVideoPipeline gives for the same noise."""
    from PIL import Image

    noise = gaussian_noise(SHAPE, "pipeline")
    with module.without_adapters():
        ours = np.concatenate([chunk[0] for chunk in module.decode(sample_latents(module, conditioning, noise))])
        module.pipe.generate_noise = lambda *args, **kwargs: noise
        try:
            theirs = module.pipe(
                prompt="a portrait of a person", input_image=Image.fromarray(person_frames[0]),
                height=64, width=64, num_frames=9, num_inference_steps=8, sigma_shift=5.0, cfg_scale=1.0,
                switch_DiT_boundary=0.9, tiled=False, progress_bar_cmd=lambda steps: steps,
            )  # fmt: skip
        finally:
            del module.pipe.generate_noise
    difference = np.abs(ours.astype(int) - np.stack([np.asarray(frame) for frame in theirs]).astype(int))
    assert difference.max() <= 1  # DiffSynth truncates where we round


def test_the_shared_prefix_gives_what_each_sample_would_compute_alone(module, conditioning) -> None:
    (trajectory, _), *_ = sample_group(module, conditioning, 2, 2, ("prefix test",))
    alone = run_prefix(module, conditioning, gaussian_noise(SHAPE, "prefix test", "prefix"))
    for row in trajectory.inputs[0]:
        assert torch.equal(row, alone[0])


def test_samples_do_not_depend_on_how_branches_are_batched(module, conditioning) -> None:
    together = torch.cat([latents for _, latents in sample_group(module, conditioning, 4, 4, ("batching",))])
    apart = torch.cat([latents for _, latents in sample_group(module, conditioning, 4, 1, ("batching",))])
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=0)


def test_a_sample_depends_on_its_seed_and_index_and_not_on_the_rest_of_its_group(module, conditioning) -> None:
    few = [latents for _, latents in sample_group(module, conditioning, 2, 1, (0, "rollout", 3, 1))]
    torch.manual_seed(99)
    many = [latents for _, latents in sample_group(module, conditioning, 3, 1, (0, "rollout", 3, 1))]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(few, many, strict=False))
    assert not torch.equal(many[1], many[2])
    (_, other), *_ = sample_group(module, conditioning, 2, 1, (0, "rollout", 4, 1))
    assert not torch.equal(other, few[0])


def test_the_stored_log_density_is_that_of_the_stored_step(module, conditioning) -> None:
    (trajectory, _), *_ = sample_group(module, conditioning, 2, 2, ("density",))
    sigmas = module.schedule.sigmas
    for index, step in enumerate(module.schedule.stochastic_steps):
        with torch.no_grad():
            velocity = module.velocity(trajectory.inputs[index], step, conditioning)
        mean, std = cps_mean_and_std(trajectory.inputs[index], velocity, sigmas[step], sigmas[step + 1], 0.7)
        assert torch.equal(gaussian_log_prob(trajectory.inputs[index + 1], mean, std), trajectory.old_log_prob[index])


def test_decoding_latent_frame_by_latent_frame_equals_the_whole_decode(module) -> None:
    latents = gaussian_noise((2, 16, 3, 8, 8), "decode")
    chunks = list(module.decode(latents))
    assert [chunk.shape[1] for chunk in chunks] == [1, 4, 4]
    whole = module.pipe.vae.model.decode(latents, module.pipe.vae.scale)
    expected = ((whole.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    assert np.array_equal(np.concatenate(chunks, axis=1), expected)


def test_frames_that_are_not_finite_are_refused(module) -> None:
    from likeness_trainer.wan.decoding import NonFiniteFramesError, to_uint8_rgb

    pixels = torch.tensor([0.0, 1.2, -3.0, 1.0]).view(1, 1, 1, 1, 4).expand(1, 3, 1, 1, 4).clone()
    assert to_uint8_rgb(pixels)[0, 0, 0, :, 0].tolist() == [128, 255, 0, 255]
    pixels[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteFramesError, match="1 of 12"):
        to_uint8_rgb(pixels)


@pytest.mark.parametrize(
    ("num_frames", "height", "width", "told"),
    [(10, 64, 64, "4n"), (9, 60, 64, "height is 60"), (9, 64, 8, "width is 8")],
)
def test_sizes_that_the_model_cannot_make_are_refused(module, person_frames, num_frames, height, width, told) -> None:
    with pytest.raises(ValueError, match=told):
        module.encode("a person", person_frames[0], num_frames, height, width)


def test_a_chain_that_stops_early_decodes_its_one_step_prediction(make_module, conditioning) -> None:
    early = make_module(sampler={"mid_timestep": 2, "final_timestep": 4})
    (trajectory, video), *_ = sample_group(early, conditioning, 2, 2, ("early",))
    latents = trajectory.inputs[-1]
    with torch.no_grad():
        velocity = early.velocity(latents, 4, conditioning)
    torch.testing.assert_close(video, latents - early.schedule.sigmas[4] * velocity)
