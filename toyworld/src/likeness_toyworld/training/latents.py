"""Encodes the painted pre-training corpus once, so that the experts train on small latents.

`python -m likeness_toyworld.training.latents --vae FILE --out FILE --clips N --seed S`; several files with different
seeds can be made side by side.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from likeness_toyworld.tiny_wan import TinyWanVideoVAE
from likeness_toyworld.training.corpus import paint_corpus
from likeness_toyworld.training.progress import Progress
from likeness_toyworld.training.vae import as_video, load_vae

_BATCH = 8


def encode_batch(vae: TinyWanVideoVAE, video: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [B, 16, T', h, w] of video float [B, 3, T, H, W] and of its first frame followed by empty frames.

    The second is what image-to-video conditioning shows to the model.
    """
    first_only = video.clone()
    first_only[:, :, 1:] = 0
    with torch.no_grad():
        latents, conditioning = vae.model.encode(torch.cat([video, first_only]), vae.scale).chunk(2)
    return latents, conditioning


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Encode painted clips, most of which drift.")
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vae = load_vae(arguments.vae)
    batches = arguments.clips // _BATCH
    progress = Progress("latents", batches, every=25)
    video_latents, first_frame_latents = [], []
    for step in range(1, batches + 1):
        corpus = paint_corpus(_BATCH, seed=1_000 * arguments.seed + step)
        latents, conditioning = encode_batch(vae, as_video(corpus.frames_rgb))
        video_latents.append(latents.half())
        first_frame_latents.append(conditioning.half())
        progress.update(step)
    save_file({"video": torch.cat(video_latents), "first_frame": torch.cat(first_frame_latents)}, arguments.out)


if __name__ == "__main__":
    main()
