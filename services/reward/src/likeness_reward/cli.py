"""The command line: serve, score, embed, info, pack check, pack export-triton."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from likeness_reward.client import RewardClient
from likeness_reward.domain import ScoreOptions, parse_size
from likeness_reward.errors import InvalidImage, InvalidPack, LikenessError, UnreadableVideo
from likeness_reward.extras import require_server_extra, require_triton_extra
from likeness_reward.reporting import (
    embedding_report,
    pack_report,
    repository_report,
    reward_document,
    reward_table,
    server_report,
)
from likeness_reward.scorers import identity_from_path, open_scorer
from likeness_reward.videos import read_video

EXIT_FAILED = 1
EXIT_UNREADABLE = 3
EXIT_BAD_PACK = 4
EXIT_UNAVAILABLE = 5
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 wrong usage; 3 unreadable video or image; 4 bad pack; 5 no server answers."
)

app = typer.Typer(
    name="likeness-reward",
    help="Scores how well videos keep a person's face.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
pack_app = typer.Typer(help="Look at packs: folders of ONNX files as InsightFace ships them.", no_args_is_help=True)
app.add_typer(pack_app, name="pack")

PackOption = Annotated[Path | None, typer.Option("--pack", help="Folder of ONNX files: score in this process.")]
EndpointOption = Annotated[str | None, typer.Option(help="HOST:PORT of a reward server to ask instead.")]
SizeOption = Annotated[
    str | None,
    typer.Option(help="Detector input WIDTHxHEIGHT, multiples of 32. Default: the pack's pack.json, else 640x640."),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads inside one run of a network.")]
TokenOption = Annotated[
    str | None, typer.Option(envvar="LIKENESS_REWARD_TOKEN", help="Bearer token of the server.", show_default=False)
]


def size_of(text: str | None) -> tuple[int, int] | None:
    """Returns (width, height) of "640x384". Raises typer.BadParameter."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def serve(
    pack: Annotated[Path | None, typer.Option(help="Folder of ONNX files. Environment: LIKENESS_REWARD_PACK.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default 50051.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads inside one run of a network. Default 1.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs of networks at the same time. Default 1.")] = None,
    detector_size: SizeOption = None,
    provider: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where the networks run; no silent fallback. Default cpu.")
    ] = None,
    backend: Annotated[
        Literal["embedded", "triton"] | None,
        typer.Option(
            help="Run the networks in this process, or in Triton (see `pack export-triton`). Default embedded."
        ),
    ] = None,
    triton_url: Annotated[str | None, typer.Option(help="HOST:PORT of Triton's gRPC.")] = None,
    triton_shared_memory: Annotated[
        Literal["auto", "on", "off"] | None,
        typer.Option(help="Hand images to Triton in shared memory: auto, on one host. Default auto."),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write HOST:PORT here once ready.")] = None,
    reflection: Annotated[bool | None, typer.Option(help="Let tools like grpcurl list the service.")] = None,
) -> None:
    """Serve a pack over gRPC until SIGTERM; then finish the running calls and exit 0.

    Every setting is also read from the environment as LIKENESS_REWARD_<NAME>, for example LIKENESS_REWARD_TOKEN or
    LIKENESS_REWARD_MAX_VIDEOS_IN_FLIGHT. Prints one line when ready.

        likeness-reward serve --pack ~/.insightface/models/buffalo_l --port 50051
    """
    require_server_extra("serve")
    from pydantic import ValidationError

    from likeness_reward import server
    from likeness_reward.settings import ServerSettings

    given = {
        "pack": pack,
        "host": host,
        "port": port,
        "threads": threads,
        "workers": workers,
        "detector_size": detector_size,
        "provider": provider,
        "backend": backend,
        "triton_url": triton_url,
        "triton_shared_memory": triton_shared_memory,
        "ready_file": ready_file,
        "reflection": reflection,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        settings = ServerSettings(**chosen)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        what = f"{name} is {first['input']!r}: " if name else ""  # no name: the settings do not fit each other
        raise typer.BadParameter(what + first["msg"]) from error
    asyncio.run(server.serve(settings))


@app.command()
def score(
    videos: Annotated[list[Path], typer.Argument(help="Video files, folders of frames, or images.")],
    identity: Annotated[
        Path, typer.Option(help="Who the videos should show: a photo, a video, or a template from `embed`.")
    ],
    endpoint: EndpointOption = None,
    pack: PackOption = None,
    detector_size: SizeOption = None,
    threads: ThreadsOption = 1,
    token: TokenOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document a line and video.")] = False,
    per_frame: Annotated[bool, typer.Option(help="List every frame.")] = False,
    no_face_value: Annotated[
        float, typer.Option(min=-1.0, max=1.0, help="What a frame without a usable face counts.")
    ] = 0.0,
    face_choice: Annotated[
        Literal["largest", "most_similar"], typer.Option(help="Which face counts when a frame shows several.")
    ] = "largest",
    min_face_pixels: Annotated[int, typer.Option(min=1, max=4096, help="Smallest face width used.")] = 16,
) -> None:
    """Print how much videos look like a person, from a pack in this process or from a server.

    The reward of a video is the mean over its frames of the cosine between the face and the identity; frames without a
    face count with --no-face-value.

        likeness-reward score sample.mp4 --identity anna.jpg --pack ~/.insightface/models/buffalo_l

        likeness-reward score samples/*.mp4 --identity anna.json --endpoint localhost:50051 --json
    """
    options = ScoreOptions(no_face_value=no_face_value, face_choice=face_choice, min_face_pixels=min_face_pixels)
    scorer = open_scorer(endpoint, pack, size_of(detector_size), threads, token)
    person = identity_from_path(scorer, identity)
    failures: list[LikenessError] = []
    for video in videos:
        try:
            reward = scorer.score(read_video(video), person, options)
        except LikenessError as error:
            failures.append(error)
            print(f"error: {video}: {error.message}", file=sys.stderr)
            continue
        if json_output:
            print(json.dumps(reward_document(video, reward, per_frame=per_frame)), flush=True)
        else:
            print(reward_table(video, reward, per_frame=per_frame), flush=True)
    if failures:
        raise typer.Exit(exit_code_of(failures[0]))


@app.command()
def embed(
    images: Annotated[list[Path], typer.Argument(help="Photos of one person: JPEG, PNG or WebP.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the identity template (JSON).")],
    endpoint: EndpointOption = None,
    pack: PackOption = None,
    detector_size: SizeOption = None,
    threads: ThreadsOption = 1,
    token: TokenOption = None,
    pooling: Annotated[
        Literal["mean", "quality_weighted"], typer.Option(help="How the photos become one template.")
    ] = "mean",
) -> None:
    """Pool photos of one person into an identity template, to be used again with `score --identity`.

    likeness-reward embed anna1.jpg anna2.jpg -o anna.json --endpoint localhost:50051
    """
    scorer = open_scorer(endpoint, pack, size_of(detector_size), threads, token)
    encoded = []
    for image in images:
        try:
            encoded.append(image.read_bytes())
        except OSError as error:
            raise UnreadableVideo(f"{image}: {error.strerror}", path=image) from error
    template, observations = scorer.embed_identity_with_observations(encoded, pooling)
    template.save(output)
    print(embedding_report(images, observations, template, output))


@app.command()
def info(
    endpoint: Annotated[str, typer.Option(help="HOST:PORT of the reward server.")] = "localhost:50051",
    token: TokenOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 10.0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Print what a server says of itself: pack, models, limits. Exit code 0 means that it serves.

    likeness-reward info --endpoint localhost:50051
    """
    with RewardClient(endpoint, timeout_s=timeout, token=token) as client:
        server = client.wait_until_ready(timeout)
    print(json.dumps(dataclasses.asdict(server)) if json_output else server_report(endpoint, server))


@pack_app.command("check")
def pack_check(
    directory: Annotated[Path, typer.Argument(help="Folder of ONNX files.")],
    detector_size: SizeOption = None,
) -> None:
    """Name each network, its role and shapes, the detector size and the fingerprint; run both networks once."""
    require_server_extra("pack check")
    from likeness_reward.embedded import EmbeddedScorer

    scorer = EmbeddedScorer(directory, detector_size=size_of(detector_size))
    scorer.check_networks()
    print(pack_report(scorer.pack, scorer.embedding_length))


@pack_app.command("export-triton")
def pack_export_triton(
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
    detector_size: SizeOption = None,
) -> None:
    """Write a pack as a Triton model repository, for `serve --backend triton`.

    likeness-reward pack export-triton ~/.insightface/models/buffalo_l model_repository --device cuda
    """
    require_triton_extra("pack export-triton")
    from likeness_reward.pack.pack import load_pack
    from likeness_reward.pack.triton_repository import ExportOptions, export_repository

    options = ExportOptions(device, max_batch, precision, instances, threads, tensorrt, runtime)
    repository = export_repository(load_pack(directory, detector_size=size_of(detector_size)), output, options)
    print(repository_report(repository))


def exit_code_of(error: LikenessError) -> int:
    """Returns the documented exit code of an error."""
    if isinstance(error, UnreadableVideo | InvalidImage):
        return EXIT_UNREADABLE
    if isinstance(error, InvalidPack):
        return EXIT_BAD_PACK
    return EXIT_UNAVAILABLE if error.retryable else EXIT_FAILED


def main() -> None:
    """Runs the command line; a LikenessError becomes one line on stderr and its exit code."""
    try:
        app()
    except LikenessError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(exit_code_of(error))
