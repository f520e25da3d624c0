"""likeness-reward score."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from likeness_reward.commands.options import (
    EndpointOption,
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
from likeness_reward.reporting import reward_document, reward_table
from likeness_reward.scorers import Connection, identity_from_path, open_scorer
from likeness_reward.videos import read_video


def score(
    videos: Annotated[list[Path], typer.Argument(help="Video files, folders of frames, or images.")],
    identity: Annotated[
        Path, typer.Option(help="Who the videos should show: a photo, a video, or a template from `embed`.")
    ],
    endpoint: EndpointOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    pack: PackOption = None,
    detector_size: SizeOption = None,
    threads: ThreadsOption = 1,
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
    keys = (token, token_file, tls, tls_ca, tls_cert, tls_key)
    connection = Connection(endpoint, *keys) if endpoint is not None else None
    scorer = open_scorer(connection, pack, size_of(detector_size), threads)
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
