"""Charts as SVG text for the report: colours are CSS variables, so that one drawing is readable in light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
_VARIABLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--grid)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, start=1)
}
"""Placeholder colours that Matplotlib draws with, and the variables of the page that take their place."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "likeness",
    "font.size": 9,
    "text.color": _INK,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}


def curve(title: str, steps: Sequence[int], values: Sequence[float | None]) -> str:
    """Returns the SVG of one metric over the steps; a trailing mean lies over it where it is long enough to be noisy.

    None is a gap in the line.
    """
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(3.4, 2.1)
        axes.set_title(title)
        smooth = trailing_mean(numbers, smoothing_window(len(numbers)))
        noisy = smoothing_window(len(numbers)) > 1
        marker = "o" if len(numbers) < 3 else None
        axes.plot(steps, numbers, color=_SERIES[0], linewidth=1, alpha=0.4 if noisy else 1, marker=marker, markersize=3)
        if noisy:
            axes.plot(steps, smooth, color=_SERIES[0], linewidth=2)
        _steps_across(axes)
        return _svg(figure, title)


def phase_seconds(steps: Sequence[int], phases: Mapping[str, Sequence[float]]) -> str:
    """Returns the SVG of the seconds of each step, stacked by phase."""
    title = "seconds per phase"
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(10.4, 2.4)
        axes.set_title(title)
        bottom = np.zeros(len(steps))
        for number, (phase, seconds) in enumerate(phases.items()):
            top = bottom + np.asarray(seconds, np.float64)
            colour = _SERIES[number % len(_SERIES)]
            axes.fill_between(steps, bottom, top, step="mid", color=colour, alpha=0.85, linewidth=0, label=phase)
            bottom = top
        axes.set_ylim(bottom=0)
        _steps_across(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return _svg(figure, title)


def paired_scatter(before: NDArray[np.float64], after: NDArray[np.float64]) -> str:
    """Returns the SVG with one dot a pair: `before` [N] across, `after` [N] up; above the diagonal is better."""
    title = "each held-out pair"
    both = np.concatenate([before, after])
    margin = max(0.02, 0.05 * float(np.ptp(both)))
    limits = (float(both.min()) - margin, float(both.max()) + margin)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(3.8, 3.6)
        axes.set_title(title)
        axes.plot(limits, limits, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.scatter(before, after, s=22, color=_SERIES[0], alpha=0.85, linewidths=0)
        axes.set(xlim=limits, ylim=limits, xlabel="before", ylabel="after", aspect="equal")
        return _svg(figure, title)


def smoothing_window(count: int) -> int:
    """Returns over how many steps the trailing mean of a curve of `count` steps is taken: a tenth, 1 when short."""
    return max(1, count // 10) if count >= 20 else 1


def trailing_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Returns [N]: the mean of each value and the up to window - 1 before it, gaps (NaN) left out."""
    means = np.full(len(values), np.nan)
    for index in range(len(values)):
        recent = values[max(0, index - window + 1) : index + 1]
        if np.isfinite(recent).any():
            means[index] = recent[np.isfinite(recent)].mean()
    return means


def _steps_across(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure of its own, in inches, without pyplot: nothing global is left behind."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, label: str) -> str:
    """Returns the figure as an inline SVG element, the same text for the same figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text[text.index("<svg") :])
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
