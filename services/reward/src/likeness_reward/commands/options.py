"""What the commands share: options, exit codes, and how an error becomes one."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from likeness_reward.domain import parse_size
from likeness_reward.errors import InvalidImage, InvalidPack, LikenessError, UnreadableVideo

EXIT_FAILED = 1
EXIT_UNREADABLE = 3
EXIT_BAD_PACK = 4
EXIT_UNAVAILABLE = 5
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 wrong usage; 3 unreadable video or image; 4 bad pack; 5 no server answers."
)
SERVER = "Server to ask"
PACK = "Scoring without a server"

PackOption = Annotated[
    Path | None,
    typer.Option("--pack", help="Folder of ONNX files: score in this process.", rich_help_panel=PACK),
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        help="Detector input WIDTHxHEIGHT, multiples of 32. Default: the pack's pack.json, else 640x640.",
        rich_help_panel=PACK,
    ),
]
LetterboxOption = Annotated[
    Literal["fit", "full"] | None,
    typer.Option(
        help="Leave out what a frame leaves empty of the detector's canvas (fit), or not (full), as InsightFace. "
        "Default: the pack's pack.json, else fit.",
        rich_help_panel=PACK,
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads inside one run of a network.", rich_help_panel=PACK)]
EndpointOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a reward server, or several with commas between them.", rich_help_panel=SERVER),
]
TokenOption = Annotated[
    str | None,
    typer.Option(envvar="LIKENESS_REWARD_TOKEN", help="Bearer token.", show_default=False, rich_help_panel=SERVER),
]
TokenFileOption = Annotated[Path | None, typer.Option(help="File with the bearer token.", rich_help_panel=SERVER)]
TlsOption = Annotated[
    bool, typer.Option("--tls", help="Speak TLS, checked against the usual roots.", rich_help_panel=SERVER)
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(help="Speak TLS, checked against the roots in this file (PEM).", rich_help_panel=SERVER),
]
TlsCertOption = Annotated[
    Path | None, typer.Option(help="Certificate to show to the server (PEM).", rich_help_panel=SERVER)
]
TlsKeyOption = Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).", rich_help_panel=SERVER)]


def size_of(text: str | None) -> tuple[int, int] | None:
    """Returns (width, height) of "640x384". Raises typer.BadParameter."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def exit_code_of(error: LikenessError) -> int:
    """Returns the documented exit code of an error."""
    if isinstance(error, UnreadableVideo | InvalidImage):
        return EXIT_UNREADABLE
    if isinstance(error, InvalidPack):
        return EXIT_BAD_PACK
    return EXIT_UNAVAILABLE if error.retryable else EXIT_FAILED
