"""One random stochastic step an iteration: what is sampled, what is shared, what is trained."""

import pytest
import torch

from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import ode_step, run_prefix, sample_group, sample_latents
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.stochastic_step import next_latents_distribution
from likeness_trainer.learn.update import ScoredTrajectory, accumulate_gradients
from likeness_trainer.learn.window import Window, whole_window, window_of

SHAPE = (1, 16, 3, 8, 8)


def test_the_whole_window_ends_with_the_deterministic_step(module) -> None:
    assert whole_window(module.schedule) == Window((4, 5, 6), (4, 5, 6, 7))
    assert window_of(module.schedule, "all", 0, 9) == whole_window(module.schedule)


def test_one_step_is_drawn_uniformly_and_depends_on_seed_and_step_only(module) -> None:
    drawn = [window_of(module.schedule, "one", 5, step) for step in range(300)]
    assert drawn == [window_of(module.schedule, "one", 5, step) for step in range(300)]
    assert drawn != [window_of(module.schedule, "one", 6, step) for step in range(300)]
    counts = {step: sum(window.stochastic == (step,) for window in drawn) for step in (4, 5, 6)}
    assert sum(counts.values()) == 300
    assert all(window.trained == window.stochastic for window in drawn)
    assert all(70 < count < 130 for count in counts.values())


@pytest.mark.parametrize("drawn", [4, 6])
def test_only_the_drawn_step_is_noisy_and_the_group_parts_there(module, conditioning, drawn) -> None:
    window = Window((drawn,), (drawn,))
    ((trajectory, video),) = sample_group(module, conditioning, 2, 2, ("one",), window)
    shared = run_prefix(module, conditioning, gaussian_noise(SHAPE, "one", "prefix"), drawn)
    assert torch.equal(trajectory.inputs[0], shared.expand(2, *SHAPE[1:]))
    with torch.no_grad():
        velocity = module.velocity(trajectory.inputs[0], drawn, conditioning)
        mean, std = next_latents_distribution("cps", trajectory.inputs[0], velocity, module.schedule.sigmas, drawn, 0.7)
        noise = torch.cat([gaussian_noise(SHAPE, "one", "branch", sample) for sample in range(2)])
        latents = mean + std * noise
        assert torch.equal(latents, trajectory.inputs[1])
        for step in range(drawn + 1, 8):
            latents = ode_step(module, latents, step, conditioning)
    torch.testing.assert_close(video, latents)


def test_a_drawn_window_trains_its_step_alone(module, conditioning, monkeypatch) -> None:
    window = Window((5,), (5,))
    ((trajectory, _),) = sample_group(module, conditioning, 2, 2, ("one",), window)
    steps: list[int] = []
    velocity = module.velocity
    monkeypatch.setattr(module, "velocity", lambda x, step, c: steps.append(step) or velocity(x, step, c))
    scored = ScoredTrajectory(trajectory, conditioning, torch.tensor([[1.0] * 3, [-1.0] * 3]))
    statistics = accumulate_gradients(module, [scored], PolicyGradientConfig(kl_weight=0.1))
    assert steps == [5, 5]  # the adapted model and its reference
    assert statistics.ratio_deviation == 0.0
    assert statistics.kl > 0.0


def test_evaluation_samples_are_free_of_noise_whatever_the_step_kind(module, conditioning, monkeypatch) -> None:
    noise = gaussian_noise(SHAPE, "evaluation")
    expected = sample_latents(module, conditioning, noise)
    monkeypatch.setattr(module, "sampler", module.sampler.model_copy(update={"stochastic_step": "flow_sde"}))
    assert torch.equal(sample_latents(module, conditioning, noise), expected)
