"""Writes a folder of painted videos with its metadata.csv.

`python -m likeness_toyworld.dataset OUT --clips N --seed S`
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from likeness_toyworld.painter import HELD_OUT_SEED, paint_clip, sample_identity, sample_motion

PROMPT = "a portrait of a person, static camera"
_PEOPLE_PER_SEED = 10_000
_MOTION_SALT = 7


def write_video(path: Path, frames_rgb: NDArray[np.uint8], frames_per_second: int = 8) -> None:
    """Encode frames_rgb uint8 [T, H, W, 3] as H.264 in RGB with quantiser 0, which is lossless."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=frames_per_second, options={"qp": "0", "preset": "veryfast"})
        stream.height, stream.width = frames_rgb.shape[1:3]
        stream.pix_fmt = "rgb24"
        for picture in frames_rgb:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())


def people_seeds(clips: int, seed: int, held_out: bool = False) -> Iterable[int]:
    """Seeds of the people of a data set: `seed` 0, 1, 2, ... give disjoint people (up to 10 000 clips each)."""
    if not 0 < clips <= _PEOPLE_PER_SEED:
        raise ValueError(f"clips is {clips}; allowed is 1 to {_PEOPLE_PER_SEED}")
    if not 0 <= seed < 50:
        raise ValueError(f"seed is {seed}; allowed is 0 to 49")
    start = (HELD_OUT_SEED if held_out else HELD_OUT_SEED // 2) + seed * _PEOPLE_PER_SEED
    return range(start, start + clips)


def write_dataset(
    folder: str | Path, clips: int, seed: int, *, held_out: bool = False, num_frames: int = 9, size: int = 64
) -> Path:
    """Path of the metadata.csv (columns video, prompt) of `clips` written videos, each of one steady person.

    held_out chooses people whom no training has seen (seeds from HELD_OUT_SEED).
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    metadata = root / "metadata.csv"
    with metadata.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["video", "prompt"])
        for person in people_seeds(clips, seed, held_out):
            motion = sample_motion(np.random.default_rng([person, _MOTION_SALT]))
            frames_rgb, _ = paint_clip(sample_identity(person), motion, num_frames, size)
            name = f"person_{person:07d}.mp4"
            write_video(root / name, frames_rgb)
            writer.writerow([name, PROMPT])
    return metadata


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Write painted face videos and their metadata.csv.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="people whom no training has seen")
    arguments = parser.parse_args()
    print(write_dataset(arguments.out, arguments.clips, arguments.seed, held_out=arguments.held_out))


if __name__ == "__main__":
    main()
