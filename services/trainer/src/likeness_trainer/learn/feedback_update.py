"""One step of reward feedback: each rank backpropagates the rewards of its prompts, and what they come to together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from likeness_reward.domain import VideoReward
from likeness_reward.errors import InvalidGradients
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.prompts import PreparedPrompt
from likeness_trainer.learn.reward_feedback import FeedbackVideo, feedback_options, sample_in_graph, video_losses
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.update import UpdateStatistics
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import GroupDroppedError, GroupScoring, RewardLink
from likeness_trainer.wan.decoding import NonFiniteFramesError
from likeness_trainer.wan.module import WanModule


@dataclass
class FeedbackUpdate:
    """What the rewards of one training step say: the gradient of the weighted mean loss over the videos that count.

    Gradients, loss and divergence are this rank's part: the sums over the ranks are those of the step. The rest is of
    all ranks, the same on each.
    """

    gradients: list[Tensor | None] = field(default_factory=list)
    """One entry per LoRA parameter, in the order of `WanModule.lora_parameters`; empty when no video counts."""
    loss: float = 0.0
    kl: float = 0.0
    rewards: list[list[VideoReward]] = field(default_factory=list)
    """By prompt, in the order of the step, those that were dropped left out; without their gradients."""
    dropped: int = 0
    """Prompts whose videos could not be scored. Nothing of them was backpropagated."""
    preview: NDArray[np.uint8] | None = None
    """Frames of this rank's first video, uint8 RGB [T, H, W, 3]."""
    fault: str | None = None
    """What of the sampled frames is not finite; the step is to be skipped."""

    def add_to(self, parameters: list[nn.Parameter], statistics: UpdateStatistics) -> None:
        """Adds this rank's gradients to those of the parameters, its loss and divergence to the statistics."""
        for parameter, gradient in zip(parameters, self.gradients, strict=bool(self.gradients)):
            if gradient is not None:
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        statistics.loss += self.loss
        statistics.feedback_kl += self.kl


@dataclass
class _Backpropagated:
    """The sums over the prompts of this rank that were backpropagated."""

    loss: float = 0.0
    kl: float = 0.0
    rewards: list[tuple[int, list[VideoReward]]] = field(default_factory=list)
    """Place among the prompts of the step, rewards of its videos."""
    dropped: int = 0
    preview: NDArray[np.uint8] | None = None
    fault: str | None = None
    """Of any rank: all of them stop at the same prompt."""


def backpropagate_rewards(
    model: WanModule,
    link: RewardLink,
    prompts: list[PreparedPrompt],
    algorithm: PolicyGradientConfig,
    seed: tuple[int | str, ...],
    weight: float = 1.0,
    ranks: Ranks | None = None,
) -> FeedbackUpdate:
    """Returns the gradient of the mean loss over `algorithm.feedback.samples` videos of each prompt, times `weight`.

    Each rank takes its share of the prompts, one after the other: sampled, scored, backpropagated. A prompt whose
    videos could not all be scored is left out as a whole. The gradients of the parameters are left as they were found,
    whatever happens.

    Args:
        prompts: of the whole step; several ranks must be able to share them equally.

    Raises:
        RewardUnavailableError, RewardRejectedError: see `Patience`; on every rank when on one.
    """
    ranks = ranks or Ranks()
    mine = _Backpropagated()
    parameters = model.lora_parameters()
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        for place in ranks.even_share(len(prompts)):
            _backpropagate_prompt(model, link, prompts[place], algorithm, (*seed, place), mine, ranks)
            if mine.fault is not None:
                break
        return _update_of(mine, [parameter.grad for parameter in parameters], weight, ranks)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _update_of(mine: _Backpropagated, sums: list[Tensor | None], weight: float, ranks: Ranks) -> FeedbackUpdate:
    """Returns this rank's part of the mean over the videos of all ranks."""
    parts = ranks.gather((mine.rewards, mine.dropped))
    everyone = sorted((group for rewards, _ in parts for group in rewards), key=lambda group: group[0])
    update = FeedbackUpdate(
        rewards=[rewards for _, rewards in everyone],
        dropped=sum(dropped for _, dropped in parts),
        preview=mine.preview,
        fault=mine.fault,
    )
    count = sum(len(rewards) for rewards in update.rewards)
    if count > 0 and mine.fault is None:
        update.loss, update.kl = weight * mine.loss / count, mine.kl / count
        update.gradients = [None if gradient is None else gradient * (weight / count) for gradient in sums]
    return update


def _backpropagate_prompt(
    model: WanModule,
    link: RewardLink,
    prompt: PreparedPrompt,
    algorithm: PolicyGradientConfig,
    seed: tuple[int | str, ...],
    mine: _Backpropagated,
    ranks: Ranks,
) -> None:
    """Adds the videos of one prompt to `mine`, and the sum of their losses' gradients to the parameters.

    `seed` ends in the prompt's place in the step. All ranks are here together, each with a prompt of its own.
    """
    options = feedback_options(link.config.score_options(), algorithm, link.config.gradient_encoding)
    shape = (prompt.num_frames, prompt.height, prompt.width)
    group = link.open_group(prompt.identity, algorithm.feedback.samples, shape, options, prompt.reference_motion)
    video, preview, fault = _sample(model, prompt, group, algorithm, seed)
    mine.preview = preview if mine.preview is None else mine.preview
    mine.fault = next((found for found in ranks.gather(fault) if found is not None), None)
    if mine.fault is not None or video is None:
        group.abandon()
        return
    rewards: list[VideoReward] = []
    loss = 0.0 * (video.pixels.sum() + video.kl.sum())
    with ranks.together():
        try:
            rewards = group.results()
            loss = video_losses(video, rewards, algorithm.feedback).sum()
        except (GroupDroppedError, InvalidGradients):
            mine.dropped += 1
            rewards = []
    if rewards or ranks.sharded:  # a sharded model needs every rank in every backward pass
        loss.backward()
    if rewards:
        mine.rewards.append((int(seed[-1]), [replace(reward, crop_gradients=()) for reward in rewards]))
        mine.loss += float(loss.detach())
        mine.kl += float(video.kl.detach().sum())


def _sample(
    model: WanModule,
    prompt: PreparedPrompt,
    group: GroupScoring,
    algorithm: PolicyGradientConfig,
    seed: tuple[int | str, ...],
) -> tuple[FeedbackVideo | None, NDArray[np.uint8] | None, str | None]:
    """Returns the videos of one prompt with their graph, the frames of the first, uint8 RGB [T, H, W, 3], and None;
    or None twice and what is not finite."""
    preview: list[NDArray[np.uint8]] = []

    def send(sample: int, first_frame: int, frames: NDArray[np.uint8]) -> None:
        group.put(sample, first_frame, frames)
        if sample == 0:
            preview.append(frames)

    latent_shape, config = prompt.conditioning.latent_shape, algorithm.feedback
    noise = torch.stack([gaussian_noise(latent_shape, *seed, sample) for sample in range(config.samples)])
    try:
        video = sample_in_graph(model, prompt.conditioning.to(model.device), noise, config, send)
    except NonFiniteFramesError as error:
        return None, None, f"row {prompt.row}: {error}"
    return video, np.concatenate(preview), None
