"""Latents to frames, one latent frame at a time, so that frames can leave before the video is finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from diffsynth.models.wan_video_vae import VideoVAE38_, WanVideoVAE, count_conv3d, unpatchify
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class NonFiniteFramesError(ValueError):
    """Decoded frames hold NaN or infinity, which a cast to uint8 would turn into valid-looking pixels."""


def decode_latent_frames(
    vae: WanVideoVAE, latents: Tensor, checkpointing: bool = False, offload: bool = False
) -> Iterator[Tensor]:
    """Yields the pixels of each latent frame in turn: [B, 3, t, H, W], nominally -1 to 1, not clamped.

    The first latent frame gives 1 pixel frame, every other one 4. The causal cache goes from one call of the decoder
    to the next, so the concatenation equals the whole-video decode exactly, without seams.

    Args:
        vae: a loaded DiffSynth Wan VAE (2.1 or 2.2).
        latents: [B, z_dim, T, h, w].
        checkpointing: keep, of each latent frame, only its input and the cache, and decode it again in the backward.
        offload: keep these in CPU memory. The caches of all latent frames are the largest part of what a backward
            pass through a long video needs.
    """
    model = vae.model
    has_patches = isinstance(model, VideoVAE38_)
    parameter = next(model.parameters())
    latents = latents.to(parameter.device, parameter.dtype)
    mean, inverse_std = (value.to(latents).view(1, -1, 1, 1, 1) for value in vae.scale)
    hidden = model.conv2(latents / inverse_std + mean)
    cache: list[Any] = [None] * count_conv3d(model.decoder)
    for index in range(hidden.shape[2]):
        options = {"first_chunk": True} if has_patches and index == 0 else {}
        decode_one = partial(_decode_one, model.decoder, options)
        inputs = (hidden[:, :, index : index + 1], *cache)
        if checkpointing:
            with save_on_cpu() if offload else nullcontext():
                chunk, *cache = checkpoint(decode_one, *inputs, use_reentrant=False)
        else:
            chunk, *cache = decode_one(*inputs)
        yield unpatchify(chunk, patch_size=2) if has_patches else chunk


def _decode_one(decoder: nn.Module, options: dict[str, bool], hidden: Tensor, *cache: Any) -> tuple[Any, ...]:
    """Returns the pixels of one latent frame and the cache after it. The decoder changes a copy of the list."""
    chunk, following, _ = decoder(hidden, feat_cache=list(cache), feat_idx=[0], **options)
    return (chunk, *following)


def to_uint8_rgb(pixels: Tensor) -> NDArray[np.uint8]:
    """Returns frames as uint8 RGB [B, t, H, W, 3] from pixels [B, 3, t, H, W] in -1 to 1; values outside are clamped.

    Raises:
        NonFiniteFramesError: a pixel is NaN or infinite.
    """
    if not torch.isfinite(pixels).all():
        broken = int((~torch.isfinite(pixels)).sum())
        raise NonFiniteFramesError(f"{broken} of {pixels.numel()} decoded pixel values are NaN or infinite")
    scaled = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 4, 1).contiguous().cpu().numpy()
