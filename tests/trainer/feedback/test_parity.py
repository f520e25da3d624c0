"""Loss, score, KL and adapter gradients equal those of one float32 graph in this process, written from the formulas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_support import WrittenOut

from likeness_reward.client import RewardClient
from likeness_reward.face.alignment import estimate_similarity
from likeness_trainer.learn.seeds import gaussian_noise

OFFSET, SPREAD, SCALE = 0.54, 0.16, 0.1


def warped(frame: torch.Tensor, landmarks: np.ndarray) -> torch.Tensor:
    """Returns the crop [3, 112, 112] of a frame [3, H, W]: four weighted neighbours of each sampled place."""
    height, width = frame.shape[1:]
    matrix = np.linalg.inv(np.vstack([estimate_similarity(landmarks), [0, 0, 1]]))[:2]
    y, x = torch.meshgrid(torch.arange(112.0), torch.arange(112.0), indexing="ij")
    at_x = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2]
    at_y = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2]
    left, top = at_x.floor(), at_y.floor()
    crop = torch.zeros(3, 112, 112)
    for column, row in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
        weight = (1 - (at_x - column).abs()) * (1 - (at_y - row).abs())
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        column, row = column.clamp(0, width - 1).long(), row.clamp(0, height - 1).long()
        crop = crop + frame[:, row, column] * (weight * inside)
    return crop


def whole_video_decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Returns pixels [3, T, H, W] as DiffSynth's own whole-video decoder gives them, without a clamp."""
    vae = module.pipe.vae
    return vae.model.decode(latents, [value.to(latents) for value in vae.scale])[0]


def reference(module: Any, data: dict[str, Any], last_steps: int = 4) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Returns (loss, score, KL) of one graph without checkpoints, wire or custom gradients.

    The value is that of the served uint8 frames; the gradient goes through float pixels, as the cast counts as the
    identity: in the crop the uint8 values stand, plus the pixels less themselves.
    """
    frames = data["video"]
    shape = frames.shape[:3]
    conditioning = module.encode(data["prompt"], frames[0], *shape)
    sigmas, final = module.schedule.sigmas, module.schedule.final
    latents = gaussian_noise((1, *conditioning.latent_shape), data["seed"], "forward", module._calls, "feedback")
    kl = torch.zeros(())
    for step in range(final + 1):
        with torch.set_grad_enabled(step > final - last_steps):
            velocity = module.velocity(latents, step, conditioning)
        if step > final - last_steps:
            with torch.no_grad(), module.without_adapters():
                base = module.velocity(latents, step, conditioning)
            kl = kl + ((velocity - base) ** 2).mean() / (2 * sigmas[step] ** 2) / last_steps
        target = sigmas[step + 1] if step < final else 0.0
        latents = latents + (target - sigmas[step]) * velocity
    pixels = whole_video_decode(module, latents)
    scorer = module.scorer
    identity = torch.from_numpy(scorer.embed_identity(list(frames[1:])).embedding)
    grey = ((pixels.detach().clamp(-1, 1) + 1) * 127.5).round()
    served = grey.to(torch.uint8).permute(1, 2, 3, 0).numpy()
    network = WrittenOut(scorer.pack.recognizer.path)
    similarities = []
    for index, analysis in enumerate(scorer.analyzer.analyze(list(served), module.score_options)):
        if analysis.crop is None:
            similarities.append(torch.tensor(module.options.no_face_value))
            continue
        moving = warped((pixels[:, index] + 1) / 2, analysis.observation.face.landmarks)
        crop = torch.from_numpy(analysis.crop).permute(2, 0, 1) / 255 + moving - moving.detach()
        similarities.append(network.similarity(crop[None], identity)[0])
    score = torch.stack(similarities).mean()
    return -SCALE * (score - OFFSET) / SPREAD + kl, score.item(), kl


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the relative error of all adapter gradients together."""
    difference = sum(((a - b) ** 2).sum() for a, b in zip(found, expected, strict=True))
    return float((difference / sum((b**2).sum() for b in expected)).sqrt())


@pytest.mark.parametrize("last_steps", [None, 2])
def test_the_loss_is_that_of_one_graph(
    make_training_module: Callable[..., Any], gradients_of: Callable[..., Any], data: dict[str, Any], last_steps: Any
) -> None:
    module = make_training_module(feedback={"last_steps": last_steps})
    expected_loss, expected_score, expected_kl = reference(module, data, last_steps or 4)
    loss, score, kl = module(data)
    assert expected_kl.item() > 1e-4
    assert score.item() == pytest.approx(expected_score, rel=1e-4)
    assert kl.item() == pytest.approx(expected_kl.item(), rel=1e-4)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-4)
    assert relative(gradients_of(module, loss), gradients_of(module, expected_loss)) <= 1e-4


def test_the_reward_part_alone_is_that_of_one_graph(
    training_module: Any, gradients_of: Callable[..., Any], data: dict[str, Any]
) -> None:
    """The divergence is much larger than the reward here and would hide an error in its gradient."""
    expected_loss, _, expected_kl = reference(training_module, data)
    loss, _, kl = training_module(data)
    found, expected = (
        gradients_of(training_module, loss - kl),
        gradients_of(training_module, expected_loss - expected_kl),
    )
    assert all(gradient.abs().max() > 0 for gradient in expected)
    assert relative(found, expected) <= 1e-4


@pytest.mark.parametrize(("encoding", "cost"), [("float32", 1e-5), ("float16", 1e-3)])
def test_a_server_gives_what_this_process_gives(
    training_module: Any, gradients_of: Callable[..., Any], data: dict[str, Any], serve: Callable[..., Any],
    encoding: str, cost: float, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    embedded, calls = training_module.scorer, training_module._calls
    loss, _, kl = training_module(data)
    expected = gradients_of(training_module, loss - kl)
    options = training_module.options
    try:
        training_module._calls = calls
        training_module._scorer = RewardClient(serve(embedded).endpoint)
        training_module.options = options.model_copy(update={"gradient_encoding": encoding})
        loss, _, kl = training_module(data)
    finally:
        training_module._scorer, training_module.options = embedded, options
    error = relative(gradients_of(training_module, loss - kl), expected)
    record_property("relative_error", error)
    print(f"{encoding} on the wire costs a relative error of {error:.2g}")
    assert error <= cost


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_change_no_gradient(
    make_training_module: Callable[..., Any], training_module: Any, gradients_of: Callable[..., Any],
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch, offload: bool,
) -> None:  # fmt: skip
    from likeness_trainer.wan import decoding

    moved: list[Any] = []
    save_on_cpu = decoding.save_on_cpu
    monkeypatch.setattr(decoding, "save_on_cpu", lambda: moved.append(save_on_cpu()) or moved[-1])
    checkpointed = make_training_module(use_gradient_checkpointing=True, use_gradient_checkpointing_offload=offload)
    checkpointed._calls = training_module._calls
    expected = training_module(data)
    found = checkpointed(data)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    gradients = gradients_of(checkpointed, found[0]), gradients_of(training_module, expected[0])
    assert relative(*gradients) <= 1e-6
    assert len(moved) == (3 if offload else 0)  # one for each latent frame of 9 frames


def test_a_chain_that_stops_early_decodes_its_one_step_prediction(
    make_training_module: Callable[..., Any], gradients_of: Callable[..., Any], data: dict[str, Any]
) -> None:
    module = make_training_module(final_timestep=6)
    expected_loss, expected_score, _ = reference(module, data, 3)
    loss, score, _ = module(data)
    assert score.item() == pytest.approx(expected_score, rel=1e-4)
    assert relative(gradients_of(module, loss), gradients_of(module, expected_loss)) <= 1e-4


def test_a_video_without_a_face_has_a_loss_that_moves_nothing(
    make_training_module: Callable[..., Any], gradients_of: Callable[..., Any], data: dict[str, Any]
) -> None:
    module = make_training_module(min_face_pixels=512, no_face_value=-0.5, feedback={"kl_weight": 0.0})
    loss, score, _ = module(data)
    assert score.item() == -0.5
    assert loss.item() == pytest.approx(-SCALE * (-0.5 - OFFSET) / SPREAD, rel=1e-6)
    assert all(gradient.abs().max() == 0 for gradient in gradients_of(module, loss))


def test_hybrid_is_the_weighted_sum(make_training_module: Callable[..., Any], data: dict[str, Any]) -> None:
    module = make_training_module(feedback={"weight": 0.5}, group_size=2)
    losses = {}
    for name in ("policy_gradient", "reward_feedback", "hybrid"):
        module._calls = 0
        losses[name] = module(data, algorithm=name)[0].item()
    assert losses["hybrid"] == pytest.approx(losses["policy_gradient"] + 0.5 * losses["reward_feedback"], rel=1e-6)
    with pytest.raises(ValueError, match="reward_feedbak"):
        module(data, algorithm="reward_feedbak")


def test_grid_sampling_in_the_reference_is_bilinear() -> None:
    """The reference's own warp on the identity: a face with ArcFace's landmarks is its own crop."""
    from likeness_reward.face.alignment import CROP_LANDMARKS

    frame = torch.rand(3, 112, 112, generator=torch.Generator().manual_seed(0))
    assert F.mse_loss(warped(frame, CROP_LANDMARKS), frame).item() < 1e-8
