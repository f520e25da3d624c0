"""How fast the reward service is: against InsightFace's own loop, and against its two networks alone.

    python benchmarks/reward_speed.py [--repeats N] [--frames N]

`make bench` runs it. LIKENESS_REAL_PACK names a pack to measure with, else the toy world's is taken. All sides score
the same painted frames on the same cores, in turn; each has the threads that suit it best. Wall seconds and CPU seconds
are compared pair by pair: median, least and greatest ratio. On a machine that does other work as well, CPU seconds
are the ones to look at.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import psutil
from insightface.app import FaceAnalysis
from rich.console import Console
from rich.table import Table

import likeness_toyworld as toyworld
from likeness_reward.client import RewardClient
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.face.alignment import align_face
from likeness_reward.face.detector import INPUT_MEAN, INPUT_STD, fitted_canvas, letterbox
from likeness_reward.inference.onnxruntime import load_session, normalized
from likeness_reward.pack.pack import Pack, load_pack
from likeness_toyworld import painter

CORES = len(os.sched_getaffinity(0))
SIZES = ((832, 480), (480, 832))
FACE_SIDE = 256
START_S = 60
INSIGHTFACE, NETWORKS, IN_PROCESS, SERVICE = "insightface", "networks alone", "in this process", "service"


@dataclass
class Side:
    """One way to score the frames, and what it has taken so far."""

    name: str
    work: Callable[[], Any]
    cpu_s: Callable[[], float] = time.process_time
    """CPU seconds that everything at work has used so far."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, counted: bool = True) -> None:
        """Does the work once."""
        began, cpu_before = time.perf_counter(), self.cpu_s()
        self.work()
        if counted:
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(self.cpu_s() - cpu_before)


def main() -> None:
    """Prints a table for each size of frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frames", type=int, default=81)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    pack = load_pack(Path(os.environ.get("LIKENESS_REAL_PACK", toyworld.face_pack_path())))
    for size in SIZES:
        frames = painted_video(size, arguments.frames)
        largest, least = compare_faces(pack, frames)
        with service(pack) as (client, server):
            sides = [
                *insightface_sides(pack, frames),
                *network_sides(pack, frames),
                *our_sides(pack, frames, client, server),
            ]
            for repeat in range(arguments.repeats + 1):  # the first is the warm-up
                for side in sides:
                    side.run(counted=repeat > 0)
        print_table(
            pack, frames, sides, f"boxes within {largest:.3f} pixels, cosine at least {least:.5f} of insightface's"
        )


def painted_video(size: tuple[int, int], count: int) -> np.ndarray:
    """Returns frames uint8 [T, H, W, 3] of (width, height): a painted person that moves over a coloured ground."""
    width, height = size
    rng = np.random.default_rng(3)
    faces = painter.paint_clip(painter.sample_identity(3), painter.sample_motion(rng), count, FACE_SIDE)[0]
    ground = cv2.resize(rng.integers(40, 200, (6, 6, 3)).astype(np.uint8), size, interpolation=cv2.INTER_CUBIC)
    frames = np.repeat(ground[None], count, axis=0)
    top, left = (height - FACE_SIDE) // 3, (width - FACE_SIDE) // 3
    frames[:, top : top + FACE_SIDE, left : left + FACE_SIDE] = faces
    return frames


def face_analysis(pack: Pack, threads: int) -> FaceAnalysis:
    """Returns insightface's pipeline on a pack: detection and recognition, on the whole canvas."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with contextlib.redirect_stdout(None):
        analysis = FaceAnalysis(
            name=str(pack.directory.resolve()),
            allowed_modules=["detection", "recognition"],
            providers=["CPUExecutionProvider"],
            sess_options=options,
        )
        analysis.prepare(ctx_id=-1, det_thresh=0.5, det_size=pack.detector_config.size)
    return analysis


def compare_faces(pack: Pack, frames: np.ndarray) -> tuple[float, float]:
    """Returns the largest distance of a box's edge to insightface's, pixels, and the least cosine of an embedding."""
    warnings.simplefilter("ignore", FutureWarning)  # of insightface's call of scikit-image
    scorer, analysis = EmbeddedScorer(pack.directory), face_analysis(pack, 1)
    largest, least = 0.0, 1.0
    for frame in frames[:: max(1, len(frames) // 9)]:
        expected = analysis.get(np.ascontiguousarray(frame[..., ::-1]))
        (found,) = scorer.analyzer.detector.detect([frame])
        assert len(found) == len(expected) > 0, f"{len(found)} faces, insightface finds {len(expected)}"
        for face, reference in zip(found, expected, strict=True):
            crop = align_face(frame, face.landmarks, scorer.analyzer.recognizer.crop_size)
            largest = max(largest, float(np.abs(face.box - reference.bbox).max()))
            least = min(least, float(scorer.analyzer.recognizer.embed([crop])[0] @ reference.normed_embedding))
    return largest, least


def insightface_sides(pack: Pack, frames: np.ndarray) -> list[Side]:
    """Returns the plain loop over FaceAnalysis.get, with one thread and with one for each core."""
    bgr = [np.ascontiguousarray(frame[..., ::-1]) for frame in frames]

    def loop(analysis: FaceAnalysis) -> Callable[[], None]:
        def run() -> None:
            for frame in bgr:
                analysis.get(frame)

        return run

    return [
        Side(f"{INSIGHTFACE}, threads {threads}", loop(face_analysis(pack, threads))) for threads in sorted({1, CORES})
    ]


def network_sides(pack: Pack, frames: np.ndarray) -> list[Side]:
    """The runs of both networks that these frames need, on prepared tensors: all cores in a run, or a run on each."""
    size = pack.detector_config.size
    canvas = size if pack.detector_config.letterbox == "full" else fitted_canvas(frames.shape[2:0:-1], size, 32)
    image = normalized(letterbox(frames[0], size, canvas).canvas[None], INPUT_MEAN, INPUT_STD)
    side = pack.recognizer.input.shape[2]
    crop = np.zeros((1, 3, side, side), np.float32)

    def runs(at_once: int, threads: int) -> Callable[[], None]:
        detector, recognizer = (load_session(each.path, threads, "cpu") for each in (pack.detector, pack.recognizer))
        executor = ThreadPoolExecutor(at_once)

        def frame(_: int) -> None:
            detector.run(None, {pack.detector.input.name: image})
            recognizer.run(None, {pack.recognizer.input.name: crop})

        return lambda: list(executor.map(frame, range(len(frames))))

    ways = sorted({(1, CORES), (CORES, 1)})
    return [
        Side(f"{NETWORKS}, {at_once} at once, threads {threads}", runs(at_once, threads)) for at_once, threads in ways
    ]


def our_sides(pack: Pack, frames: np.ndarray, client: RewardClient, server: psutil.Process) -> list[Side]:
    """The scorer in this process, a frame for each core at a time; and the service, client to client over gRPC."""
    scorer = EmbeddedScorer(pack.directory)
    identity = client.embed_identity([frames[0]])
    executor = ThreadPoolExecutor(CORES)

    def in_this_process() -> None:
        parts = executor.map(lambda index: scorer.score(frames[index : index + 1], identity), range(len(frames)))
        assert all(part.embedded_frame_count == 1 for part in parts)

    def over_the_wire() -> None:
        with client.open_stream(identity=identity, deadline_s=600) as stream:
            stream.start_video("video", frames.shape[2], frames.shape[1], len(frames))
            stream.send_frames("video", 0, frames)
            stream.end_video("video")
            stream.close()
            ((_, reward),) = stream.results()
        assert reward.embedded_frame_count == len(frames)

    def cpu_s() -> float:
        used = server.cpu_times()
        return time.process_time() + used.user + used.system

    return [Side(IN_PROCESS, in_this_process), Side(SERVICE, over_the_wire, cpu_s)]


@contextlib.contextmanager
def service(pack: Pack) -> Iterator[tuple[RewardClient, psutil.Process]]:
    """A server process with a worker for each core, and a client of it."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "likeness_reward", "serve", "--pack", str(pack.directory), "--port", "0"]
        command += ["--workers", str(CORES), "--threads", "1", "--ready-file", str(ready)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            give_up_at = time.monotonic() + START_S
            while not ready.exists():
                assert process.poll() is None, "the server ended before it was ready"
                assert time.monotonic() < give_up_at, "the server did not start"
                time.sleep(0.05)
            with RewardClient(ready.read_text(), timeout_s=600) as client:
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def print_table(pack: Pack, frames: np.ndarray, sides: list[Side], agreement: str) -> None:
    """Prints what each side took, and the ratios to the best of insightface's and of the networks'."""
    count, (height, width) = len(frames), frames.shape[1:3]
    best = {
        kind: min((side for side in sides if side.name.startswith(kind)), key=lambda side: statistics.median(side.wall))
        for kind in (INSIGHTFACE, NETWORKS)
    }
    table = Table("side", "frames / s", "CPU ms a frame", "times as fast as insightface", "time of the networks alone")
    for side in sides:
        table.add_row(
            side.name,
            f"{count / statistics.median(side.wall):.1f}",
            f"{statistics.median(side.cpu) / count * 1000:.1f}",
            ratio(best[INSIGHTFACE], side),
            ratio(side, best[NETWORKS]),
        )
    console = Console(width=150)
    console.print(f"{count} frames {width}x{height}, {CORES} cores, pack {pack.name}; {agreement}")
    console.print(table)


def ratio(slow: Side, fast: Side) -> str:
    """Returns the ratio of two sides' seconds, pair by pair: median (least to greatest), and that of CPU seconds."""
    wall = sorted(one / other for one, other in zip(slow.wall, fast.wall, strict=True))
    cpu = statistics.median(one / other for one, other in zip(slow.cpu, fast.cpu, strict=True))
    return f"{statistics.median(wall):.2f} ({wall[0]:.2f} to {wall[-1]:.2f}); CPU {cpu:.2f}"


if __name__ == "__main__":
    main()
