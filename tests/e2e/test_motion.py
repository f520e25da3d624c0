"""Motion in the trainer, through a real server: measured against the row's clip, normalised, weighted and logged."""

import json
from pathlib import Path

import numpy as np
import pytest
from e2e_support import records

from likeness_trainer.data.dataset import DataConfig, load_dataset
from likeness_trainer.errors import ConfigError
from likeness_trainer.learn.credit import group_scores, weighted_advantages, weighted_value
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.reward_link import RewardConfig, RewardLink

pytestmark = pytest.mark.slow

WEIGHTS = "algorithm.reward_weights={identity: 1, motion: 0.5}"


@pytest.fixture(scope="module")
def clip(people: Path) -> np.ndarray:
    """Frames of the first person to train on, as the trainer reads them."""
    config = DataConfig(metadata=people / "train" / "metadata.csv", num_frames=9, height=64, width=64, fps=8)
    return load_dataset(config)[0].reference_frames


def test_a_frozen_video_loses_what_its_identity_wins(server, clip) -> None:
    """A copy of the first frame is the best likeness; with motion weighed, the clip itself is preferred."""
    link = RewardLink(RewardConfig(endpoint=server.endpoint, min_face_pixels=16), measures_motion=True)
    link.connect()
    frozen = np.repeat(clip[:1], len(clip), axis=0)
    identity = link.embed_identity([clip[0]], "the clip")
    motion = link.measure_motion(clip, identity, "the clip")
    assert motion is not None
    assert motion.scene > 0.01

    group = link.open_group(identity, 2, clip.shape[:3], reference_motion=motion)
    for sample, video in enumerate((clip, frozen)):
        group.put(sample, 0, video)
    rewards = group.results()
    link.close()
    assert rewards[0].component("motion") == pytest.approx(1.0, abs=1e-3)  # its own motion, as a share
    assert rewards[1].component("motion") < 0.5
    assert rewards[1].component("identity") > rewards[0].component("identity")

    algorithm = PolicyGradientConfig(reward_weights={"identity": 1.0, "motion": 1.5}, credit="video")
    advantages = weighted_advantages(group_scores(rewards, algorithm, 0.0), algorithm).numpy()
    # Of two samples the one is a deviation above the mean and the other one below, for whatever component.
    expected = np.zeros(2)
    for name, weight in algorithm.reward_weights.items():
        values = np.array([reward.component(name) for reward in rewards])
        expected += weight * (values - values.mean()) / (values.std() + 1e-4)
    np.testing.assert_allclose(advantages, np.repeat(expected[:, None], 3, axis=1), rtol=1e-5)
    assert advantages[0, 0] == pytest.approx(0.5, abs=0.02)
    assert weighted_value(rewards[0], algorithm) > weighted_value(rewards[1], algorithm)


def test_a_run_weighs_logs_and_evaluates_motion(run_here, server, undisturbed, tmp_path) -> None:
    run_here(tmp_path / "run", server.endpoint, WEIGHTS, "steps=1")
    (line,), first = records(tmp_path / "run"), records(undisturbed)[0]
    assert 0.0 < line["reward/motion"] < 1.0
    assert line["reward/identity"] == first["reward/identity"]  # the samples of the first step do not depend on weights
    assert line["reward"] == pytest.approx(line["reward/identity"] + 0.5 * line["reward/motion"])
    assert line["grad_norm"] != first["grad_norm"]
    document = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert 0.0 < document["components"]["motion"]["before"] <= 1.0


def test_a_weight_of_0_measures_motion_and_trains_as_without(run_here, server, undisturbed, tmp_path) -> None:
    run_here(tmp_path / "run", server.endpoint, "algorithm.reward_weights={identity: 1, motion: 0}", "steps=1")
    (line,), first = records(tmp_path / "run"), records(undisturbed)[0]
    assert line.pop("reward/motion") > 0.0
    assert line == first


def test_rows_that_do_not_move_are_named_before_a_model_is_loaded(run_here, server, person_png, tmp_path) -> None:
    (tmp_path / "metadata.csv").write_text(f"video,prompt\n{person_png},a portrait of a person\n")
    with pytest.raises(ConfigError, match=r"names motion.*person\.png is a still picture; give clips"):
        run_here(tmp_path / "run", server.endpoint, WEIGHTS, f"data.metadata={tmp_path / 'metadata.csv'}")
    assert not (tmp_path / "run").exists()
