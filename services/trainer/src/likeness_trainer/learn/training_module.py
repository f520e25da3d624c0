"""`WanTrainingModule`: the trainer as one torch module, for anybody's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from likeness_reward.domain import GradientEncoding, IdentityTemplate, ScoreOptions, VideoMotion, VideoReward
from likeness_trainer.learn.credit import group_scores, weighted_advantages
from likeness_trainer.learn.feedback_config import AlgorithmName, RewardFeedbackConfig
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.reward_feedback import feedback_options, sample_in_graph, video_losses
from likeness_trainer.learn.rollout import sample_group, send_decoded
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.learn.update import ScoredTrajectory, objective_terms
from likeness_trainer.wan.model_config import BaseLora, WanModelConfig
from likeness_trainer.wan.model_files import ModelPaths
from likeness_trainer.wan.module import Conditioning, WanModule
from likeness_trainer.wan.sampler_config import GuidanceScale, SamplerConfig


class RewardScorer(Protocol):
    """Scores whole videos; both the embedded scorer and the gRPC client do."""

    def embed_identity(self, images: list[NDArray[np.uint8]]) -> IdentityTemplate: ...

    def score(
        self,
        frames_rgb: NDArray[np.uint8],
        identity: IdentityTemplate,
        options: ScoreOptions | None = None,
        *,
        reference_motion: VideoMotion | None = None,
    ) -> VideoReward: ...


class ModuleOptions(BaseModel):
    """Keyword arguments of WanTrainingModule beyond its signature."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    """Seed of the adapters and of the noise."""
    torch_dtype: str = "bfloat16"
    """Precision of the frozen weights."""
    device: str = "auto"
    """`auto` takes CUDA when there is one."""
    lora_alpha: float | None = None
    """Scale of the adapters times their rank; the rank when not set."""
    base_loras: list[BaseLora] = []
    """LoRA files merged into the base, also as mappings of path, expert and strength."""
    use_gradient_checkpointing_offload: bool = False
    """Keep gradient checkpoints in CPU memory."""
    shift: float = 5.0
    """Time shift of the schedule."""
    boundary: float = 0.9
    """Noise level between the two experts: 0.9 for I2V, 0.875 for T2V."""
    stochastic_step: str = "cps"
    """`cps` or `flow_sde`."""
    noise_level: float = 0.7
    """Fresh noise in the stochastic steps."""
    guidance_scale: GuidanceScale = 1.0
    """Classifier-free guidance; for two experts also a mapping of dit and dit2."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    group_size: int = 4
    """Samples compared with each other in one forward."""
    branch_batch: int = 1
    """Samples evaluated at once."""
    credit: str = "latent_frame"
    """`video` or `latent_frame`."""
    reward_weights: dict[str, float] = {"identity": 1.0}
    """Components of the reward and their weights."""
    baseline: str = "mean"
    """`mean` or `leave_one_out`."""
    ratio: str = "standard"
    """`standard` or `guard`."""
    clip_range: float = 1e-3
    """Clip range of the ratio."""
    kl_weight: float = 0.01
    """Weight of the divergence from the model without adapters."""
    no_face_value: float = 0.0
    """Score of a frame without a usable face."""
    min_face_pixels: int = 32
    """Faces narrower than this do not count."""
    algorithm: AlgorithmName = "policy_gradient"
    """What `forward` returns the loss of: `policy_gradient`, `reward_feedback` or `hybrid`."""
    feedback: RewardFeedbackConfig = RewardFeedbackConfig()
    """Settings of reward feedback, also as a mapping."""
    gradient_encoding: GradientEncoding = "float16"
    """How gradients cross the wire from a reward server."""


class WanTrainingModule(WanModule):
    """Wan DiT with LoRA, frozen VAE and text encoder, Euler schedule and identity reward.

    ``forward(data)`` samples a group of videos for one prompt and first frame, scores how well each keeps the person,
    and returns ``(loss, face_score, kl_loss)``: call ``loss.backward()`` and step any optimizer over
    ``lora_parameters()``. The graphs of all window steps live at once here; the training service backpropagates them
    one by one instead. With ``algorithm="reward_feedback"`` it samples one video, and the loss's gradient goes through
    the reward, the decoder and the window.

    Args:
        model_paths: mapping of dit, dit2, vae, text_encoder to a file or its shards; a list of files; or a JSON file.
        reward_model_path: a face pack (folder of ONNX files), or HOST:PORT of a reward server.
        tokenizer_path: folder with the tokenizer.
        trainable_models: ``["dit"]`` trains every expert that the window evaluates, ``["dit2"]`` the low-noise one.
        lora_target_modules: comma-separated layers of each block.
        lora_rank: rank of the adapters.
        use_gradient_checkpointing: recompute DiT blocks in the backward pass.
        num_inference_steps, mid_timestep, final_timestep: length of the chain, first and last step of the window.
        **kwargs: fields of `ModuleOptions`.
    """

    def __init__(
        self,
        model_paths: ModelPaths,
        reward_model_path: str | None,
        tokenizer_path: str,
        trainable_models: list[str] | str,
        lora_target_modules: str = "q,k,v,o,ffn.0,ffn.2",
        lora_rank: int = 32,
        use_gradient_checkpointing: bool = True,
        num_inference_steps: int = 8,
        mid_timestep: int = 4,
        final_timestep: int = 7,
        **kwargs: Any,
    ) -> None:
        options = ModuleOptions(**kwargs)
        names = trainable_models.split(",") if isinstance(trainable_models, str) else trainable_models
        model = WanModelConfig(
            model_paths=model_paths,  # type: ignore[arg-type]
            tokenizer_path=tokenizer_path,
            trainable_models=names,
            lora_target_modules=lora_target_modules,
            lora_rank=lora_rank,
            use_gradient_checkpointing=use_gradient_checkpointing,
            **options.model_dump(include=set(WanModelConfig.model_fields)),
        )
        sampler = SamplerConfig(
            num_inference_steps=num_inference_steps,
            mid_timestep=mid_timestep,
            final_timestep=final_timestep,
            **options.model_dump(include=set(SamplerConfig.model_fields)),
        )
        super().__init__(model, sampler, seed=options.seed)
        self.options = options
        self.algorithm = PolicyGradientConfig(
            groups_per_step=1,
            name=options.algorithm,
            **options.model_dump(include=set(PolicyGradientConfig.model_fields)),
        )
        self.score_options = ScoreOptions(
            no_face_value=options.no_face_value, min_face_pixels=options.min_face_pixels, include_frames=True
        )
        self.reward_model_path = reward_model_path
        self._scorer: RewardScorer | None = None
        self._calls = 0

    @property
    def scorer(self) -> RewardScorer:
        """The reward, opened on first use."""
        if self._scorer is None:
            self._scorer = open_scorer(self.reward_model_path)
        return self._scorer

    def forward(self, data: Mapping[str, Any], algorithm: AlgorithmName | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (loss, face_score, kl_loss): scalars; loss and kl_loss have gradients in the adapters only.

        Args:
            data: `prompt` (text) and `video` (list of pictures or uint8 [T, H, W, 3], 4n + 1 frames whose first is the
                picture to animate and which together show the person). Optional: `reference_image` (replaces the
                video's first frame and its frames as identity), `seed`.
            algorithm: `policy_gradient`, `reward_feedback` or `hybrid`; that of the options when not given.
        """
        name = algorithm or self.options.algorithm
        example = self._example(data)
        if name == "policy_gradient":
            return self._policy_gradient(example)
        if name == "reward_feedback":
            return self._reward_feedback(example)
        if name != "hybrid":
            raise ValueError(f"algorithm is {name!r}; it is policy_gradient, reward_feedback or hybrid")
        policy, feedback = self._policy_gradient(example), self._reward_feedback(example)
        loss = policy[0] + self.algorithm.feedback.weight * feedback[0]
        return loss, (policy[1] + feedback[1]) / 2, (policy[2] + feedback[2]) / 2

    def _example(self, data: Mapping[str, Any]) -> _Example:
        frames = _as_frames(data["video"])
        reference = _as_frames([data["reference_image"]]) if data.get("reference_image") is not None else None
        first = frames[0] if reference is None else reference[0]
        num_frames, height, width, _ = frames.shape
        conditioning = self.encode(data["prompt"], Image.fromarray(first), num_frames, height, width)
        seed = (int(data.get("seed", self.options.seed)), "forward", self._calls)
        self._calls += 1
        return _Example(conditioning.to(self.device), frames, reference, seed)

    def _policy_gradient(self, example: _Example) -> tuple[Tensor, Tensor, Tensor]:
        reference = example.frames if example.reference is None else example.reference
        identity = self.scorer.embed_identity(list(reference))
        group_size = self.algorithm.group_size
        videos = np.zeros((group_size, *example.frames.shape), np.uint8)
        keep = partial(_keep, videos)
        conditioning = example.conditioning
        trajectories = []
        groups = sample_group(self, conditioning, group_size, self.algorithm.branch_batch, example.seed)
        for trajectory, latents in groups:
            trajectories.append(trajectory)
            send_decoded(self, latents, trajectory.samples, keep)
        motion = self._reference_motion(example, identity)
        rewards = [self.scorer.score(v, identity, self.score_options, reference_motion=motion) for v in videos]
        advantages = weighted_advantages(
            group_scores(rewards, self.algorithm, self.options.no_face_value), self.algorithm
        )
        batches = [
            ScoredTrajectory(trajectory, conditioning, advantages[list(trajectory.samples)])
            for trajectory in trajectories
        ]
        loss = torch.zeros((), device=self.device)
        kl_loss = torch.zeros((), device=self.device)
        for term, kl, _ in objective_terms(self, batches, self.algorithm):
            loss, kl_loss = loss + term, kl_loss + kl
        face_score = torch.tensor([reward.value for reward in rewards], device=self.device).mean()
        return loss, face_score, kl_loss

    def _reference_motion(self, example: _Example, identity: IdentityTemplate) -> VideoMotion | None:
        """Returns how much the example's video moves, where the reward weighs that."""
        if not self.algorithm.measures_motion:
            return None
        return self.scorer.score(example.frames, identity, self.score_options).motion

    def _reward_feedback(self, example: _Example) -> tuple[Tensor, Tensor, Tensor]:
        """One video, its reward differentiated; the video's first frame is no part of its identity, as published."""
        reference = example.reference
        if reference is None:
            reference = example.frames[1:] if len(example.frames) > 1 else example.frames
        identity = self.scorer.embed_identity(list(reference))
        frames = np.zeros((1, *example.frames.shape), np.uint8)
        noise = gaussian_noise((1, *example.conditioning.latent_shape), *example.seed, "feedback")
        config = self.algorithm.feedback
        video = sample_in_graph(self, example.conditioning, noise, config, partial(_keep, frames))
        options = feedback_options(self.score_options, self.algorithm, self.options.gradient_encoding)
        reward = self.scorer.score(frames[0], identity, options)
        (loss,) = video_losses(video, [reward], config)
        return loss, torch.tensor(reward.value, device=self.device), video.kl[0]


@dataclass(frozen=True)
class _Example:
    """One row of data, made ready."""

    conditioning: Conditioning
    frames: NDArray[np.uint8]
    """uint8 RGB [T, H, W, 3]."""
    reference: NDArray[np.uint8] | None
    """uint8 RGB [1, H, W, 3]; None when the frames show the person."""
    seed: tuple[int | str, ...]


def _keep(videos: NDArray[np.uint8], sample: int, first_index: int, chunk: NDArray[np.uint8]) -> None:
    videos[sample, first_index : first_index + len(chunk)] = chunk


def open_scorer(reward_model_path: str | None) -> RewardScorer:
    """Returns the embedded scorer of a pack folder, or the client of a server at HOST:PORT."""
    if reward_model_path is None:
        raise ValueError("reward_model_path is None: give a face pack folder or HOST:PORT of a reward server")
    if Path(reward_model_path).is_dir():
        from likeness_reward.embedded import EmbeddedScorer

        return EmbeddedScorer(Path(reward_model_path))
    host, separator, port = reward_model_path.rpartition(":")
    if separator and host and port.isdigit():
        from likeness_reward.client import RewardClient

        return RewardClient(reward_model_path)
    raise ValueError(f"reward_model_path is {reward_model_path!r}: neither a folder that exists nor HOST:PORT")


def _as_frames(video: Any) -> NDArray[np.uint8]:
    if isinstance(video, np.ndarray):
        frames = video
    else:
        pictures = [np.asarray(item.convert("RGB") if isinstance(item, Image.Image) else item) for item in video]
        if not pictures:
            raise ValueError("video has no frames")
        frames = np.stack(pictures)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ValueError(f"video is {frames.dtype} {list(frames.shape)}; it must be uint8 [T, H, W, 3], RGB")
    return frames
