"""A small Wan2.2-style image-to-video DiT (36 input channels = 16 latent + 20 conditioning) with random weights."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

DIT_SIZES = {
    "has_image_input": False,
    "patch_size": [1, 2, 2],
    "in_dim": 36,
    "dim": 96,
    "ffn_dim": 192,
    "freq_dim": 64,
    "text_dim": 32,
    "out_dim": 16,
    "num_heads": 4,
    "num_layers": 2,
    "eps": 1e-6,
    "require_clip_embedding": False,
}

DitFactory = Callable[..., torch.nn.Module]
Velocity = Callable[[torch.nn.Module], torch.Tensor]


@pytest.fixture(scope="session")
def make_dit() -> DitFactory:
    """Returns a function that builds the same small DiT again and again, in the dtype asked for."""
    from diffsynth.models.wan_video_dit import WanModel

    def build(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            dit = WanModel(**DIT_SIZES)
        return dit.to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def velocity() -> Velocity:
    """Returns a function that runs the DiT through DiffSynth's own model function on fixed input."""
    from diffsynth.pipelines.wan_video import model_fn_wan_video

    generator = torch.Generator().manual_seed(7)
    latents = torch.randn(1, 16, 2, 4, 4, generator=generator)
    conditioning = torch.randn(1, 20, 2, 4, 4, generator=generator)
    context = torch.randn(1, 5, 32, generator=generator)

    def run(dit: torch.nn.Module) -> torch.Tensor:
        dtype = next(dit.parameters()).dtype
        return model_fn_wan_video(
            dit=dit,
            latents=latents.to(dtype),
            timestep=torch.tensor([750.0]).to(dtype),
            context=context.to(dtype),
            y=conditioning.to(dtype),
        )

    return run


@pytest.fixture(scope="session")
def make_trained_dit(make_dit: DitFactory) -> DitFactory:
    """Returns a function that builds the DiT with an adapter whose lora_B is not zero, as after training."""
    from likeness_trainer.wan.lora import inject_lora, load_lora_state, lora_state

    def build(rank: int = 4, alpha: float = 6.0, target_modules: str = "q,k,v,o,ffn.0,ffn.2") -> torch.nn.Module:
        dit = make_dit()
        inject_lora(dit, rank=rank, alpha=alpha, target_modules=target_modules, seed=3)
        generator = torch.Generator().manual_seed(11)
        state = {
            name: torch.randn(tensor.shape, generator=generator) * 0.2 if ".lora_B." in name else tensor
            for name, tensor in lora_state(dit).items()
        }
        load_lora_state(dit, state)
        return dit

    return build
