"""The look of report.html: one page, no script, no address outside itself, light or dark as the reader's system is."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_IMAGE_HEIGHT = 160
"""Frames are scaled down to this many pixels, so that a report of real videos stays a few MB."""

_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1a1a19; --muted: #6b6a63; --grid: #dddcd6; --good: #0b7a3b;
  --bad: #b3261e; --series-1: #2a6fc9; --series-2: #d9822b; --series-3: #2f8f6b; --series-4: #8a5cc2;
  --series-5: #c2476f; --series-6: #7a7a2a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #191918; --ink: #f0efea; --muted: #a5a49b; --grid: #3a3a37; --good: #5fd08f; --bad: #ff8a80;
  --series-1: #6ba6f5; --series-2: #f0a457; --series-3: #5fc49b; --series-4: #b796ea; --series-5: #ee86a6;
  --series-6: #c0c060; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.1rem; color: var(--muted); font-weight: 500; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.headline { font-size: 1.7rem; line-height: 1.3; margin: .5rem 0; max-width: 54rem; }
.rose { color: var(--good); } .fell { color: var(--bad); }
.note { color: var(--muted); max-width: 46rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } .charts svg { max-width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; font-weight: 400; overflow-wrap: anywhere; }
th { color: var(--muted); white-space: nowrap; } .strip td, .strip th { padding: 2px 3px; text-align: center; }
.strip th { text-align: right; padding-right: .6rem; }
.strip img { display: block; height: 96px; border-radius: 3px; } .strip span { font-size: .78rem; color: var(--muted); }
.strip .lost { color: var(--bad); }
.wide img { max-width: 100%; min-height: 72px; border-radius: 3px; }
pre { background: color-mix(in srgb, var(--grid) 35%, transparent); padding: 1rem; border-radius: 6px; overflow-x: auto;
  font-size: .82rem; line-height: 1.45; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """Returns the whole HTML document; the policy in its head forbids the browser to fetch anything."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def section(heading: str, *content: str) -> str:
    """Returns a section; `content` is HTML."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(content) + "\n</section>"


def note(text: str) -> str:
    """Returns a paragraph of quiet text."""
    return f'<p class="note">{escape(text)}</p>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of texts; an empty `header` makes the first column the header."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(_cell(cell, is_header=not header and place == 0) for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def filmstrip(rows: Sequence[tuple[str, NDArray[np.uint8], NDArray[np.float64] | None]]) -> str:
    """Returns a table of pictures: (name, frames uint8 RGB [T, H, W, 3], similarity of each frame or None) a row.

    NaN is a frame without a face, and is told in words.
    """
    body = []
    for name, frames, similarities in rows:
        cells = []
        for index, frame in enumerate(frames):
            caption = "" if similarities is None else _similarity_caption(similarities[index])
            cells.append(
                f'<td><img alt="{escape(name)}, picture {index + 1}" src="{png_address(frame)}">{caption}</td>'
            )
        body.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="strip">{"".join(body)}</table></div>'


def png_address(frame_rgb: NDArray[np.uint8]) -> str:
    """Returns `frame_rgb: uint8 [H, W, 3]` as a data: address of a PNG at most MAX_IMAGE_HEIGHT high."""
    image = Image.fromarray(np.ascontiguousarray(frame_rgb))
    if image.height > MAX_IMAGE_HEIGHT:
        width = max(1, round(image.width * MAX_IMAGE_HEIGHT / image.height))
        image = image.resize((width, MAX_IMAGE_HEIGHT), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return png_bytes_address(buffer.getvalue())


def png_bytes_address(data: bytes) -> str:
    """Returns the bytes of a PNG file as a data: address."""
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _cell(text: str, *, is_header: bool) -> str:
    tag = "th" if is_header else "td"
    return f"<{tag}>{escape(text)}</{tag}>"


def _similarity_caption(similarity: float) -> str:
    if np.isnan(similarity):
        return '<span class="lost">no face</span>'
    return f"<span>{similarity:.2f}</span>"
