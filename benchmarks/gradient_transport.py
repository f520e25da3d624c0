"""What gradients over the wire cost: bytes and seconds of a video, and a step against a scorer in the same process.

`python benchmarks/gradient_transport.py [--repeats N]` prints

- the bytes of the gradients of 81 frames of 832x480, as crops and as whole frames, and the median seconds from the
  gradients of crops in a server process to those of pixels in this one: the crops cross and are warped back here, or
  they are warped back there and whole frames cross;
- the median seconds of forward and backward of one toy video, with the scorer in this process and behind a server
  process on the loopback interface.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import torch

import likeness_toyworld as toyworld
from likeness.reward.v1 import reward_pb2
from likeness_reward.domain import CropGradient, GradientEncoding
from likeness_reward.gradient_wire import gradients_from_messages, gradients_to_messages
from likeness_toyworld import painter
from likeness_trainer.demo import reward_server
from likeness_trainer.learn.face_warp import aligned_crop
from likeness_trainer.wan import WanTrainingModule

FRAMES, HEIGHT, WIDTH = 81, 480, 832
FRAME_FROM_CROP = np.array([[2.0, 0.1, 280.0], [-0.1, 2.0, 90.0]])
"""A face of about 220 pixels."""
NUMBERS: dict[GradientEncoding, type[np.floating[Any]]] = {"float16": np.float16, "float32": np.float32}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print_transport(repeats)
    print_steps(repeats)


def gradients_of_crops() -> list[CropGradient]:
    """Returns a gradient for each frame."""
    values = np.random.default_rng(0).standard_normal((3, 112, 112)).astype(np.float32)
    return [CropGradient(index, values, FRAME_FROM_CROP) for index in range(FRAMES)]


def warped_back(gradient: CropGradient) -> torch.Tensor:
    """Returns d(value) / d(pixels scaled to 0..1) of a frame [3, H, W], by the adjoint of the alignment."""
    frame = torch.zeros(3, HEIGHT, WIDTH, requires_grad=True)
    crop = aligned_crop(frame, gradient.frame_from_crop, gradient.values.shape[1])
    (result,) = torch.autograd.grad(crop, frame, torch.from_numpy(gradient.values))
    return result


def send_gradients(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    """Yields the messages of one video: `crops float16`, `frames float32`, ..."""
    kind, encoding = request.decode().split()
    numbers: GradientEncoding = "float16" if encoding == "float16" else "float32"
    if kind == "crops":
        for message in gradients_to_messages(gradients_of_crops(), numbers, "video"):
            yield message.SerializeToString()
    else:
        for gradient in gradients_of_crops():
            yield warped_back(gradient).numpy().astype(NUMBERS[numbers]).tobytes()


def serve_gradients(pipe: Connection) -> None:
    """Serves `send_gradients` until the process is ended."""
    torch.set_num_threads(1)
    handlers = {"Get": grpc.unary_stream_rpc_method_handler(send_gradients)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Gradients", handlers)])
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def receive_gradients(get: Any, kind: str, encoding: GradientEncoding) -> torch.Tensor:
    """Returns the gradient by the pixels of a video, float32 [3, T, H, W]."""
    messages = get(f"{kind} {encoding}".encode())
    if kind == "crops":
        parsed = (reward_pb2.CropGradients.FromString(message) for message in messages)
        frames = [warped_back(gradient) for gradient in gradients_from_messages(parsed)]
    else:
        arrays = (np.frombuffer(message, NUMBERS[encoding]).astype(np.float32) for message in messages)
        frames = [torch.from_numpy(array.reshape(3, HEIGHT, WIDTH)) for array in arrays]
    return torch.stack(frames, dim=1)


def print_transport(repeats: int) -> None:
    """Prints bytes and seconds of crops and of whole frames."""
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    server = start.Process(target=serve_gradients, args=(there,), daemon=True)
    server.start()
    print(f"gradients of {FRAMES} frames of {WIDTH}x{HEIGHT}:")
    seconds: dict[tuple[str, GradientEncoding], list[float]] = {}
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{here.recv()}", options) as channel:
        get = channel.unary_stream("/Gradients/Get")
        for _ in range(repeats + 1):
            for encoding in NUMBERS:
                for kind in ("crops", "frames"):
                    began = time.perf_counter()
                    receive_gradients(get, kind, encoding)
                    seconds.setdefault((kind, encoding), []).append(time.perf_counter() - began)
    server.terminate()
    for (kind, encoding), taken in seconds.items():
        if kind == "crops":
            size = sum(m.ByteSize() for m in gradients_to_messages(gradients_of_crops(), encoding, "video"))
        else:
            size = FRAMES * 3 * HEIGHT * WIDTH * np.dtype(NUMBERS[encoding]).itemsize
        print(f"  {encoding}, {kind}: {size / 2**20:.1f} MiB, {statistics.median(taken[1:]):.2f} s")


def print_steps(repeats: int) -> None:
    """Prints the seconds of a step of the toy."""
    with TemporaryDirectory() as folder, reward_server(Path(toyworld.face_pack_path()), Path(folder)) as endpoint:
        scorers = {"in this process": toyworld.face_pack_path(), "float16": endpoint, "float32": endpoint}
        modules = {name: module_of(reward, name) for name, reward in scorers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for _ in range(repeats + 1):  # interleaved, so that a busy machine slows all of them; the first warms up
            for name, module in modules.items():
                seconds[name].append(seconds_of_a_step(module))
    for name, taken in seconds.items():
        ratios = [mine / alone for mine, alone in zip(taken[1:], seconds["in this process"][1:], strict=True)]
        print(
            f"{name}: {statistics.median(taken[1:]):.3f} s a video, {statistics.median(ratios):.2f} of in this process"
        )


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
