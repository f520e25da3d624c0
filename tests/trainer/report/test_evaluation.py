"""The evaluation as JSON and as tables, and the environment of a run."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from likeness_trainer.evaluate import HeldOutVideos, evaluation_document
from likeness_trainer.run.environment import describe_environment, write_environment
from likeness_trainer.run.evaluation_table import print_evaluation
from likeness_trainer.run.report import write_report


def videos(identity: list[float], motion: list[float]) -> HeldOutVideos:
    count = len(identity)
    components = {"identity": np.array(identity), "motion": np.array(motion)}
    return HeldOutVideos(
        np.zeros((count, 5, 8, 8, 3), np.uint8), np.full((count, 5), 0.5), np.array(identity), components
    )


@pytest.fixture
def document() -> dict:
    before, after = videos([0.2, 0.4, 0.6], [1.0, 2.0, 3.0]), videos([0.3, 0.5, 0.7], [1.0, 1.0, 4.0])
    return evaluation_document(before, after, [1, 2, 1], "toy", seed=0)


def test_every_component_has_its_interval_and_every_pair_its_values(document: dict) -> None:
    identity, motion = document["components"]["identity"], document["components"]["motion"]
    assert identity["before"] == pytest.approx(0.4)
    assert identity["after"] == pytest.approx(0.5)
    assert identity["ci95"] == pytest.approx([0.1, 0.1])  # every pair rose by the same
    assert motion["difference"] == pytest.approx(0.0)
    assert motion["ci95"][0] < -0.5
    assert motion["ci95"][1] > 0.5
    assert document["pairs"][1] == {
        "row": 2, "identity": {"before": 0.4, "after": 0.5}, "motion": {"before": 2.0, "after": 1.0},
    }  # fmt: skip
    assert json.loads(json.dumps(document)) == document


def test_the_table_shows_components_and_pairs(document: dict) -> None:
    console = Console(width=100, file=io.StringIO())
    print_evaluation(document, console)
    text = console.file.getvalue()
    assert "3 held-out pairs, pack toy" in text
    assert "+0.100 to +0.100" in text
    assert "0.600  0.700" in text
    assert "motion" in text


def test_saved_videos_keep_their_components(tmp_path: Path) -> None:
    saved = videos([0.1, 0.2], [3.0, 4.0])
    saved.save(tmp_path / "v.npz", np.zeros((2, 8, 8, 3), np.uint8))
    loaded = HeldOutVideos.load(tmp_path / "v.npz")
    assert loaded.components.keys() == {"identity", "motion"}
    assert loaded.components["motion"].tolist() == [3.0, 4.0]


def test_the_environment_names_versions_and_device_and_stands_in_the_report(tmp_path: Path) -> None:
    described = describe_environment(torch.device("cpu"))
    assert described["torch"] == torch.__version__.partition("+")[0] or described["torch"] == torch.__version__
    assert described["device"] == "cpu"
    write_environment(tmp_path, torch.device("cpu"))
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    page = write_report(tmp_path).read_text()
    assert "Environment" in page
    assert described["platform"] in page
