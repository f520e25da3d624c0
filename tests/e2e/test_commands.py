"""The commands that follow a run, through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e_support import environment
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def trainer(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "likeness_trainer", *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_export_lora_writes_both_formats_elsewhere(undisturbed: Path, tmp_path: Path) -> None:
    result = trainer("export-lora", undisturbed, "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    exported, trained = (load_file(f / "low_noise.safetensors") for f in (tmp_path / "out", undisturbed / "lora"))
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in trained)
    assert (tmp_path / "out" / "peft" / "low_noise" / "adapter_config.json").is_file()


def test_report_is_written_anew(undisturbed: Path) -> None:
    (undisturbed / "report.html").unlink()
    result = trainer("report", undisturbed)
    assert result.returncode == 0, result.stderr
    assert (undisturbed / "report.html").stat().st_size > 10_000


def test_sample_writes_a_video_and_the_lora_changes_it(undisturbed: Path, person_png: Path, tmp_path: Path) -> None:
    import av

    videos = []
    for name, flags in (("with.mp4", ()), ("without.mp4", ("--without-lora",))):
        arguments = ("--image", person_png, "--prompt", "a portrait", "--output", tmp_path / name, *flags)
        result = trainer("sample", undisturbed, *arguments)
        assert result.returncode == 0, result.stderr
        with av.open(str(tmp_path / name)) as container:
            videos.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    assert videos[0].shape == videos[1].shape == (9, 64, 64, 3)
    assert not np.array_equal(*videos)


def test_evaluate_repeats_the_summary(undisturbed: Path, server) -> None:
    before = json.loads((undisturbed / "summary.json").read_text())["held_out"]
    result = trainer("evaluate", undisturbed, "--set", f"reward.endpoint={server.endpoint}")
    assert result.returncode == 0, result.stderr
    assert json.loads((undisturbed / "summary.json").read_text())["held_out"] == before
    for text in ("2 held-out pairs", "identity", "coverage", "each pair", "identity similarity on 2 held-out people"):
        assert text in result.stdout


def test_evaluate_prints_json(undisturbed: Path, server) -> None:
    held_out = json.loads((undisturbed / "summary.json").read_text())["held_out"]
    result = trainer("evaluate", undisturbed, "--json", "--set", f"reward.endpoint={server.endpoint}")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["components"]["identity"]["difference"] == pytest.approx(held_out["difference"])
    assert len(document["pairs"]) == 2


@pytest.mark.parametrize("command", ["report", "export-lora", "evaluate"])
def test_a_folder_that_is_no_run_is_named(command: str, tmp_path: Path) -> None:
    result = trainer(command, tmp_path)
    assert result.returncode == 2
    assert "is not the folder of a run" in result.stderr
    assert "Traceback" not in result.stderr


def test_data_check_names_every_bad_row(people: Path, tmp_path: Path) -> None:
    good = next((people / "train").glob("*.mp4"))
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (tmp_path / "metadata.csv").write_text(f"video,prompt\n{good},a\nbroken.mp4,b\nabsent.mp4,c\n")
    size = ("--num-frames", 9, "--height", 64, "--width", 64, "--fps", 8)
    result = trainer("data", "check", tmp_path / "metadata.csv", *size)
    assert result.returncode == 1
    assert "row 2" in result.stdout
    assert "row 3" in result.stdout
    assert "row 1" not in result.stdout
    assert trainer("data", "check", people / "train" / "metadata.csv", *size).returncode == 0


def test_help_names_every_command() -> None:
    result = trainer("--help")
    for command in ("train", "demo", "sample", "evaluate", "export-lora", "report", "data"):
        assert command in result.stdout
