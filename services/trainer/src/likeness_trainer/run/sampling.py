"""One video from a run's model, with or without its LoRA, as an mp4."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from likeness_trainer.config import TrainConfig
from likeness_trainer.errors import RunFolderError
from likeness_trainer.learn.rollout import sample_latents, send_decoded
from likeness_trainer.learn.seeds import gaussian_noise
from likeness_trainer.run.checkpoint import load_checkpoint
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.wan import lora
from likeness_trainer.wan.module import WanModule


def load_trained(folder: RunFolder, config: TrainConfig) -> WanModule:
    """Returns the model of a run with the adapters of its newest checkpoint."""
    latest = folder.latest_checkpoint()
    if latest is None:
        raise RunFolderError(f"{folder.path} has no checkpoint yet")
    checkpoint = load_checkpoint(latest)
    model = WanModule(config.model, config.sampler, seed=config.seed)
    for expert, state in checkpoint.adapters.items():
        lora.load_lora_state(getattr(model.pipe, expert), state)
    return model


def sample_video(
    model: WanModule, prompt: str, first_frame: NDArray[np.uint8] | None, num_frames: int, height: int, width: int, seed: int
) -> NDArray[np.uint8]:
    """Returns uint8 RGB [num_frames, height, width, 3]."""
    conditioning = model.encode(prompt, first_frame, num_frames, height, width).to(model.device)
    frames = np.zeros((num_frames, height, width, 3), np.uint8)

    def take(sample: int, first: int, chunk: NDArray[np.uint8]) -> None:
        frames[first : first + len(chunk)] = chunk

    noise = gaussian_noise((1, *conditioning.latent_shape), seed, "sample")
    send_decoded(model, sample_latents(model, conditioning, noise), range(1), take)
    return frames


def write_mp4(path: Path, frames_rgb: NDArray[np.uint8], frames_per_second: int) -> None:
    """Writes uint8 RGB [T, H, W, 3] as H.264 at high quality."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=frames_per_second, options={"crf": "12"})
        stream.height, stream.width, stream.pix_fmt = *frames_rgb.shape[1:3], "yuv420p"
        for frame in frames_rgb:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
