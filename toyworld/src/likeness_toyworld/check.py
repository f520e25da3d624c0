"""Measure the toy world: `python -m likeness_toyworld.check [--pack DIR]... [--samples N] [--json]`.

On held-out people, for painted frames, VAE reconstructions and samples of the untouched model (8 Euler steps, shift 5,
the first frame given, no guidance): the share of frames in which a pack finds a face, the mean cosine of those faces
to the person's painted first frame, and the cosine to another person as a floor. Frame 0 of a clip is left out: it is
the reference. Packs are measured with InsightFace's own FaceAnalysis.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from likeness_toyworld.assets import face_pack_path, model_paths, tokenizer_path
from likeness_toyworld.dataset import PROMPT, people_seeds
from likeness_toyworld.painter import paint_clip, sample_identity, sample_motion

Frames = NDArray[np.uint8]
Embedding = NDArray[np.float32]

DETECTION_THRESHOLD = 0.5
DEFAULT_DETECTOR_SIZE = (128, 128)
"""For packs without a pack.json. Measured on 64-pixel frames: best scores at twice their size; larger gains nothing."""

EULER_STEPS, SIGMA_SHIFT, EXPERT_BOUNDARY = 8, 5.0, 0.9


class CheckError(Exception):
    """The toy world cannot be measured: a missing folder or file, named in the message."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    pack: str
    frames: str
    """painted, reconstructed or sampled."""
    num_frames: int
    found: float
    """Share of frames with a face, 0..1."""
    cosine: float
    """Mean cosine of found faces to the painted first frame of the same person; NaN where no face was found."""
    other_person: float
    """The same to the painted first frame of the next person."""


class Pack:
    """A folder of InsightFace models, run by FaceAnalysis on one CPU thread."""

    def __init__(self, folder: Path, detector_size: tuple[int, int] | None = None) -> None:
        if not folder.is_dir() or not list(folder.glob("*.onnx")):
            raise CheckError(f"face pack {folder}: no such folder, or no .onnx file in it")
        import onnxruntime
        from insightface.app import FaceAnalysis

        description = folder / "pack.json"
        described: dict[str, Any] = json.loads(description.read_text()) if description.is_file() else {}
        width, height = detector_size or described.get("detector_size", DEFAULT_DETECTOR_SIZE)
        self.name = str(described.get("name", folder.name))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._analysis = FaceAnalysis(
            name=str(folder.resolve()), allowed_modules=["detection", "recognition"],
            providers=["CPUExecutionProvider"], sess_options=options,
        )  # fmt: skip
        self._analysis.prepare(ctx_id=-1, det_thresh=DETECTION_THRESHOLD, det_size=(int(width), int(height)))

    def embed(self, frame_rgb: Frames) -> Embedding | None:
        """Unit embedding float32 [D] of the largest face in a frame uint8 [H, W, 3], or None without a face."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # InsightFace's use of scikit-image's old name
            faces = self._analysis.get(np.ascontiguousarray(frame_rgb[..., ::-1]))
        if not faces:
            return None
        largest = max(faces, key=lambda face: (face.bbox[2] - face.bbox[0]) * (face.bbox[3] - face.bbox[1]))
        embedding: Embedding = largest.normed_embedding
        return embedding


def paint_held_out(people: int) -> list[Frames]:
    """Clips uint8 [9, 64, 64, 3] of people whom no training has seen."""
    return [
        paint_clip(sample_identity(seed), sample_motion(np.random.default_rng([seed, 11])))[0]
        for seed in people_seeds(people, seed=1, held_out=True)
    ]


def load_pipeline() -> Any:
    """The tiny Wan2.2-I2V as DiffSynth's WanVideoPipeline, float32 on the CPU.

    Raises CheckError where weights are missing.
    """
    paths = model_paths()
    missing = [path for path in (*paths.values(), tokenizer_path()) if not Path(path).exists()]
    if missing:
        raise CheckError(f"weights of the toy model are missing: {', '.join(missing)}")
    os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")
    import torch
    from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

    from likeness_toyworld.registration import register_models

    register_models()
    return WanVideoPipeline.from_pretrained(
        torch_dtype=torch.float32, device="cpu",
        model_configs=[ModelConfig(path=path) for path in paths.values()],
        tokenizer_config=ModelConfig(path=tokenizer_path()),
    )  # fmt: skip


def _images(clip: Frames) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(frame) for frame in clip]


def _frames(images: Iterable[Any]) -> Frames:
    return np.stack([np.asarray(image.convert("RGB"), np.uint8) for image in images])


def reconstruct(pipeline: Any, clip: Frames) -> Frames:
    """The clip through the VAE and back: uint8 [T, H, W, 3]."""
    import torch

    with torch.no_grad():
        video = pipeline.preprocess_video(_images(clip))
        latents = pipeline.vae.encode(video, device="cpu", tiled=False)
        decoded = pipeline.vae.decode(latents, device="cpu", tiled=False)
    return _frames(pipeline.vae_output_to_video(decoded))


def sample(pipeline: Any, clip: Frames, seed: int) -> Frames:
    """A video of the untouched model that continues the clip's first frame: uint8 [T, H, W, 3]."""
    num_frames, height, width = clip.shape[:3]
    images = pipeline(
        prompt=PROMPT, input_image=_images(clip[:1])[0], seed=seed, height=height, width=width,
        num_frames=num_frames, cfg_scale=1.0, num_inference_steps=EULER_STEPS, sigma_shift=SIGMA_SHIFT,
        switch_DiT_boundary=EXPERT_BOUNDARY, tiled=False, progress_bar_cmd=lambda steps: steps,
    )  # fmt: skip
    return _frames(images)


def measure(pack: Pack, kind: str, clips: Sequence[Frames], references: Sequence[Embedding | None]) -> Row:
    """The row of one pack and kind of frames; clips[i] and references[i] belong to person i.

    Where the reference itself shows no face, its frames count as found or not, but give no cosine.
    """
    found, own, other = [], [], []
    for index, clip in enumerate(clips):
        mine, foreign = references[index], references[(index + 1) % len(references)]
        for frame in clip[1:]:
            embedding = pack.embed(frame)
            found.append(embedding is not None)
            if embedding is not None and mine is not None:
                own.append(float(embedding @ mine))
            if embedding is not None and foreign is not None:
                other.append(float(embedding @ foreign))
    return Row(pack.name, kind, len(found), float(np.mean(found)), _mean(own), _mean(other))


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def check(packs: Sequence[Pack], people: int, with_model: bool, report: Callable[[str], None]) -> list[Row]:
    """All rows, pack by pack; `report` is told what is being done."""
    painted = paint_held_out(people)
    kinds: dict[str, list[Frames]] = {"painted": painted}
    if with_model:
        report("loading the model")
        with contextlib.redirect_stdout(sys.stderr):  # DiffSynth prints what it loads; stdout is for the rows
            pipeline = load_pipeline()
        report(f"reconstructing {people} clips")
        kinds["reconstructed"] = [reconstruct(pipeline, clip) for clip in painted]
        report(f"sampling {people} videos")
        kinds["sampled"] = [sample(pipeline, clip, seed) for seed, clip in enumerate(painted)]
    rows = []
    for pack in packs:
        report(f"measuring under {pack.name}")
        references = [pack.embed(clip[0]) for clip in painted]
        rows += [measure(pack, kind, clips, references) for kind, clips in kinds.items()]
    return rows


def default_packs() -> list[Path]:
    """The toy pack and, where there is one, a real one: LIKENESS_REAL_PACK or ../shared/face_pack."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "face_pack"
    real = Path(os.environ.get("LIKENESS_REAL_PACK", beside))
    return [Path(face_pack_path())] + ([real] if real.is_dir() else [])


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(title="The toy world on held-out people")
    for name in ("pack", "frames"):
        table.add_column(name)
    for name in ("number", "face found", "cosine to first frame", "to another person"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{value:.3f}" for value in (row.found, row.cosine, row.other_person))
        table.add_row(row.pack, row.frames, str(row.num_frames), *numbers)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where something to measure is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, action="append", metavar="DIR", help="a face pack; may be repeated")
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="held-out people, one clip of each")
    parser.add_argument("--painted-only", action="store_true", help="leave the video model out")
    parser.add_argument("--detector-size", type=int, metavar="PIXELS", help="side of the detector's square input")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    chosen = parser.parse_args(arguments)
    if chosen.samples < 2:
        parser.error(f"--samples is {chosen.samples}; allowed is 2 and more, one of them is the other person")
    console = Console(stderr=True)
    size = (chosen.detector_size, chosen.detector_size) if chosen.detector_size else None
    try:
        packs = [Pack(folder, size) for folder in chosen.pack or default_packs()]
        rows = check(packs, chosen.samples, not chosen.painted_only, lambda text: console.print(f"[dim]{text}"))
    except CheckError as error:
        console.print(f"[red]{error}")
        return 2
    if chosen.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        show(rows, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
