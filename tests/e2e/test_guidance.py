"""A run under classifier-free guidance: sampled, updated, evaluated, exported and sampled again under it."""

import json

import numpy as np
import pytest
from e2e_support import records

from likeness_trainer.config import load_config
from likeness_trainer.evaluate import evaluate_run
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.progress import RunProgress

pytestmark = pytest.mark.slow

GUIDANCE = ("sampler.guidance_scale={dit: 2.0, dit2: 1.5}", "sampler.negative_prompt=a dark picture")


def test_a_guided_run_is_guided_from_rollout_to_sample(run_here, server, undisturbed, person_png, tmp_path) -> None:
    from likeness_trainer.data.images import read_image
    from likeness_trainer.run.sampling import load_trained, sample_video

    run_dir = tmp_path / "guided"
    run_here(run_dir, server.endpoint, *GUIDANCE, "steps=2")
    lines = records(run_dir)
    assert [line["ratio_deviation_first"] for line in lines] == [0.0, 0.0]
    assert lines[0]["reward"] != records(undisturbed)[0]["reward"]

    folder = RunFolder.existing(run_dir)
    held_out = json.loads(folder.summary_file.read_text())["held_out"]
    assert held_out["before"] != json.loads((undisturbed / "summary.json").read_text())["held_out"]["before"]
    config = load_config(folder.config_file, environment={})
    evaluate_run(folder, config, RunProgress(quiet=True))
    assert json.loads(folder.summary_file.read_text())["held_out"] == held_out

    card = (folder.lora / "README.md").read_text()
    assert "scale 2 in the high-noise expert, 1.5 in the low-noise expert, negative prompt 'a dark picture'" in card

    model = load_trained(folder, config)
    arguments = ("a portrait", read_image(person_png), 9, 64, 64, 0)
    guided = sample_video(model, *arguments)
    model.sampler = model.sampler.model_copy(update={"guidance_scale": 1.0})
    assert not np.array_equal(guided, sample_video(model, *arguments))
