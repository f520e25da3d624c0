"""The command line: serve, score, embed, info, pack check, pack export-triton."""

import sys

import typer

from likeness_reward.commands import identity, pack, score, serve
from likeness_reward.commands.options import EXIT_CODES, exit_code_of
from likeness_reward.errors import LikenessError

app = typer.Typer(
    name="likeness-reward",
    help="Scores how well videos keep a person's face.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
pack_app = typer.Typer(help="Look at packs: folders of ONNX files as InsightFace ships them.", no_args_is_help=True)

app.command()(serve.serve)
app.command()(score.score)
app.command()(identity.embed)
app.command()(identity.info)
app.add_typer(pack_app, name="pack")
pack_app.command("check")(pack.check)
pack_app.command("export-triton")(pack.export_triton)


def main() -> None:
    """Runs the command line; a LikenessError becomes one line on stderr and its exit code."""
    try:
        app()
    except LikenessError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(exit_code_of(error))
