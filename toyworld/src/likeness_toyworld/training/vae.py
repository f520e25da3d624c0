"""Trains the tiny VAE: pictures first, then clips.

The network starts as a linear auto-encoder of single frames: the last convolution of every residual block is zero, taps
on earlier frames are zero, time convolutions copy. The loss is L1 + 2 MSE + L1 of the picture's gradients, weighted
towards eyes, nose and mouth, plus L1 + 2 MSE of 8 x 8 means (colours of large areas), plus a pull of every latent
channel to mean 0 and deviation 1 in place of a Kullback-Leibler term; the decoder sees latents with a little noise.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from diffsynth.models.wan_video_vae import CausalConv3d, Resample, ResidualBlock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from likeness_toyworld.tiny_wan import VAE_SIZES, TinyWanVideoVAE
from likeness_toyworld.training.corpus import VALIDATION_PEOPLE, Corpus, paint_corpus
from likeness_toyworld.training.progress import Progress

LATENT_NOISE = 0.08
LANDMARK_WEIGHT, LANDMARK_RADIUS = 6.0, 3.5
IMAGE_BATCH, CLIP_BATCH = 8, 2
IMAGE_RATE, CLIP_RATE = 2e-3, 1e-3
COARSE_WEIGHT, COARSE_PIXELS = 3.0, 8
WARM_UP_STEPS = 100
EMPTY_SHARE = 0.1
"""Share of clips whose later frames are emptied, as image-to-video conditioning encodes them."""


def start_linear(model: nn.Module) -> None:
    """Set the weights of a fresh VideoVAE_ so that it is a linear auto-encoder of single frames."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, CausalConv3d) and module.kernel_size == (3, 3, 3):
                module.weight[:, :, :2] = 0
            if isinstance(module, ResidualBlock):
                module.residual[-1].weight.zero_()
                module.residual[-1].bias.zero_()
            if isinstance(module, Resample) and module.mode in ("upsample3d", "downsample3d"):
                _start_time_convolution(module)


def _start_time_convolution(module: Resample) -> None:
    weight, width = module.time_conv.weight, module.dim
    identity = torch.eye(width)
    weight.normal_(0, 0.01)
    module.time_conv.bias.zero_()
    if module.mode == "upsample3d":
        weight[:width, :, 2, 0, 0] += identity
        weight[width:, :, 2, 0, 0] += identity
    else:
        weight[:, :, 1, 0, 0] += 0.5 * identity
        weight[:, :, 2, 0, 0] += 0.5 * identity


def as_video(frames_rgb: np.ndarray) -> Tensor:
    """float32 [B, 3, T, H, W] in -1..1 of frames_rgb uint8 [B, T, H, W, 3]."""
    return (torch.from_numpy(frames_rgb).float() / 127.5 - 1).permute(0, 4, 1, 2, 3).contiguous()


def landmark_weights(landmarks: Tensor, size: int) -> Tensor:
    """float32 [B, 1, T, size, size] with mean 1: high around landmarks float32 [B, T, 5, 2] (pixels)."""
    axis = torch.arange(size) + 0.5
    x, y = landmarks[..., 0, None, None], landmarks[..., 1, None, None]
    square = (axis[None, :] - x) ** 2 + (axis[:, None] - y) ** 2
    bumps = torch.exp(-square / (2 * LANDMARK_RADIUS**2)).amax(2)
    weights = 1 + LANDMARK_WEIGHT * bumps
    return (weights / weights.mean((-1, -2), keepdim=True))[:, None]


def reconstruction_loss(video: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, plain MSE) of video and target float [B, 3, T, H, W]; weights [B, 1, T, H, W]."""
    difference = video - target
    squares = difference * difference
    across = difference.diff(dim=-1).abs() * weights[..., 1:]
    down = difference.diff(dim=-2).abs() * weights[..., 1:, :]
    loss = (difference.abs() * weights).mean() + 2 * (squares * weights).mean() + across.mean() + down.mean()
    coarse = nn.functional.avg_pool3d(difference, (1, COARSE_PIXELS, COARSE_PIXELS))
    loss = loss + COARSE_WEIGHT * (coarse.abs().mean() + 2 * (coarse * coarse).mean())
    return loss, squares.mean().detach()


def latent_penalty(latents: Tensor) -> Tensor:
    """Squared distance of every channel's mean from 0 and deviation from 1; latents [B, C, T, h, w]."""
    channels = latents.transpose(0, 1).flatten(1)
    return (channels.mean(1) ** 2).mean() + ((channels.std(1) - 1) ** 2).mean()


class VaeTrainer:
    """Trains one VAE on a corpus; `seed` fixes every draw. With decoder_only its latents stay what they are."""

    def __init__(self, vae: TinyWanVideoVAE, corpus: Corpus, seed: int, decoder_only: bool = False) -> None:
        self._vae, self._corpus, self._decoder_only = vae, corpus, decoder_only
        self._rng = np.random.default_rng(seed)
        self._optimizer = torch.optim.AdamW(vae.model.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)

    def train(self, name: str, steps: int, rate: float, out: Path) -> None:
        """`steps` steps with a cosine schedule from `rate`, on "images" or "clips"; saved to `out` now and then."""
        model = self._vae.model.train().requires_grad_(True)
        if self._decoder_only:
            model.encoder.requires_grad_(False)
            model.conv1.requires_grad_(False)
        progress = Progress(name, steps)
        for step in range(1, steps + 1):
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in self._optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / WARM_UP_STEPS) * (0.01 + 0.99 * cosine)
            video, weights = self._images() if name == "images" else self._clips()
            latents = model.encode(video, self._vae.scale)
            decoded = model.decode(latents + LATENT_NOISE * torch.randn_like(latents), self._vae.scale)
            loss, mse = reconstruction_loss(decoded, video, weights)
            self._optimizer.zero_grad(set_to_none=True)
            (loss + 0.02 * latent_penalty(latents)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self._optimizer.step()
            progress.update(step, loss=loss.item(), psnr=10 * math.log10(4 / mse.item()))
            if step % 500 == 0 or step == steps:
                save_vae(self._vae, out)

    def _images(self) -> tuple[Tensor, Tensor]:
        clips, frames = self._corpus.frames_rgb.shape[:2]
        chosen = self._rng.integers(clips, size=IMAGE_BATCH), self._rng.integers(frames, size=IMAGE_BATCH)
        return self._batch(self._corpus.frames_rgb[chosen][:, None], self._corpus.landmarks[chosen][:, None])

    def _clips(self) -> tuple[Tensor, Tensor]:
        chosen = self._rng.integers(len(self._corpus.frames_rgb), size=CLIP_BATCH)
        video, weights = self._batch(self._corpus.frames_rgb[chosen], self._corpus.landmarks[chosen])
        emptied = torch.from_numpy(self._rng.random(CLIP_BATCH) < EMPTY_SHARE)
        video[emptied, :, 1:] = 0
        return video, weights

    def _batch(self, frames_rgb: np.ndarray, landmarks: np.ndarray) -> tuple[Tensor, Tensor]:
        return as_video(frames_rgb), landmark_weights(torch.from_numpy(landmarks), frames_rgb.shape[2])


def save_vae(vae: TinyWanVideoVAE, path: Path) -> None:
    """Write the VAE's float32 weights under the keys of a Wan checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().contiguous() for key, value in vae.model.state_dict().items()}, path)


def load_vae(path: Path) -> TinyWanVideoVAE:
    """The VAE of a file that save_vae wrote, ready for inference in float32."""
    vae = TinyWanVideoVAE(**VAE_SIZES)
    vae.model.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    return vae


def validation_psnr(vae: TinyWanVideoVAE, clips: int = 16) -> float:
    """Peak signal-to-noise ratio (dB) of reconstructions of steady clips of validation people."""
    video = as_video(paint_corpus(clips, 1, VALIDATION_PEOPLE, drifting_share=0).frames_rgb)
    vae.model.eval()
    with torch.no_grad():
        decoded = vae.model.decode(vae.model.encode(video, vae.scale), vae.scale).clamp(-1, 1)
    return 10 * math.log10(4 / float(((decoded - video) ** 2).mean()))


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Train the tiny VAE on painted faces.")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--start-from", type=Path, help="go on from a file of an earlier run")
    parser.add_argument("--decoder-only", action="store_true", help="keep the encoder and its latents")
    parser.add_argument("--image-steps", type=int, default=6000)
    parser.add_argument("--clip-steps", type=int, default=1500)
    parser.add_argument("--clips", type=int, default=2500, help="size of the painted corpus")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    if arguments.start_from:
        vae = load_vae(arguments.start_from)
    else:
        vae = TinyWanVideoVAE(**VAE_SIZES)
        start_linear(vae.model)
    trainer = VaeTrainer(vae, paint_corpus(arguments.clips, arguments.seed), arguments.seed, arguments.decoder_only)
    trainer.train("images", arguments.image_steps, IMAGE_RATE, arguments.out)
    trainer.train("clips", arguments.clip_steps, CLIP_RATE, arguments.out)
    print(f"validation: {validation_psnr(vae):.2f} dB")


if __name__ == "__main__":
    main()
