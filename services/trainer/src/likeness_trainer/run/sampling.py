"""One video from a run's model, with or without its LoRA, as an mp4."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from likeness_trainer.config import TrainConfig
from likeness_trainer.data.dataset import fit_frame
from likeness_trainer.data.errors import UnusableMediaError
from likeness_trainer.data.images import read_image
from likeness_trainer.errors import ConfigError, RunFolderError
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
    model = WanModule(config.model, config.sampler, config.seed, config.memory)
    checkpoint.require_base(model.base_loras)
    for expert, state in checkpoint.published.items():
        lora.load_lora_state(getattr(model.pipe, expert), state)
    return model


def sample_video(
    model: WanModule,
    prompt: str,
    first_frame: NDArray[np.uint8] | None,
    num_frames: int,
    height: int,
    width: int,
    seed: int,
) -> NDArray[np.uint8]:
    """Returns uint8 RGB [num_frames, height, width, 3]."""
    conditioning = model.encode(prompt, first_frame, num_frames, height, width).to(model.device)
    frames = np.zeros((num_frames, height, width, 3), np.uint8)

    def take(sample: int, first: int, chunk: NDArray[np.uint8]) -> None:
        frames[first : first + len(chunk)] = chunk

    noise = gaussian_noise((1, *conditioning.latent_shape), seed, "sample")
    send_decoded(model, sample_latents(model, conditioning, noise), range(1), take)
    return frames


def sample_to_file(
    folder: RunFolder, config: TrainConfig, prompt: str, image: Path | None, seed: int, without_lora: bool, output: Path
) -> None:
    """Samples one video of a run's size and writes it.

    Raises:
        ConfigError: the picture cannot be used, the output is not .mp4, or the model needs a picture and none is given.
    """
    if output.suffix != ".mp4":
        raise ConfigError(f"--output is {str(output)!r}; it must end in .mp4")
    first_frame = None
    if image is not None:
        try:
            first_frame = fit_frame(read_image(image), config.data)
        except (UnusableMediaError, OSError) as error:
            raise ConfigError(f"--image {image}: {error}") from error
    if first_frame is None and (config.data.height is None or config.data.width is None):
        raise ConfigError("without --image the recipe must set data.height and data.width")
    height, width = first_frame.shape[:2] if first_frame is not None else (config.data.height, config.data.width)
    model = load_trained(folder, config)
    if first_frame is None and model.needs_first_frame:
        raise ConfigError("this is an image-to-video model: give its first frame with --image")
    with model.without_adapters() if without_lora else nullcontext():
        frames = sample_video(model, prompt, first_frame, config.data.num_frames, height or 0, width or 0, seed)
    write_mp4(output, frames, config.data.fps)


def write_mp4(path: Path, frames_rgb: NDArray[np.uint8], frames_per_second: int) -> None:
    """Writes uint8 RGB [T, H, W, 3] as H.264 at high quality."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=frames_per_second, options={"crf": "12"})
        stream.height, stream.width, stream.pix_fmt = *frames_rgb.shape[1:3], "yuv420p"
        for frame in frames_rgb:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
