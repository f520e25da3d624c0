"""Reward feedback learning: the reward's gradient goes back through face, frames, decoder and the last steps.

The chain runs from noise without stochastic steps. The steps of the window and the decoder stay in the graph, each DiT
evaluation and each decoded latent frame checkpointed; the frames go to the reward service, the gradients of the aligned
crops come back, and one backward takes them through the adjoint of the alignment. The cast to uint8 and the clamp to
the pixel range count as the identity.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from likeness_reward.domain import ScoreOptions, VideoReward
from likeness_reward.errors import InvalidGradients
from likeness_trainer.learn.face_warp import aligned_crop
from likeness_trainer.learn.feedback_config import RewardFeedbackConfig
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.rollout import FrameSink, keep_first_frame, run_prefix
from likeness_trainer.learn.stochastic_step import euler_step, predict_video, velocity_kl
from likeness_trainer.wan.decoding import decode_latent_frames, to_uint8_rgb
from likeness_trainer.wan.module import Conditioning, WanModule


@dataclass(frozen=True)
class FeedbackVideo:
    """Sampled videos with their graph."""

    pixels: Tensor
    """float [B, 3, T, H, W], nominally -1 to 1, not clamped."""
    kl: Tensor
    """float32 [B]: mean over the steps of the window of mean((v - v_ref)^2) / (2 s^2)."""


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
    chunks: list[Tensor] = []
    first_frame = 0
    offload = _checkpoints(model) and model.config.use_gradient_checkpointing_offload
    with save_on_cpu() if offload else nullcontext():
        latents, kl = window_in_graph(model, conditioning, noise, config)
    for chunk in decode_latent_frames(model.pipe.vae, latents, _checkpoints(model), offload):
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
    frames = ((pixels.float() + 1.0) / 2.0).unbind(1)
    linear = 0.0 * frames[0].sum()  # a graph without any face too: ranks of a sharded model backpropagate alike
    for gradient in reward.crop_gradients:
        if gradient.frame_index >= len(frames) or not np.isfinite(gradient.values).all():
            raise InvalidGradients(
                f"the gradient of frame {gradient.frame_index} is not finite, or there is no such frame"
            )
        frame = frames[gradient.frame_index]
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
