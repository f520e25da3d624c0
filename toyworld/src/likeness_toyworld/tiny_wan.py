"""The tiny Wan2.2-I2V: DiffSynth's own classes at small sizes, and their registration with DiffSynth.

DiffSynth recognises a checkpoint by a hash of its keys and shapes, looked up in a table of configurations. The two
experts have the same shapes and therefore share one entry.
"""

import os
from typing import Any

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

import torch
from diffsynth.configs import MODEL_CONFIGS
from diffsynth.core.loader import hash_model_file
from diffsynth.models.wan_video_text_encoder import WanTextEncoder
from diffsynth.models.wan_video_vae import Decoder3d, VideoVAE_, WanVideoVAE
from torch import Tensor, nn

from likeness_toyworld.assets import TEXT_TOKENS, model_paths
from likeness_toyworld.folded_convolution import fold_convolutions

LATENT_CHANNELS = 16
DIT_SIZES: dict[str, Any] = {
    "has_image_input": False, "patch_size": [1, 2, 2], "in_dim": 36, "dim": 144, "ffn_dim": 576, "freq_dim": 64,
    "text_dim": 32, "out_dim": LATENT_CHANNELS, "num_heads": 4, "num_layers": 4, "eps": 1e-6,
    "require_clip_embedding": False,
}  # fmt: skip
VAE_SIZES: dict[str, Any] = {"dim": 8, "dim_mult": (1, 2, 4, 8), "encoder_blocks": 1, "decoder_blocks": 1}
TEXT_ENCODER_SIZES: dict[str, Any] = {
    "vocab": 128, "dim": 32, "dim_attn": 32, "dim_ffn": 64, "num_heads": 2, "num_layers": 1,
}  # fmt: skip


class TinyWanVideoVAE(WanVideoVAE):
    """DiffSynth's Wan VAE with a width of our choice (upstream's is fixed at 96) and fast convolutions on CPUs.

    8x smaller in space, 4x in time, 16 channels. The latents need no rescaling: mean 0, deviation 1.
    """

    def __init__(
        self, dim: int = 8, dim_mult: tuple[int, ...] = (1, 2, 4, 8), encoder_blocks: int = 1, decoder_blocks: int = 1
    ) -> None:
        nn.Module.__init__(self)
        self.mean, self.std = torch.zeros(LATENT_CHANNELS), torch.ones(LATENT_CHANNELS)
        self.scale = [self.mean, 1.0 / self.std]
        model = VideoVAE_(dim=dim, z_dim=LATENT_CHANNELS, dim_mult=list(dim_mult), num_res_blocks=encoder_blocks)
        # upstream gives the decoder one block more than the encoder at each scale; full resolution is what costs
        model.decoder = Decoder3d(
            dim, LATENT_CHANNELS, list(dim_mult), decoder_blocks - 1, [], model.temperal_upsample, 0.0
        )
        fold_convolutions(model)
        self.model = model.eval().requires_grad_(False)
        self.upsampling_factor, self.z_dim = 8, LATENT_CHANNELS


class TinyWanTextEncoder(WanTextEncoder):
    """DiffSynth's text encoder, which keeps the first TEXT_TOKENS tokens.

    DiffSynth pads every prompt to 512 tokens, ten times as many as the toy's video has.
    """

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Context float [B, TEXT_TOKENS, dim] of token ids int64 [B, L] with mask int64 [B, L]."""
        return super().forward(ids[:, :TEXT_TOKENS], None if mask is None else mask[:, :TEXT_TOKENS])


def _entries() -> list[dict[str, Any]]:
    paths = model_paths()
    return [
        {
            "model_hash": hash_model_file(paths["dit"]),
            "model_name": "wan_video_dit",
            "model_class": "diffsynth.models.wan_video_dit.WanModel",
            "extra_kwargs": DIT_SIZES,
        },
        {
            "model_hash": hash_model_file(paths["vae"]),
            "model_name": "wan_video_vae",
            "model_class": f"{__name__}.TinyWanVideoVAE",
            "extra_kwargs": VAE_SIZES,
            "state_dict_converter": "diffsynth.utils.state_dict_converters.wan_video_vae.WanVideoVAEStateDictConverter",
        },
        {
            "model_hash": hash_model_file(paths["text_encoder"]),
            "model_name": "wan_video_text_encoder",
            "model_class": f"{__name__}.TinyWanTextEncoder",
            "extra_kwargs": TEXT_ENCODER_SIZES,
        },
    ]


def register() -> None:
    """Add the tiny models to MODEL_CONFIGS unless they are there: a duplicate would load a model twice."""
    known = {entry["model_hash"] for entry in MODEL_CONFIGS}
    MODEL_CONFIGS.extend(entry for entry in _entries() if entry["model_hash"] not in known)
