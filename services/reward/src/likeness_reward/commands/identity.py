"""likeness-reward embed and info."""

import dataclasses
import json
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
    size_of,
)
from likeness_reward.errors import UnreadableVideo
from likeness_reward.reporting import embedding_report, server_report
from likeness_reward.scorers import Connection, open_scorer


def embed(
    images: Annotated[list[Path], typer.Argument(help="Photos of one person: JPEG, PNG or WebP.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the identity template (JSON).")],
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
    pooling: Annotated[
        Literal["mean", "quality_weighted"], typer.Option(help="How the photos become one template.")
    ] = "mean",
) -> None:
    """Pool photos of one person into an identity template, to be used again with `score --identity`.

    likeness-reward embed anna1.jpg anna2.jpg -o anna.json --endpoint localhost:50051
    """
    keys = (token, token_file, tls, tls_ca, tls_cert, tls_key)
    connection = Connection(endpoint, *keys) if endpoint is not None else None
    scorer = open_scorer(connection, pack, size_of(detector_size), letterbox, threads)
    encoded = []
    for image in images:
        try:
            encoded.append(image.read_bytes())
        except OSError as error:
            raise UnreadableVideo(f"{image}: {error.strerror}", path=image) from error
    template, observations = scorer.embed_identity_with_observations(encoded, pooling)
    template.save(output)
    print(embedding_report(images, observations, template, output))


def info(
    endpoint: Annotated[str, typer.Option(help="HOST:PORT of the reward server.")] = "localhost:50051",
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 10.0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Print what a server says of itself: pack, models, limits. Exit code 0 means that it serves.

    likeness-reward info --endpoint localhost:50051
    """
    with Connection(endpoint, token, token_file, tls, tls_ca, tls_cert, tls_key).open(timeout) as client:
        server = client.wait_until_ready(timeout)
    print(json.dumps(dataclasses.asdict(server)) if json_output else server_report(endpoint, server))
