"""report.html of a run: what was gained, how the training went, what the videos look like. Made from files alone."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.charts import curve, paired_scatter, phase_seconds, smoothing_window
from likeness_trainer.run.environment import ENVIRONMENT_NAME
from likeness_trainer.run.metrics import METRICS_NAME, SECONDS_KEY, STEP_KEY, read_metrics
from likeness_trainer.run.phase_clock import REWARD_HIDDEN, TOTAL
from likeness_trainer.run.report_page import filmstrip, note, page, png_bytes_address, section, table

REPORT_NAME = "report.html"
FIRST_CURVES = {
    "reward": "reward: what the policy is paid for",
    "coverage": "coverage: share of frames with a face",
    "kl": "KL: distance from the base model",
    "reward_std_in_group": "spread of rewards inside a group",
    "grad_norm": "gradient norm before clipping",
    "clip_fraction": "share of clipped ratios",
    "ratio_deviation": "largest |ratio - 1| of a step",
    "groups_dropped": "groups dropped for want of a score",
    "groups_without_variance": "groups of equal rewards: no signal",
    "skipped": "steps skipped: something was not finite",
    "kl_weight": "weight of the KL, adapted to its target",
    "learning_rate": "learning rate",
    "loss": "loss: its gradient counts, not its height",
    "ratio_deviation_first": "|ratio - 1| before the first update: 0 when exact",
}
"""Metrics that are drawn first, and their titles; all others follow in the order of the file under their own names."""
COMPONENT = "reward/"
"""Prefix of the metrics that hold one component of the reward."""
MAX_STRIP_FRAMES = 9
MAX_TRAINING_SAMPLES = 6

Comparison = Mapping[str, Any]


@dataclass(frozen=True)
class HeldOutFile:
    """What samples/held_out_before.npz and held_out_after.npz hold of N pairs."""

    frames: NDArray[np.uint8]
    """RGB [N, T, H, W, 3]."""
    similarity: NDArray[np.float64]
    """[N, T], NaN where no face was found."""
    values: NDArray[np.float64]
    """[N], the reward of each video, no-face frames counted."""
    first_frames: NDArray[np.uint8]
    """RGB [N, H, W, 3]: what the video was made from."""


def write_report(run_dir: Path) -> Path:
    """Writes RUN/report.html from whatever the run has written so far, and returns its path.

    The page is one file without scripts; it fetches nothing. Raises RunFolderError where `run_dir` is not the folder of
    a run or one of its files is damaged.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise RunFolderError(f"{run_dir} is not the folder of a run: it has no config.yaml")
    summary = _read_summary(run_dir)
    metrics = read_metrics(run_dir) if (run_dir / METRICS_NAME).exists() else []
    before, after = (_read_held_out(run_dir / "samples" / f"held_out_{name}.npz") for name in ("before", "after"))
    title = f"Likeness run {run_dir.resolve().name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _headline(summary.get("held_out"), metrics),
        _comparisons(summary),
        _curves(metrics),
        _pictures(before, after),
        _training_samples(run_dir / "samples"),
        _facts(summary),
        _environment(run_dir / ENVIRONMENT_NAME),
        section("Configuration", f"<pre>{escape(config_file.read_text(encoding='utf-8'))}</pre>"),
    ]
    path = run_dir / REPORT_NAME
    temporary = path.with_suffix(".html.partial")
    temporary.write_text(page(title, [part for part in parts if part]), encoding="utf-8")
    temporary.replace(path)
    return path


def verdict(held_out: Comparison) -> str:
    """Returns "rose", "fell" or "shows no change that the interval can tell from zero" for a comparison."""
    low, high = held_out["ci95"]
    if low > 0:
        return "rose"
    if high < 0:
        return "fell"
    return "shows no change that the interval can tell from zero"


def _headline(held_out: Comparison | None, metrics: Sequence[Mapping[str, Any]]) -> str:
    if held_out is None:
        steps = metrics[-1][STEP_KEY] if metrics else 0
        return f'<p class="headline">Not evaluated yet: {steps} training steps done.</p>'
    word = verdict(held_out)
    low, high = held_out["ci95"]
    colour = word if word in ("rose", "fell") else ""
    return (
        f'<p class="headline">Held-out identity similarity <span class="{colour}">{word}</span>: '
        f"{held_out['before']:.3f} before, {held_out['after']:.3f} after, "
        f"difference {held_out['difference']:+.3f} (95 % interval {low:+.3f} to {high:+.3f}).</p>"
        + note(
            f"{held_out['pairs']} pairs of people and noise never trained on, the same before and after, scored under "
            f"the pack {held_out['pack']}; frames without a face are counted. Interval: paired bootstrap."
        )
    )


def _comparisons(summary: Mapping[str, Any]) -> str:
    others: Sequence[Comparison] = summary.get("held_out_other_packs", ())
    if not others:
        return ""
    rows = [
        [
            f"{item['pack']} ({'gave the rewards' if number == 0 else 'never used in training'})",
            f"{item['before']:.3f}",
            f"{item['after']:.3f}",
            f"{item['difference']:+.3f}",
            f"{item['ci95'][0]:+.3f} to {item['ci95'][1]:+.3f}",
            str(item["pairs"]),
        ]
        for number, item in enumerate([summary["held_out"], *others])
    ]
    header = ("pack", "before", "after", "difference", "95 % interval", "pairs")
    return section("The same videos under other packs", table(header, rows))


def _curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return section("Training", note("No step has been recorded yet."))
    steps = [record[STEP_KEY] for record in metrics]
    series = {_title(name): [record.get(name) for record in metrics] for name in _metric_names(metrics)}
    constant = {title: values[0] for title, values in series.items() if len(steps) > 1 and len(set(values)) == 1}
    charts = [curve(title, steps, values) for title, values in series.items() if title not in constant]
    window = smoothing_window(len(steps))
    text = f"Bold: mean of the last {window} steps; faint: each step." if window > 1 else "One point a step."
    content = [note(text), f'<div class="charts">{"".join(charts)}</div>']
    if constant:
        content.append(note("The same in every step:"))
        content.append(table((), [[title, f"{value:g}"] for title, value in constant.items()]))
    phases = list(dict.fromkeys(phase for record in metrics for phase in record.get(SECONDS_KEY, {})))
    phases = [phase for phase in phases if phase not in (TOTAL, REWARD_HIDDEN)]
    if phases:
        seconds = {phase: [record.get(SECONDS_KEY, {}).get(phase, 0.0) for record in metrics] for phase in phases}
        content.append(f'<div class="charts">{phase_seconds(steps, seconds)}</div>')
    return section("Training", *content)


def _title(name: str) -> str:
    if name.startswith(COMPONENT):
        return f"{name.removeprefix(COMPONENT)}: component of the reward"
    return FIRST_CURVES.get(name, name)


def _metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of all numeric metrics, the important ones first."""
    found = dict.fromkeys(
        name
        for record in metrics
        for name, value in record.items()
        if name != STEP_KEY and isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    return [name for name in FIRST_CURVES if name in found] + [name for name in found if name not in FIRST_CURVES]


def _pictures(before: HeldOutFile | None, after: HeldOutFile | None) -> str:
    if before is None:
        return ""
    if after is None:
        strip = filmstrip([("first frame", before.first_frames[:1], None), _strip_row("before", before, 0)])
        return section("A held-out sample", note("Before training; cosine similarity below each frame."), strip)
    content = [note("Same person, same noise; cosine similarity to the person below each frame.")]
    for heading, pair in _telling_pairs(after.values - before.values):
        rows = [("first frame", before.first_frames[pair : pair + 1], None)]
        change = f"pair {pair + 1}, {heading}: {before.values[pair]:.3f} to {after.values[pair]:.3f}"
        content += [
            f"<p>{escape(change)}</p>",
            filmstrip([*rows, _strip_row("before", before, pair), _strip_row("after", after, pair)]),
        ]
    scatter = section(
        "Pair by pair",
        note("Above the dashed line the adapter did better. Reward of the whole video, frames without a face counted."),
        f'<div class="charts">{paired_scatter(before.values, after.values)}</div>',
    )
    return section("Held-out samples before and after", *content) + "\n" + scatter


def _telling_pairs(changes: NDArray[np.float64]) -> list[tuple[str, int]]:
    """Returns (name, index) of the pair with the median change, the largest gain and the largest loss, each once."""
    order = np.argsort(changes, kind="stable")
    chosen = {"median change": int(order[len(order) // 2]), "largest gain": int(order[-1]), "least gain": int(order[0])}
    return [
        (name, pair) for place, (name, pair) in enumerate(chosen.items()) if pair not in list(chosen.values())[:place]
    ]


def _strip_row(name: str, videos: HeldOutFile, pair: int) -> tuple[str, NDArray[np.uint8], NDArray[np.float64]]:
    count = videos.frames.shape[1]
    shown = np.linspace(0, count - 1, min(count, MAX_STRIP_FRAMES)).round().astype(int)
    return name, videos.frames[pair, shown], videos.similarity[pair, shown]


def _training_samples(samples: Path) -> str:
    """Returns the pictures that the run wrote as it went, evenly chosen, first and last among them."""
    files = sorted(samples.glob("step-*.png")) if samples.is_dir() else []
    if not files:
        return ""
    shown = np.linspace(0, len(files) - 1, min(len(files), MAX_TRAINING_SAMPLES)).round().astype(int)
    rows = "".join(
        f'<p>{escape(files[index].stem)}</p><img alt="{escape(files[index].stem)}" '
        f'src="{png_bytes_address(files[index].read_bytes())}">'
        for index in shown
    )
    return section("Samples during training", f'<div class="wide">{rows}</div>')


def _facts(summary: Mapping[str, Any]) -> str:
    rows = [
        [name.replace("_", " "), str(value)] for name, value in summary.items() if not isinstance(value, (dict, list))
    ]
    return section("Run", table((), rows)) if rows else ""


def _environment(path: Path) -> str:
    """Returns what the run ran on, as its newest start wrote it."""
    if not path.is_file():
        return ""
    try:
        described: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return section("Environment", table((), [[name, text] for name, text in described.items()]))


def _read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    if not path.is_file():
        return {}
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return summary


def _read_held_out(path: Path) -> HeldOutFile | None:
    if not path.is_file():
        return None
    try:
        with np.load(path) as data:
            return HeldOutFile(data["frames"], data["similarity"], data["values"], data["first_frames"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
