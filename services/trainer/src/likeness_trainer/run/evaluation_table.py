"""evaluation.json as tables for the terminal: every part of the reward with its interval, then every pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_evaluation(document: Mapping[str, Any], console: Console) -> None:
    """Prints what `evaluate.evaluation_document` returns."""
    table = Table(title=f"{document['count']} held-out pairs, pack {document['pack']}", title_justify="left")
    for heading in ("", "before", "after", "difference", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for name, part in document["components"].items():
        low, high = part["ci95"]
        numbers = (f"{part['before']:.3f}", f"{part['after']:.3f}", f"{part['difference']:+.3f}")
        table.add_row(name, *numbers, f"{low:+.3f} to {high:+.3f}")
    console.print(table)

    names = list(document["components"])
    pairs = Table(title="each pair, before and after", title_justify="left")
    for heading in ("pair", "row", *names):
        pairs.add_column(heading, justify="right")
    for number, pair in enumerate(document["pairs"], start=1):
        values = [f"{pair[name]['before']:.3f}  {pair[name]['after']:.3f}" for name in names]
        pairs.add_row(str(number), str(pair["row"]), *values)
    console.print(pairs)
