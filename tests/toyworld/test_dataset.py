"""Written data sets: pixels survive the video file, and people of different sets never meet."""

import csv
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from likeness_toyworld.dataset import people_seeds, write_dataset
from likeness_toyworld.painter import HELD_OUT_SEED, paint_clip, sample_identity, sample_motion


def read_video(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_videos_come_back_pixel_by_pixel(tmp_path: Path) -> None:
    metadata = write_dataset(tmp_path, clips=2, seed=1)
    with metadata.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["video", "prompt"]
    for row, person in zip(rows, people_seeds(2, 1), strict=True):
        painted, _ = paint_clip(sample_identity(person), sample_motion(np.random.default_rng([person, 7])))
        assert np.array_equal(read_video(tmp_path / row["video"]), painted)


def test_sets_have_different_people_and_held_out_people_are_apart() -> None:
    seen = [set(people_seeds(100, seed)) for seed in (0, 1, 2)]
    assert not seen[0] & seen[1]
    assert max(max(people) for people in seen) < HELD_OUT_SEED
    assert min(people_seeds(100, 0, held_out=True)) >= HELD_OUT_SEED
    assert max(people_seeds(10_000, 49)) < HELD_OUT_SEED


@pytest.mark.parametrize(("clips", "seed"), [(0, 0), (10_001, 0), (1, 50), (1, -1)])
def test_sizes_and_seeds_outside_the_range_are_refused(clips: int, seed: int) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        people_seeds(clips, seed)


def test_the_command_line_writes_the_same_set(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "likeness_toyworld.dataset",
        str(tmp_path / "shell"),
        "--clips",
        "1",
        "--seed",
        "3",
    ]
    subprocess.run(command, check=True, capture_output=True)
    write_dataset(tmp_path / "here", clips=1, seed=3)
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "shell").iterdir())
    for name in names:
        assert (tmp_path / "shell" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, likeness_toyworld.painter; sys.exit('torch' in sys.modules or 'diffsynth' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
