"""likeness-reward score."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from likeness_reward.commands.options import (
    EndpointOption,
    LetterboxOption,
    PackOption,
    SizeOption,
    ThreadsOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenFileOption,
    TokenOption,
    exit_code_of,
    size_of,
)
from likeness_reward.domain import ScoreOptions
from likeness_reward.errors import LikenessError
from likeness_reward.score_files import score_files
from likeness_reward.score_output import OutputFormat, ScoreProgress, open_output
from likeness_reward.scorers import Connection, identity_from_path, open_scorer
from likeness_reward.videos import read_video
from likeness_reward.visuals import Visuals

OUTPUT = "Output"
SCORING = "What counts"
VIDEOS_ON_A_STREAM = 4


def score(
    videos: Annotated[
        list[Path], typer.Argument(help="Video files (mp4, mov, webm, gif, ...), folders of frames, or images.")
    ],
    identity: Annotated[
        Path, typer.Option(help="Who the videos should show: a photo, a video, or a template from `embed`.")
    ],
    json_output: Annotated[
        bool,
        typer.Option("--json", help="One JSON object; a list of them for several videos.", rich_help_panel=OUTPUT),
    ] = False,
    json_lines: Annotated[
        bool,
        typer.Option("--jsonl", help="One JSON object a line, as each video is done.", rich_help_panel=OUTPUT),
    ] = False,
    per_frame: Annotated[bool, typer.Option(help="List every frame.", rich_help_panel=OUTPUT)] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture of the similarity over time: .png, .svg or .pdf.", rich_help_panel=OUTPUT),
    ] = None,
    annotate: Annotated[
        Path | None,
        typer.Option(
            help="Copy with box, landmarks and score: an .mp4, or with several videos a folder of them.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    no_face_value: Annotated[
        float,
        typer.Option(min=-1.0, max=1.0, help="What a frame without a usable face counts.", rich_help_panel=SCORING),
    ] = 0.0,
    face_choice: Annotated[
        Literal["largest", "most_similar"],
        typer.Option(help="Which face counts when a frame shows several.", rich_help_panel=SCORING),
    ] = "largest",
    min_face_pixels: Annotated[
        int, typer.Option(min=1, max=4096, help="Smallest face width used.", rich_help_panel=SCORING)
    ] = 16,
    identity_weight: Annotated[
        float, typer.Option(help="Weight of the mean similarity in the reward.", rich_help_panel=SCORING)
    ] = 1.0,
    coverage_weight: Annotated[
        float, typer.Option(help="Weight of the share of frames with a face.", rich_help_panel=SCORING)
    ] = 0.0,
    motion_weight: Annotated[
        float,
        typer.Option(help="Weight of the share of --motion-reference's motion.", rich_help_panel=SCORING),
    ] = 0.0,
    motion_reference: Annotated[
        Path | None,
        typer.Option(help="Video that moves as the others should; a still one scores low.", rich_help_panel=SCORING),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help=f"Videos scored at once. Default: {VIDEOS_ON_A_STREAM} by a server, as many as there are cores for "
            "--threads each with --pack.",
            show_default=False,
        ),
    ] = None,
    endpoint: EndpointOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    pack: PackOption = None,
    detector_size: SizeOption = None,
    letterbox: LetterboxOption = None,
    threads: ThreadsOption = 1,
) -> None:
    """Print how much videos look like a person, from a pack in this process or from a server.

    The reward of a video is the mean over its frames of the cosine between the face and the identity; frames without a
    face count with --no-face-value. Weights mix in how many frames show a face, and how much the video moves.

        likeness-reward score sample.mp4 --identity anna.jpg --pack ~/.insightface/models/buffalo_l

        likeness-reward score samples/*.mp4 --identity anna.json --endpoint localhost:50051 --jsonl

        likeness-reward score sample.mp4 --identity anna.jpg --pack buffalo_l --plot sample.png --annotate seen.mp4
    """
    kind = output_format(json_output, json_lines)
    visuals = Visuals(videos, plot, annotate)
    if motion_weight != 0.0 and motion_reference is None:
        raise typer.BadParameter("--motion-weight needs --motion-reference VIDEO")
    options = ScoreOptions(
        no_face_value=no_face_value,
        face_choice=face_choice,
        min_face_pixels=min_face_pixels,
        identity_weight=identity_weight,
        coverage_weight=coverage_weight,
        motion_weight=motion_weight,
    )
    keys = (token, token_file, tls, tls_ca, tls_cert, tls_key)
    connection = Connection(endpoint, *keys) if endpoint is not None else None
    scorer = open_scorer(connection, pack, size_of(detector_size), letterbox, threads)
    person = identity_from_path(scorer, identity)
    motion = scorer.score(read_video(motion_reference), person).motion if motion_reference is not None else None
    at_once = concurrency or (VIDEOS_ON_A_STREAM if pack is None else cores_for(threads))
    failures: list[LikenessError] = []
    with ScoreProgress(len(videos)) as progress:
        output = open_output(kind, progress, per_frame=per_frame, single=len(videos) == 1)
        try:
            for video, outcome in score_files(
                scorer, videos, person, options, concurrency=at_once, reference_motion=motion
            ):
                progress.advance()
                if isinstance(outcome, LikenessError):
                    failures.append(outcome)
                    output.error(video, outcome)
                else:
                    output.reward(video, outcome)
                    visuals.add(video, outcome)
        finally:
            output.finish()
            visuals.finish()
    if failures:
        raise typer.Exit(exit_code_of(failures[0]))


def output_format(json_output: bool, json_lines: bool) -> OutputFormat:
    """Returns the format that the flags ask for. Raises typer.BadParameter when they ask for two."""
    if json_output and json_lines:
        raise typer.BadParameter("give --json or --jsonl, not both")
    if json_lines:
        return "jsonl"
    return "json" if json_output else "table"


def cores_for(threads: int) -> int:
    """Returns how many scorers of `threads` threads this process has cores for, at least one."""
    return max(1, (os.cpu_count() or 1) // threads)
