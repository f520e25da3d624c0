"""What gradients over the wire cost: bytes of a video, and seconds of a step against a scorer in the same process.

`python benchmarks/gradient_transport.py [--repeats N]` prints the bytes of the gradients of 81 frames of 832x480, as
crops and as whole frames, and the median seconds of forward and backward of one toy video, with the scorer in this
process and behind a server process on the loopback interface.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import likeness_toyworld as toyworld
from likeness_reward.domain import CropGradient
from likeness_reward.gradient_wire import gradients_to_messages
from likeness_toyworld import painter
from likeness_trainer.demo import reward_server
from likeness_trainer.wan import WanTrainingModule

FRAMES, HEIGHT, WIDTH = 81, 480, 832


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    repeats = parser.parse_args().repeats
    values = np.random.default_rng(0).standard_normal((3, 112, 112)).astype(np.float32)
    gradients = [CropGradient(index, values, np.eye(2, 3)) for index in range(FRAMES)]
    print(f"{FRAMES} frames of {WIDTH}x{HEIGHT}:")
    for encoding, size in (("float16", 2), ("float32", 4)):
        crops = sum(message.ByteSize() for message in gradients_to_messages(gradients, encoding, "video"))
        print(
            f"  {encoding}: crops {crops / 2**20:.1f} MiB, frames {FRAMES * 3 * HEIGHT * WIDTH * size / 2**20:.1f} MiB"
        )
    with TemporaryDirectory() as folder, reward_server(Path(toyworld.face_pack_path()), Path(folder)) as endpoint:
        scorers = {"in this process": toyworld.face_pack_path(), "float16": endpoint, "float32": endpoint}
        modules = {name: module_of(reward, name) for name, reward in scorers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for _ in range(repeats + 1):  # interleaved, so that a busy machine slows all of them; the first warms up
            for name, module in modules.items():
                seconds[name].append(seconds_of_a_step(module))
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.3f} s a video, {median / medians['in this process']:.2f} of in this process")


def module_of(reward: str, name: str) -> WanTrainingModule:
    """Returns the toy with its reward at a place, and an encoding by that name."""
    return WanTrainingModule(
        toyworld.model_paths(), reward, toyworld.tokenizer_path(), ["dit"], lora_rank=16, torch_dtype="float32",
        device="cpu", use_gradient_checkpointing=False, algorithm="reward_feedback", min_face_pixels=16,
        gradient_encoding="float32" if name == "float32" else "float16",
    )  # fmt: skip


def seconds_of_a_step(module: WanTrainingModule) -> float:
    """Returns the seconds of forward and backward of one video."""
    motion = painter.sample_motion(np.random.default_rng(5))
    video = painter.paint_clip(painter.sample_identity(5), motion, 9, 64)[0]
    began = time.perf_counter()
    loss, _, _ = module({"prompt": "a portrait of a person", "video": video, "seed": 3})
    loss.backward()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
