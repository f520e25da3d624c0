"""Components of the reward: compared one by one, then weighted; by video or by latent frame."""

import numpy as np
import pytest

from likeness_reward.domain import FaceObservation, FrameScore, RewardComponent, Verdict, VideoReward
from likeness_trainer.learn.credit import (
    batch_deviations,
    group_scores,
    non_finite_component,
    weighted_advantages,
    weighted_value,
)
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig


def reward(similarities: list[float | None], motion: float = 0.0) -> VideoReward:
    """A reward of 5 frames: latent frame 0 is frame 0, latent frame 1 the other four."""
    seen = [value for value in similarities if value is not None]
    frames = tuple(
        FrameScore(index, value, FaceObservation(Verdict.NO_FACE if value is None else Verdict.EMBEDDED, 1, None))
        for index, value in enumerate(similarities)
    )
    identity, coverage = sum(seen) / len(similarities), len(seen) / len(similarities)
    components = (
        RewardComponent("identity", identity, 1.0), RewardComponent("coverage", coverage, 0.0),
        RewardComponent("motion", motion, 0.0),
    )  # fmt: skip
    return VideoReward(identity, components, len(similarities), len(seen), "f", frames)


GROUP = [reward([0.9, 0.1, 0.1, None, None], motion=100.0), reward([0.1, 0.9, 0.9, 0.9, 0.9], motion=300.0)]


def test_latent_frames_get_the_scores_of_their_own_frames() -> None:
    scores = group_scores(GROUP, PolicyGradientConfig(reward_weights={"identity": 1.0, "coverage": 1.0}), -0.2)
    np.testing.assert_allclose(scores["identity"], [[0.9, (0.1 + 0.1 - 0.2 - 0.2) / 4], [0.1, 0.9]])
    np.testing.assert_allclose(scores["coverage"], [[1.0, 0.5], [1.0, 1.0]])


def test_a_component_of_the_whole_video_counts_in_every_latent_frame() -> None:
    scores = group_scores(GROUP, PolicyGradientConfig(reward_weights={"motion": 1.0}), 0.0)
    np.testing.assert_array_equal(scores["motion"], [[100.0, 100.0], [300.0, 300.0]])


def test_credit_to_videos_gives_every_latent_frame_the_advantage_of_the_video() -> None:
    config = PolicyGradientConfig(credit="video")
    advantages = weighted_advantages(group_scores(GROUP, config, 0.0), config)
    assert advantages[0, 0] == advantages[0, 1] < 0 < advantages[1, 0] == advantages[1, 1]


def test_each_component_is_normalised_before_it_is_weighted() -> None:
    """Motion is a thousand times larger than identity; what counts are the weights."""
    alone = {
        name: weighted_advantages(group_scores(GROUP, config, 0.0), config)
        for name in ("identity", "motion")
        for config in [PolicyGradientConfig(reward_weights={name: 1.0})]
    }
    config = PolicyGradientConfig(reward_weights={"identity": 1.0, "motion": 0.25})
    both = weighted_advantages(group_scores(GROUP, config, 0.0), config)
    np.testing.assert_allclose(both, alone["identity"] + 0.25 * alone["motion"], rtol=1e-6)


def test_a_component_without_weight_is_left_out() -> None:
    config = PolicyGradientConfig(reward_weights={"identity": 1.0, "motion": 0.0})
    assert list(group_scores(GROUP, config, 0.0)) == ["identity"]


def test_the_value_of_a_video_is_the_weighted_sum() -> None:
    config = PolicyGradientConfig(reward_weights={"coverage": 2.0, "motion": 0.01})
    assert weighted_value(GROUP[0], config) == pytest.approx(2.0 * 0.6 + 0.01 * 100.0)


def test_a_component_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="beauty"):
        group_scores(GROUP, PolicyGradientConfig(reward_weights={"beauty": 1.0}), 0.0)


def test_a_component_that_is_not_finite_is_named() -> None:
    config = PolicyGradientConfig(reward_weights={"identity": 1.0, "motion": 1.0})
    assert non_finite_component(group_scores(GROUP, config, 0.0)) is None
    broken = [GROUP[0], reward([0.1] * 5, motion=float("nan"))]
    assert non_finite_component(group_scores(broken, config, 0.0)) == "motion"


def test_the_deviation_of_a_batch_is_that_of_all_its_samples() -> None:
    groups = [{"motion": np.array([[1.0], [2.0]])}, {"motion": np.array([[5.0], [8.0]])}]
    assert batch_deviations(groups)["motion"] == pytest.approx([np.std([1, 2, 5, 8])])
