"""report.html: one file, nothing from outside, the numbers of the run in it, and made from whatever is there."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from likeness_trainer.errors import RunFolderError
from likeness_trainer.run.charts import trailing_mean
from likeness_trainer.run.metrics import MetricsWriter
from likeness_trainer.run.report import _telling_pairs, verdict, write_report

HELD_OUT = {
    "before": 0.41234, "after": 0.48765, "difference": 0.07531, "ci95": [0.0512, 0.1018], "pairs": 32, "pack": "toy",
}  # fmt: skip
PAIRS, FRAMES = 5, 9


def save_held_out(run_dir, name, values, shade):
    frames = np.full((PAIRS, FRAMES, 64, 64, 3), shade, np.uint8)
    frames += np.arange(PAIRS, dtype=np.uint8)[:, None, None, None, None]  # the shade tells the pair
    similarity = np.repeat(np.asarray(values, np.float64)[:, None], FRAMES, axis=1)
    similarity[:, -1] = np.nan
    np.savez(
        run_dir / "samples" / f"held_out_{name}.npz",
        frames=frames,
        similarity=similarity,
        values=np.asarray(values, np.float64),
        first_frames=frames[:, 0] // 2,
    )


@pytest.fixture
def run_dir(tmp_path):
    """A folder with config.yaml only: a run that has just begun."""
    folder = tmp_path / "run & <co>"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("steps: 30\nmodel:\n  name: <tiny> & small\n", encoding="utf-8")
    return folder


@pytest.fixture
def finished_run(run_dir):
    """A folder as a finished run leaves it."""
    with MetricsWriter(run_dir) as writer:
        for step in range(1, 31):
            writer.write(
                {
                    "step": step,
                    "reward": None if step == 7 else 0.4 + step / 300,
                    "coverage": 0.95,
                    "kl": step * 1e-3,
                    "clip_fraction": 0.1,
                    "grad_norm": 0.5 + step % 2,
                    "loss": -0.1 / step,
                    "reward/identity": 0.4 + step / 300,
                    "seconds": {"sample": 1.0, "decode": 2.0, "total": 3.0},
                }  # fmt: skip
            )
    save_held_out(run_dir, "before", [0.40, 0.42, 0.38, 0.44, 0.41], 100)
    save_held_out(run_dir, "after", [0.46, 0.60, 0.30, 0.52, 0.49], 150)
    Image.new("RGB", (64 * 9, 64), (1, 2, 3)).save(run_dir / "samples" / "step-000010.png")
    other = {**HELD_OUT, "pack": "buffalo", "after": 0.40, "difference": -0.01, "ci95": [-0.03, 0.02]}
    summary = {"steps": 30, "lora_checksum": "ab12", "held_out": HELD_OUT, "held_out_other_packs": [other]}
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run_dir


class Addresses(HTMLParser):
    """Collects every attribute that could fetch something, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br", "use", "path"})

    def __init__(self):
        super().__init__()
        self.addresses, self.open, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parse(path):
    parser = Addresses()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.open == []
    return parser


def test_the_page_fetches_nothing(finished_run):
    path = write_report(finished_run)
    assert path == finished_run / "report.html"
    parser = parse(path)
    assert parser.addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in parser.addresses)
    assert not {"script", "link", "iframe", "object"} & set(parser.tags)
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text), "clip paths inside the page only"


def test_the_headline_has_the_four_numbers(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    headline = re.sub(r"<[^>]+>", "", text.split('class="headline">')[1].split("</p>")[0])
    assert headline == (
        "Held-out identity similarity rose: 0.412 before, 0.488 after, "
        "difference +0.075 (95 % interval +0.051 to +0.102)."
    )
    assert "32 pairs of people and noise never trained on" in text


def test_other_packs_are_compared_in_a_table(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    row = text.split("buffalo (never used in training)")[1].split("</tr>")[0]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["0.412", "0.400", "-0.010", "-0.030 to +0.020", "32"]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ([0.01, 0.1], "rose"),
        ([-0.1, -0.01], "fell"),
        ([-0.01, 0.1], "shows no change"),
        ([0.0, 0.1], "shows no change"),
    ],
)
def test_the_verdict_follows_the_interval_and_not_the_difference(interval, expected):
    assert verdict({**HELD_OUT, "ci95": interval}).startswith(expected)


def test_every_metric_that_changes_has_its_curve_the_important_ones_first(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', text)
    assert labels == [
        "reward: what the policy is paid for", "KL: distance from the base model", "gradient norm before clipping",
        "loss: its gradient counts, not its height", "identity: component of the reward", "seconds per phase",
        "each held-out pair",
    ]  # fmt: skip
    constant = text.split("The same in every step:")[1].split("</table>")[0]
    assert re.findall(r"<t[hd]>([^<]*)</t[hd]>", constant) == [
        "coverage: share of frames with a face", "0.95", "share of clipped ratios", "0.1"
    ]  # fmt: skip
    assert "Bold: mean of the last 3 steps" in text
    assert ">decode</text>" in text
    assert ">total</text>" not in text, "the whole step stacked on its own phases"


def test_charts_use_the_colours_of_the_page_so_that_both_schemes_can_be_read(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", drawings))
    assert {"var(--ink)", "var(--muted)", "var(--grid)", "var(--series-1)", "var(--series-2)"} <= colours
    assert not [colour for colour in colours if colour.startswith("#")], "a fixed colour is unreadable in one scheme"
    dark = text.split("prefers-color-scheme: dark")[1]
    for name in ("page", "ink", "muted", "grid", "series-1", "series-6"):
        assert f"--{name}: #" in dark


def test_filmstrips_show_median_best_and_worst_pair_before_and_after(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    # Changes: +.06, +.18, -.08, +.08, +.08; sorted: pair 3, 1, 4, 5, 2.
    assert re.findall(r"<p>(pair [^<]+)</p>", text) == [
        "pair 4, median change: 0.440 to 0.520",
        "pair 2, largest gain: 0.420 to 0.600",
        "pair 3, least gain: 0.380 to 0.300",
    ]
    strip = text.split('class="strip">')[1].split("</table>")[0]
    pictures = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[0, 0, 0]
        for data in re.findall(r"base64,([^\"]+)", strip)
    ]
    assert pictures == [51] + [103] * 9 + [153] * 9  # pair 4: shade 100 + 3 before, 150 + 3 after, half as first frame
    assert strip.count("0.44") == 8
    assert strip.count("0.52") == 8
    assert strip.count("no face") == 2


def test_pairs_are_shown_once():
    assert _telling_pairs(np.array([0.1])) == [("median change", 0)]
    assert _telling_pairs(np.array([0.2, 0.1])) == [("median change", 0), ("least gain", 1)]


def test_text_of_the_run_cannot_break_the_page(finished_run):
    text = write_report(finished_run).read_text(encoding="utf-8")
    assert "name: &lt;tiny&gt; &amp; small" in text
    assert "<tiny>" not in text
    assert "<title>Likeness run run &amp; &lt;co&gt;</title>" in text


def test_a_run_that_has_just_begun_has_a_report(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    parse(run_dir / "report.html")
    assert "Not evaluated yet: 0 training steps done." in text
    assert "No step has been recorded yet." in text


def test_a_run_between_its_evaluations_has_a_report(run_dir):
    with MetricsWriter(run_dir) as writer:
        writer.write({"step": 1, "reward": 0.4, "seconds": {"sample": 1.0}})
    save_held_out(run_dir, "before", [0.4] * PAIRS, 100)
    text = write_report(run_dir).read_text(encoding="utf-8")
    parse(run_dir / "report.html")
    assert "Not evaluated yet: 1 training steps done." in text
    assert "A held-out sample" in text
    assert "One point a step." in text


def test_long_videos_show_nine_frames_and_large_ones_are_scaled_down(run_dir):
    frames = np.zeros((1, 81, 320, 200, 3), np.uint8)
    np.savez(
        run_dir / "samples" / "held_out_before.npz",
        frames=frames, similarity=np.ones((1, 81)), values=np.ones(1), first_frames=frames[:, 0],
    )  # fmt: skip
    text = write_report(run_dir).read_text(encoding="utf-8")
    pictures = re.findall(r"base64,([^\"]+)", text)
    assert len(pictures) == 1 + 9
    assert {Image.open(io.BytesIO(base64.b64decode(data))).size for data in pictures} == {(100, 160)}


def test_the_same_run_gives_the_same_report(finished_run):
    first = write_report(finished_run).read_bytes()
    assert write_report(finished_run).read_bytes() == first
    assert not list(finished_run.glob("*.partial"))


def test_what_is_no_run_or_damaged_is_named(tmp_path, run_dir):
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        write_report(tmp_path / "nothing")
    (run_dir / "samples" / "held_out_before.npz").write_bytes(b"broken")
    with pytest.raises(RunFolderError, match=r"held_out_before\.npz is damaged"):
        write_report(run_dir)
    (run_dir / "samples" / "held_out_before.npz").unlink()
    (run_dir / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"summary\.json is damaged"):
        write_report(run_dir)


def test_the_trailing_mean_leaves_gaps_out():
    values = np.array([1.0, 3.0, np.nan, 5.0])
    assert trailing_mean(values, 2).tolist() == [1.0, 2.0, 3.0, 5.0]
    assert np.isnan(trailing_mean(np.array([np.nan]), 3)).all()
