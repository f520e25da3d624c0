"""From rollouts to what the learner gets: groups dropped, without variance, not finite; the deviation of a batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from likeness_reward.domain import FaceObservation, FrameScore, RewardComponent, Verdict, VideoReward
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import GroupDroppedError
from likeness_trainer.train import Rollout, collect_rewards, reward_metrics, scored_trajectories, share_rewards

CPU = torch.device("cpu")


def config(**algorithm: Any) -> Any:
    settings = PolicyGradientConfig(**algorithm)
    return SimpleNamespace(algorithm=settings, reward=SimpleNamespace(no_face_value=0.0))


def rollout(row: int, values: list[float] | None, fault: str | None = None) -> Any:
    """A group of videos of one latent frame; without values its rewards never came."""

    def results() -> list[VideoReward]:
        if values is None:
            raise GroupDroppedError("video 0 was not scored")
        frame = FaceObservation(Verdict.EMBEDDED, 1, None)
        return [
            VideoReward(v, (RewardComponent("identity", v, 1.0),), 1, 1, "f", (FrameScore(0, v, frame),))
            for v in values
        ]

    trajectory: Any = SimpleNamespace(samples=range(len(values or [])))
    prompt: Any = SimpleNamespace(row=row, conditioning=torch.zeros(1))
    group: Any = SimpleNamespace(results=results)
    return Rollout(row, prompt, group, [trajectory], None, fault)


def test_groups_without_rewards_are_dropped_and_the_others_go_on() -> None:
    groups, fault = collect_rewards([rollout(1, [0.1, 0.3]), rollout(2, None)], config())
    assert [group.rollout.prompt.row for group in groups] == [1]
    assert fault is None


def test_what_is_not_finite_is_named_by_its_row_and_keeps_out_of_the_metrics() -> None:
    nan = float("nan")
    groups, fault = collect_rewards([rollout(1, [0.1, 0.3]), rollout(7, [0.1, nan])], config())
    assert fault == "the reward component identity of row 7 is not finite"
    assert reward_metrics([group.rewards for group in groups], config().algorithm)["reward"] == 0.2
    _, fault = collect_rewards([rollout(3, [0.1, 0.3], fault="row 3: no pixels"), rollout(7, [0.1, nan])], config())
    assert fault == "row 3: no pixels"


def test_groups_of_equal_rewards_are_counted_and_left_out() -> None:
    groups, fault = collect_rewards([rollout(1, [0.4, 0.4]), rollout(2, [0.1, 0.3])], config())
    shared = share_rewards(groups, fault, config().algorithm, Ranks())
    batches, without_variance = scored_trajectories(groups, shared, config().algorithm, CPU)
    assert without_variance == 1
    assert len(batches) == 1
    np.testing.assert_allclose(batches[0].advantages.flatten(), [-0.1 / 0.1001, 0.1 / 0.1001], rtol=1e-5)


def test_the_deviation_of_the_batch_keeps_small_differences_small() -> None:
    settings = config(scale="batch")
    groups, fault = collect_rewards([rollout(1, [0.40, 0.41]), rollout(2, [0.0, 1.0])], settings)
    shared = share_rewards(groups, fault, settings.algorithm, Ranks())
    (narrow, wide), _ = scored_trajectories(groups, shared, settings.algorithm, CPU)
    std = np.std([0.40, 0.41, 0.0, 1.0])
    np.testing.assert_allclose(narrow.advantages.flatten(), np.array([-0.005, 0.005]) / (std + 1e-4), rtol=1e-5)
    np.testing.assert_allclose(wide.advantages.flatten(), np.array([-0.5, 0.5]) / (std + 1e-4), rtol=1e-5)


def test_a_step_without_any_reward_has_metrics_too() -> None:
    assert reward_metrics([], config().algorithm)["reward"] is None
