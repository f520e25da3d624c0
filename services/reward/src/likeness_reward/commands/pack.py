"""likeness-reward pack check and pack export-triton."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from likeness_reward.commands.options import LetterboxOption, SizeOption, ThreadsOption, size_of
from likeness_reward.extras import require_embedded_extra, require_triton_extra
from likeness_reward.reporting import pack_report, repository_report


def check(
    directory: Annotated[Path, typer.Argument(help="Folder of ONNX files.")],
    detector_size: SizeOption = None,
    letterbox: LetterboxOption = None,
) -> None:
    """Name each network, its role and shapes, the detector size and the fingerprint; run both networks once."""
    require_embedded_extra("pack check")
    from likeness_reward.embedded import EmbeddedScorer

    scorer = EmbeddedScorer(directory, detector_size=size_of(detector_size), letterbox=letterbox)
    scorer.check_networks()
    print(pack_report(scorer.pack, scorer.embedding_length))


def export_triton(
    directory: Annotated[Path, typer.Argument(help="Folder of ONNX files.")],
    output: Annotated[Path, typer.Argument(help="Model repository to write: a new or an empty folder.")],
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where Triton runs the networks.")] = "cpu",
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Most images in one run of a network.")] = 16,
    precision: Annotated[
        Literal["fp32", "fp16"], typer.Option(help="Of the networks; fp16 has a fingerprint of its own.")
    ] = "fp32",
    instances: Annotated[int, typer.Option(min=1, max=64, help="Copies of each network, on each GPU or the CPU.")] = 1,
    threads: ThreadsOption = 1,
    tensorrt: Annotated[bool, typer.Option("--tensorrt", help="Run on CUDA by TensorRT.")] = False,
    runtime: Annotated[
        Literal["onnxruntime", "python"],
        typer.Option(help="Triton backend: onnxruntime, or python for a Triton that has only that one."),
    ] = "onnxruntime",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also write the recognizer's derivative, for FEATURE_CROP_GRADIENTS.")
    ] = False,
    detector_size: SizeOption = None,
    letterbox: LetterboxOption = None,
) -> None:
    """Write a pack as a Triton model repository, for `serve --backend triton`.

    likeness-reward pack export-triton ~/.insightface/models/buffalo_l model_repository --device cuda
    """
    require_triton_extra("pack export-triton")
    from likeness_reward.pack.pack import load_pack
    from likeness_reward.pack.triton_repository import ExportOptions, export_repository

    options = ExportOptions(device, max_batch, precision, instances, threads, tensorrt, runtime, gradients)
    repository = export_repository(
        load_pack(directory, detector_size=size_of(detector_size), letterbox=letterbox), output, options
    )
    print(repository_report(repository))
