"""What it costs to run the networks in Triton: the same frames through both backends, side by side in one run.

`make bench` runs it; it needs the Triton that `make test` installs. One thread for each network on both sides; the
backends take turns, and the table shows the medians.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from local_triton import NoTriton, TritonProcess
from rich.console import Console
from rich.table import Table

import likeness_toyworld as toyworld
from likeness_reward.embedded import EmbeddedScorer, FaceScorer
from likeness_reward.pack.pack import load_pack
from likeness_reward.pack.triton_repository import ExportOptions, export_repository
from likeness_reward.triton_scorer import TritonScorer
from likeness_toyworld import painter

REPEATS = 5
FRAMES = 24
WIDTH, HEIGHT = 832, 480


def main() -> None:
    """Prints the table."""
    pack = Path(os.environ.get("LIKENESS_REAL_PACK", toyworld.face_pack_path()))
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        export_repository(load_pack(pack), repository, ExportOptions(runtime="python"))
        try:
            triton = TritonProcess(repository, Path(folder)).wait_until_ready()
        except NoTriton as missing:
            print(f"no Triton to compare with: {missing}")
            return
        try:
            backends: dict[str, FaceScorer] = {
                "embedded": EmbeddedScorer(pack),
                "Triton, shared memory": TritonScorer(triton.url, shared_memory="on"),
                "Triton, bytes": TritonScorer(triton.url, shared_memory="off"),
            }
            print_table(pack, measure(backends))
        finally:
            triton.kill()


def measure(backends: dict[str, FaceScorer]) -> dict[str, list[float]]:
    """Returns the seconds that each backend takes for the same video, each time."""
    frames = np.stack([painted_frame(index) for index in range(FRAMES)])
    identity = backends["embedded"].embed_identity([frames[0]])
    expected = backends["embedded"].score(frames, identity).similarities
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(REPEATS):
        for name, scorer in backends.items():
            started = time.perf_counter()
            similarities = scorer.score(frames, identity).similarities
            seconds[name].append(time.perf_counter() - started)
            assert similarities == expected, f"{name} gives other similarities"
    return seconds


def painted_frame(index: int) -> np.ndarray:
    """Returns a frame uint8 [HEIGHT, WIDTH, 3] with one face that moves."""
    motion = painter.sample_motion(np.random.default_rng(3))
    face = painter.paint_clip(painter.sample_identity(3), motion, FRAMES, 256)[0][index]
    frame = np.full((HEIGHT, WIDTH, 3), 96, np.uint8)
    frame[112:368, 288:544] = face
    return frame


def print_table(pack: Path, seconds: dict[str, list[float]]) -> None:
    """Prints frames per second and the ratio to the embedded backend."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    table = Table("backend", "frames / s", "seconds", "times embedded")
    for name, median in medians.items():
        table.add_row(name, f"{FRAMES / median:.2f}", f"{median:.3f}", f"{median / medians['embedded']:.2f}")
    console = Console()
    console.print(f"{FRAMES} frames {WIDTH}x{HEIGHT}, {pack.parent.name}/{pack.name}, median of {REPEATS}")
    console.print(table)


if __name__ == "__main__":
    main()
