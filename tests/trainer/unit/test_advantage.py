"""Advantages by hand."""

import numpy as np
import pytest

from likeness_trainer.learn.advantage import group_advantages, latent_frame_of, latent_frame_scores


def test_latent_frame_0_is_pixel_frame_0_and_the_others_carry_four() -> None:
    assert latent_frame_of(9).tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_scores_of_a_latent_frame_are_means_of_its_pixel_frames() -> None:
    scores = np.array([[1.0, 0.0, 0.2, 0.4, 0.6, 1.0, 1.0, 0.0, 0.0]])
    np.testing.assert_allclose(latent_frame_scores(scores), [[1.0, 0.3, 0.5]])


def test_advantages_are_standard_scores() -> None:
    advantages = group_advantages(np.array([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(advantages, np.array([-0.1, 0.0, 0.1]) / (np.std([0.1, 0.2, 0.3]) + 1e-4), atol=1e-12)


def test_equal_rewards_give_exactly_zero() -> None:
    value = 0.1 + 0.2  # a mean of equal floats need not equal them bit for bit
    assert group_advantages(np.full(7, value)).tolist() == [0.0] * 7


def test_each_latent_frame_is_compared_with_itself_only() -> None:
    scores = np.array([[0.0, 0.9], [1.0, 0.1]])
    assert np.sign(group_advantages(scores)).tolist() == [[-1, 1], [1, -1]]


def test_advantages_are_clipped() -> None:
    assert group_advantages(np.array([0.0] * 99 + [1.0]), clip=3.0).max() == 3.0


@pytest.mark.parametrize(("scores", "message"), [([0.5], "at least 2"), ([0.1, float("nan")], "finite")])
def test_what_cannot_be_compared_is_refused(scores: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(np.array(scores))


def test_leaving_the_sample_out_compares_it_with_the_mean_of_the_others() -> None:
    scores = np.array([0.1, 0.5, 0.3, 0.9])
    others = np.array([np.delete(scores, index).mean() for index in range(4)])
    advantages = group_advantages(scores, baseline="leave_one_out", std=np.array(1.0))
    np.testing.assert_allclose(advantages, (scores - others) / (1.0 + 1e-4))


def test_a_given_deviation_keeps_the_sizes_of_groups_apart() -> None:
    narrow, wide = np.array([[0.50], [0.51]]), np.array([[0.0], [1.0]])
    std = np.concatenate([narrow, wide]).std(axis=0)
    assert group_advantages(narrow, std=std)[1] == pytest.approx(group_advantages(wide, std=std)[1] / 100)
    assert group_advantages(narrow)[1] == pytest.approx(group_advantages(wide)[1], rel=0.05)
