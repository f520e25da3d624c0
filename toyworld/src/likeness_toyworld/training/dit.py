"""Trains the two experts on encoded clips: together on all noise levels first, then each on its own.

Flow matching: x = (1 - s) video + s noise, target noise - video, squared error. Noise levels follow the sampler's shift
of 5: s = 5 u / (1 + 4 u) for uniform u. The high-noise expert samples at s >= 0.9, the low-noise expert below.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.models.wan_video_text_encoder import HuggingfaceTokenizer
from diffsynth.pipelines.wan_video import model_fn_wan_video
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from likeness_toyworld.tiny_wan import DIT_SIZES
from likeness_toyworld.training.progress import Progress
from likeness_toyworld.training.text import PROMPTS, build_text_encoder, build_tokenizer

SHIFT = 5.0
ALL_LEVELS, HIGH_LEVELS, LOW_LEVELS = (0.0, 1.0), (0.58, 1.0), (0.0, 0.7)
"""Ranges of u; HIGH_LEVELS is s from 0.87, LOW_LEVELS is s up to 0.92: each passes the boundary of 0.9 a little."""
BATCH = 16
RATE, EXPERT_RATE = 1.5e-3, 8e-4
WARM_UP_STEPS = 100
AVERAGING = 0.998


@dataclass(frozen=True)
class Latents:
    """video and first_frame: float16 [N, 16, T', h, w]; first_frame encodes the first frame and empty frames."""

    video: Tensor
    first_frame: Tensor


def load_latents(paths: Sequence[Path]) -> Latents:
    """The clips of all files that training.latents wrote."""
    files = [load_file(path) for path in paths]
    return Latents(*(torch.cat([file[key] for file in files]) for key in ("video", "first_frame")))


def prompt_contexts(tokenizer_folder: Path) -> Tensor:
    """float32 [P, tokens, dim]: contexts of PROMPTS and of the empty prompt, as DiffSynth encodes prompts."""
    build_tokenizer(tokenizer_folder)
    tokenizer = HuggingfaceTokenizer(name=str(tokenizer_folder), seq_len=512, clean="whitespace")
    encoder = build_text_encoder().half().float()
    ids, mask = tokenizer([*PROMPTS, ""], return_mask=True, add_special_tokens=True)
    with torch.no_grad():
        context = encoder(ids, mask)
    for row, length in enumerate(mask.sum(1)):
        context[row, int(length) :] = 0
    return context


def conditioning(first_frame: Tensor) -> Tensor:
    """DiffSynth's y, float [B, 20, T', h, w]: 4 mask channels, 1 on the first latent frame, then first_frame."""
    mask = first_frame.new_zeros(first_frame.shape[0], 4, *first_frame.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, first_frame], 1)


class ExpertTrainer:
    """Trains experts on latents under random prompts; the global torch seed fixes every draw."""

    def __init__(self, latents: Latents, contexts: Tensor) -> None:
        self._latents, self._contexts = latents, contexts

    def train(self, name: str, expert: WanModel, levels: tuple[float, float], steps: int, rate: float) -> WanModel:
        """Train `expert` on noise levels u in `levels`; returns it with its weights replaced by their running mean."""
        expert.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(expert.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        averaged = {key: value.detach().clone() for key, value in expert.state_dict().items()}
        progress = Progress(name, steps)
        for step in range(1, steps + 1):
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / WARM_UP_STEPS) * (0.02 + 0.98 * cosine)
            loss = self._loss(expert, levels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                weight = 1 - min(AVERAGING, step / (step + 10))
                for key, value in expert.state_dict().items():
                    averaged[key].lerp_(value, weight)
            progress.update(step, loss=loss.item())
        expert.load_state_dict(averaged)
        return expert

    def _loss(self, expert: WanModel, levels: tuple[float, float]) -> Tensor:
        chosen = torch.randint(len(self._latents.video), (BATCH,))
        video, first_frame = self._latents.video[chosen].float(), self._latents.first_frame[chosen].float()
        u = levels[0] + (levels[1] - levels[0]) * torch.rand(BATCH)
        sigma = (SHIFT * u / (1 + (SHIFT - 1) * u)).clamp(1e-3, 1)
        noise = torch.randn_like(video)
        level = sigma.view(-1, 1, 1, 1, 1)
        velocity = model_fn_wan_video(
            dit=expert, latents=(1 - level) * video + level * noise, timestep=1000 * sigma,
            context=self._contexts[torch.randint(len(self._contexts), (BATCH,))], y=conditioning(first_frame),
        )  # fmt: skip
        return ((velocity - (noise - video)) ** 2).mean()


def fresh_expert() -> WanModel:
    """A WanModel of the toy's size that predicts zero."""
    expert = WanModel(**DIT_SIZES)
    nn.init.zeros_(expert.head.head.weight)
    nn.init.zeros_(expert.head.head.bias)
    return expert


def _save(expert: WanModel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().contiguous() for key, value in expert.state_dict().items()}, path)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Train the high-noise and the low-noise expert.")
    parser.add_argument("--latents", type=Path, nargs="+", required=True, help="files that training.latents wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for shared, high_noise and low_noise files")
    parser.add_argument("--start-from", type=Path, help="shared weights of an earlier run")
    parser.add_argument("--shared-steps", type=int, default=3000)
    parser.add_argument("--expert-steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    trainer = ExpertTrainer(load_latents(arguments.latents), prompt_contexts(arguments.out / "tokenizer"))
    expert = fresh_expert()
    if arguments.start_from:
        expert.load_state_dict(load_file(arguments.start_from))
    trainer.train("shared", expert, ALL_LEVELS, arguments.shared_steps, RATE)
    _save(expert, arguments.out / "shared.safetensors")
    for name, levels in (("low_noise", LOW_LEVELS), ("high_noise", HIGH_LEVELS)):
        expert.load_state_dict(load_file(arguments.out / "shared.safetensors"))
        trainer.train(name, expert, levels, arguments.expert_steps, EXPERT_RATE)
        _save(expert, arguments.out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
