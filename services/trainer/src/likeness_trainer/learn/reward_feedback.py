"""Reward feedback learning: the reward's gradient goes back through face, frames, decoder and the last steps.

The chain runs from noise without stochastic steps. The steps of the window and the decoder stay in the graph, each DiT
evaluation and each decoded latent frame checkpointed; the frames go to the reward service, the gradients of the aligned
crops come back, and one backward takes them through the adjoint of the alignment. The cast to uint8 and the clamp to
the pixel range count as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from likeness_reward.domain import ScoreOptions, VideoReward
from likeness_reward.errors import InvalidGradients
from likeness_trainer.learn.face_warp import aligned_crop
from likeness_trainer.learn.feedback_config import RewardFeedbackConfig
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.prompts import PreparedPrompt
from likeness_trainer.learn.rollout import FrameSink, keep_first_frame, run_prefix
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.stochastic_step import euler_step, predict_video, velocity_kl
from likeness_trainer.learn.update import UpdateStatistics
from likeness_trainer.reward_link import GroupDroppedError, RewardLink
from likeness_trainer.wan.decoding import NonFiniteFramesError, decode_latent_frames, to_uint8_rgb
from likeness_trainer.wan.module import Conditioning, WanModule


@dataclass(frozen=True)
class FeedbackVideo:
    """Sampled videos with their graph."""

    pixels: Tensor
    """float [B, 3, T, H, W], nominally -1 to 1, not clamped."""
    kl: Tensor
    """float32 [B]: mean over the steps of the window of mean((v - v_ref)^2) / (2 s^2)."""


@dataclass
class FeedbackUpdate:
    """What the rewards of one training step say: the gradient of the weighted mean loss over the videos that count."""

    gradients: list[Tensor | None] = field(default_factory=list)
    """One entry per LoRA parameter, in the order of `WanModule.lora_parameters`."""
    loss: float = 0.0
    kl: float = 0.0
    rewards: list[list[VideoReward]] = field(default_factory=list)
    """By prompt, those that were dropped left out."""
    dropped: int = 0
    """Prompts whose videos could not be scored. Nothing of them was backpropagated."""
    preview: NDArray[np.uint8] | None = None
    """Frames of the first video, uint8 RGB [T, H, W, 3]."""
    fault: str | None = None
    """What of the sampled frames is not finite; the step is to be skipped."""

    def add_to(self, parameters: list[nn.Parameter], statistics: UpdateStatistics) -> None:
        """Adds the gradients to those of the parameters, the loss to the statistics, and the divergence where there is
        none of the policy gradient."""
        for parameter, gradient in zip(parameters, self.gradients, strict=bool(self.gradients)):
            if gradient is not None:
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        statistics.loss += self.loss
        statistics.kl = statistics.kl if statistics.ratios else self.kl


def feedback_options(base: ScoreOptions, algorithm: PolicyGradientConfig, encoding: str) -> ScoreOptions:
    """Returns options under which the reward's value is the sum of `algorithm.reward_weights`, with its gradients."""
    weights = {f"{name}_weight": algorithm.reward_weights.get(name, 0.0) for name in ("identity", "coverage", "motion")}
    return base.model_copy(update={**weights, "include_crop_gradients": True, "gradient_encoding": encoding})


def sample_in_graph(
    model: WanModule, conditioning: Conditioning, noise: Tensor, config: RewardFeedbackConfig, sink: FrameSink
) -> FeedbackVideo:
    """Returns videos sampled from noise [B, C, T, h, w], with their graph; each chunk of frames goes to `sink`.

    The divergence's reference velocities are constants. With `sampler.final_timestep` before the end of the chain the
    one-step prediction of that step is decoded.

    Args:
        conditioning: on the model's device.
        sink: takes (row of the batch, index of the first frame, uint8 RGB frames [t, H, W, 3]).

    Raises:
        NonFiniteFramesError: a pixel is NaN or infinite.
    """
    latents, kl = window_in_graph(model, conditioning, noise, config)
    chunks: list[Tensor] = []
    first_frame = 0
    for chunk in decode_latent_frames(model.pipe.vae, latents, checkpointing=_checkpoints(model)):
        for row, frames in enumerate(to_uint8_rgb(chunk.detach())):
            sink(row, first_frame, frames)
        first_frame += chunk.shape[2]
        chunks.append(chunk)
    return FeedbackVideo(torch.cat(chunks, dim=2), kl)


def window_in_graph(
    model: WanModule, conditioning: Conditioning, noise: Tensor, config: RewardFeedbackConfig
) -> tuple[Tensor, Tensor]:
    """Returns the final latents [B, C, T, h, w] and the divergence [B], both with the graph of the window's steps."""
    schedule = model.schedule
    steps = schedule.window if config.last_steps is None else schedule.window[-config.last_steps :]
    latents = run_prefix(model, conditioning, noise, steps.start)
    kl = torch.zeros(len(noise), device=latents.device)
    for step in steps:
        latents = keep_first_frame(latents, conditioning)
        evaluate = partial(checkpoint, model.velocity, use_reentrant=False) if _checkpoints(model) else model.velocity
        velocity: Tensor = evaluate(latents, step, conditioning)
        if config.kl_weight > 0:
            reference = model.reference_velocity(latents.detach(), step, conditioning)
            kl = kl + velocity_kl(velocity, reference, schedule.sigmas[step]) / len(steps)
        if step < schedule.final:
            latents = euler_step(latents, velocity, schedule.sigmas[step], schedule.sigmas[step + 1])
        else:
            latents = predict_video(latents, velocity, schedule.sigmas[step])
    return keep_first_frame(latents, conditioning), kl


def _checkpoints(model: WanModule) -> bool:
    return model.config.use_gradient_checkpointing and torch.is_grad_enabled()


def reward_with_gradient(pixels: Tensor, reward: VideoReward) -> Tensor:
    """Returns the value of a reward as a scalar whose gradient by pixels [3, T, H, W] (-1 to 1) is the service's.

    Raises:
        InvalidGradients: a gradient is of a frame that does not exist, or not finite.
    """
    linear = pixels.new_zeros((), dtype=torch.float32)
    for gradient in reward.crop_gradients:
        if gradient.frame_index >= pixels.shape[1] or not np.isfinite(gradient.values).all():
            raise InvalidGradients(
                f"the gradient of frame {gradient.frame_index} is not finite, or there is no such frame"
            )
        frame = (pixels[:, gradient.frame_index].float() + 1.0) / 2.0
        crop = aligned_crop(frame, gradient.frame_from_crop, gradient.values.shape[1])
        linear = linear + (crop * torch.from_numpy(gradient.values).to(crop)).sum()
    return linear - linear.detach() + reward.value


def feedback_loss(reward: Tensor, kl: Tensor, config: RewardFeedbackConfig) -> Tensor:
    """Returns ``-scale (R - offset) / spread + kl_weight KL`` of one video (IPRO, arXiv 2510.14255)."""
    return -config.scale * (reward - config.offset) / config.spread + config.kl_weight * kl


def video_losses(video: FeedbackVideo, rewards: list[VideoReward], config: RewardFeedbackConfig) -> Tensor:
    """Returns the loss of each video of a batch, float32 [B], with its graph. Raises InvalidGradients."""
    return torch.stack(
        [
            feedback_loss(reward_with_gradient(pixels, reward), kl, config)
            for pixels, reward, kl in zip(video.pixels, rewards, video.kl, strict=True)
        ]
    )


def backpropagate_rewards(
    model: WanModule,
    link: RewardLink,
    prompts: list[PreparedPrompt],
    algorithm: PolicyGradientConfig,
    seed: tuple[int | str, ...],
    weight: float = 1.0,
) -> FeedbackUpdate:
    """Returns the gradient of the mean loss over `algorithm.feedback.samples` videos of each prompt, times `weight`.

    One prompt after the other: sampled, scored, backpropagated. A prompt whose videos could not all be scored is left
    out as a whole. The gradients of the parameters are left as they were found, whatever happens.

    Raises:
        RewardUnavailableError, RewardRejectedError: see `Patience`.
    """
    update = FeedbackUpdate()
    parameters = model.lora_parameters()
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        for place, prompt in enumerate(prompts):
            _backpropagate_prompt(model, link, prompt, algorithm, (*seed, place), update)
            if update.fault is not None:
                return update
        count = sum(len(group) for group in update.rewards)
        if count > 0:
            update.loss, update.kl = weight * update.loss / count, update.kl / count
            update.gradients = [None if p.grad is None else p.grad * (weight / count) for p in parameters]
        return update
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _backpropagate_prompt(
    model: WanModule,
    link: RewardLink,
    prompt: PreparedPrompt,
    algorithm: PolicyGradientConfig,
    seed: tuple[int | str, ...],
    update: FeedbackUpdate,
) -> None:
    """Adds the videos of one prompt to `update`, and the sum of their losses' gradients to the parameters."""
    config = algorithm.feedback
    options = feedback_options(link.config.score_options(), algorithm, link.config.gradient_encoding)
    shape = (prompt.num_frames, prompt.height, prompt.width)
    group = link.open_group(prompt.identity, config.samples, shape, options)
    preview: list[NDArray[np.uint8]] = []

    def send(sample: int, first_frame: int, frames: NDArray[np.uint8]) -> None:
        group.put(sample, first_frame, frames)
        if sample == 0 and update.preview is None:
            preview.append(frames)

    noise = [gaussian_noise(prompt.conditioning.latent_shape, *seed, sample) for sample in range(config.samples)]
    try:
        video = sample_in_graph(model, prompt.conditioning.to(model.device), torch.stack(noise), config, send)
    except NonFiniteFramesError as error:
        group.abandon()
        update.fault = f"row {prompt.row}: {error}"
        return
    if preview:
        update.preview = np.concatenate(preview)
    try:
        rewards = group.results()
        losses = video_losses(video, rewards, config)
    except (GroupDroppedError, InvalidGradients):
        update.dropped += 1
        return
    losses.sum().backward()
    update.rewards.append(rewards)
    update.loss += float(losses.detach().sum())
    update.kl += float(video.kl.detach().sum())
