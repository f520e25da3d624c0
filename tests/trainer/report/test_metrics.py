"""metrics.jsonl: on the disk after each step, never NaN, and after a resume what an undisturbed run would have."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from likeness_trainer.run.metrics import MetricsError, MetricsWriter, read_metrics, without_seconds


def record(step, seconds=1.0):
    return {"step": step, "reward": 0.1 * step, "coverage": 1.0, "seconds": {"rollout": seconds, "update": 2.0}}


def write_steps(run_dir, steps, resume_step=None, seconds=1.0):
    with MetricsWriter(run_dir, resume_step) as writer:
        for step in steps:
            writer.write(record(step, seconds))


def test_one_object_a_line_with_the_step_first(tmp_path):
    write_steps(tmp_path / "run", [1, 2])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == ('{"step": 2, "reward": 0.2, "coverage": 1.0, "seconds": {"rollout": 1.0, "update": 2.0}}')
    assert read_metrics(tmp_path / "run") == [record(1), record(2)]


def test_floats_survive_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 1e-300, 2**-1074, 1 / 3, -0.0]
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "values": values})
    assert [value.hex() for value in read_metrics(tmp_path)[0]["values"]] == [value.hex() for value in values]


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    write_steps(tmp_path / "undisturbed", range(1, 11))
    write_steps(tmp_path / "killed", range(1, 8))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    write_steps(tmp_path / "killed", range(6, 11), resume_step=5, seconds=9.0)
    undisturbed, resumed = read_metrics(tmp_path / "undisturbed"), read_metrics(tmp_path / "killed")
    assert without_seconds(resumed) == without_seconds(undisturbed)
    assert [item["seconds"]["rollout"] for item in resumed] == [1.0] * 5 + [9.0] * 5


def test_a_resume_at_the_last_step_removes_nothing(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    MetricsWriter(tmp_path, resume_step=3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_killed_writer_has_every_finished_step_on_the_disk(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from likeness_trainer.run.metrics import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for step in (1, 2, 3):\n"
        "    writer.write({'step': step, 'reward': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    finished = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=os.environ, check=False)
    assert finished.returncode == -signal.SIGKILL
    assert [item["step"] for item in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": float("nan")}, "reward is nan, allowed: finite numbers"),
        ({"seconds": {"rollout": float("inf")}}, "seconds.rollout is inf"),
        ({"rewards": [0.1, float("-inf")]}, r"rewards\[1\] is -inf"),
        ({"reward": object()}, "reward is a object, allowed"),
        ({"reward": {1: 2.0}}, "reward has the key 1"),
        ({"step": None}, "step is None, allowed: a whole number above 1"),
        ({"step": 2.0}, "step is 2.0, allowed: a whole number above 1"),
    ],
)
def test_what_is_no_finite_number_is_refused_and_not_written(tmp_path, values, message):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1))
        with pytest.raises(MetricsError, match=message):
            writer.write({"step": 2, **values})
        writer.write(record(2))
    assert [item["step"] for item in read_metrics(tmp_path)] == [1, 2]


def test_steps_only_rise(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        with pytest.raises(MetricsError, match="step is 2, allowed: a whole number above 2"):
            writer.write(record(2))
        writer.write(record(3))
        with pytest.raises(MetricsError, match="step is 3, allowed: a whole number above 3"):
            writer.write(record(3))


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1, 2, 3], resume_step=0)
    assert [item["step"] for item in read_metrics(tmp_path)] == [1, 2, 3]
    write_steps(tmp_path / "never_wrote", [1], resume_step=0)
    assert read_metrics(tmp_path / "never_wrote") == [record(1)]


def test_a_new_run_does_not_write_into_an_old_one(tmp_path):
    write_steps(tmp_path, [1])
    with pytest.raises(MetricsError, match="holds records of an earlier run"):
        MetricsWriter(tmp_path)


def test_a_checkpoint_without_its_records_is_refused(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    with pytest.raises(MetricsError, match="ends at step 3, the checkpoint is of step 9"):
        MetricsWriter(tmp_path, resume_step=9)
    with pytest.raises(MetricsError, match="ends at step 0, the checkpoint is of step 2"):
        MetricsWriter(tmp_path / "other", resume_step=2)


def test_a_damaged_line_is_named_and_an_unfinished_one_is_not_read(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step": 3')
    assert [item["step"] for item in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2: is no valid JSON"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"reward": 1.0}) + "\n")
    with pytest.raises(MetricsError, match="line 1: is no object with a whole number 'step'"):
        read_metrics(tmp_path)


def test_tensorboard_plays_the_sampled_videos(tmp_path):
    """At their own speed, scaled down where they are large, and without those of steps that are run again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    small = np.zeros((5, 32, 48, 3), np.uint8)
    small[:, :, :, 0] = np.linspace(0, 255, 5)[:, None, None]
    large = np.full((2, 512, 256, 3), 200, np.uint8)
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.show(step, small, 8)
            writer.write(record(step))
    with MetricsWriter(tmp_path, resume_step=1) as writer:
        writer.show(2, large, 16)
        writer.write(record(2))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("sample")
    assert [(event.step, event.width, event.height) for event in events] == [(1, 48, 32), (2, 128, 256)]
    with Image.open(io.BytesIO(events[0].encoded_image_string)) as video:
        assert (video.n_frames, video.info["duration"]) == (5, 120)  # GIF counts in hundredths: 125 ms are cut to 120
        for index in range(5):
            video.seek(index)
            frame = np.asarray(video.convert("RGB"))
            assert np.abs(frame.astype(int) - small[index].astype(int)).max() <= 8  # a palette of 256 colours


def test_tensorboard_shows_the_resumed_values_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, range(1, 5))
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write({"step": 3, "reward": 7.0, "seconds": {"rollout": 3.0}})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, 7.0)]
    assert events.Scalars("seconds/rollout")[-1].value == 3.0
