"""The recipe's model without weights: the trainer's own module on the meta device, and what it would be told."""

from __future__ import annotations

from typing import Any

import torch
from diffsynth.pipelines.wan_video import WanVideoPipeline
from torch import Tensor, nn

from likeness_trainer.config import TrainConfig
from likeness_trainer.data.dataset import DataConfig
from likeness_trainer.wan.loading import register_models
from likeness_trainer.wan.model_files import ROLES
from likeness_trainer.wan.module import Conditioning, WanModule
from likeness_trainer.wan.published import meta_part, part_hashes

META = torch.device("meta")
PROMPT_TOKENS = 512
"""Length to which DiffSynth pads prompts."""
CLIP_TOKENS, CLIP_WIDTH = 257, 1280
"""Shape of the image embedding of Wan 2.1's image-to-video models."""


def meta_module(config: TrainConfig) -> WanModule:
    """Returns the model of a recipe with its adapters, on the meta device.

    Raises ModelLoadError where neither the files are there nor the architecture is a published one.
    """
    register_models()
    dtype = getattr(torch, config.model.torch_dtype)
    pipe = WanVideoPipeline(device="meta", torch_dtype=dtype)
    for role, model_hash in part_hashes(config.model).items():
        setattr(pipe, role, meta_part(model_hash, role).to(dtype))
    without_files = config.model.model_copy(update={"device": "meta", "base_loras": []})  # they change no shape
    return WanModule(without_files, config.sampler, pipe=pipe)


def parts_of(model: WanModule) -> dict[str, nn.Module]:
    """Returns role to part, those that the model has."""
    parts = {role: getattr(model.pipe, role) for role in ROLES}
    return {role: part for role, part in parts.items() if part is not None}


def largest_size(data: DataConfig) -> tuple[int, int]:
    """Returns (height, width) of the largest videos that the settings allow: a square where they set no size."""
    return data.frame_size(10_000, 10_000)


def encode_prompt(model: WanModule) -> Tensor:
    """Returns what the text encoder gives for one prompt, [1, tokens, width]."""
    ids = torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64, device=model.device)
    context: Tensor = model.pipe.text_encoder(ids, torch.ones_like(ids))
    return context


def encode_first_frame(model: WanModule, num_frames: int, height: int, width: int) -> Tensor | None:
    """Returns what the VAE gives for the first frame, [1, z_dim, T, h, w], or None for text-to-video.

    As DiffSynth's units do it: the frame and zeros for all others, or the frame alone where a DiT takes it as latents.
    """
    if not (model.needs_first_frame or model.pipe.dit.fuse_vae_embedding_in_latents):
        return None
    frames = num_frames if model.needs_first_frame else 1
    video = torch.zeros(1, 3, frames, height, width, dtype=model.dtype, device=model.device)
    latents: Tensor = model.pipe.vae.single_encode(video, model.device)
    return latents


@torch.no_grad()
def meta_conditioning(model: WanModule, num_frames: int, height: int, width: int) -> Conditioning:
    """Returns the conditioning that `WanModule.encode` makes for one video, without its values."""
    model.check_shape(num_frames, height, width)
    dit, vae = model.pipe.dit, model.pipe.vae
    factor = vae.upsampling_factor
    shape = (vae.z_dim, (num_frames - 1) // 4 + 1, height // factor, width // factor)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=model.dtype, device=model.device)

    context = torch.empty_like(encode_prompt(model))
    inputs: dict[str, Any] = {"context": context}
    if model.needs_first_frame:
        inputs["y"] = empty(1, dit.in_dim - vae.z_dim, *shape[1:])
    if dit.fuse_vae_embedding_in_latents:
        inputs |= {"fuse_vae_embedding_in_latents": True, "first_frame_latents": empty(1, shape[0], 1, *shape[2:])}
    if model.pipe.image_encoder is not None and dit.require_clip_embedding:
        inputs["clip_feature"] = empty(1, CLIP_TOKENS, CLIP_WIDTH)
    return Conditioning(inputs, shape, {"context": torch.empty_like(context)} if model.sampler.guided else {})
