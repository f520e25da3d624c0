"""The weight of the divergence follows a target."""

import pytest

from likeness_trainer.learn.kl_controller import adapted_kl_weight


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.02, 1.0), (0.021, 1.005), (0.019, 0.995), (5.0, 1.02), (0.0, 0.98), (0.024, 1.02)]
)
def test_the_weight_moves_in_proportion_and_at_most_2_percent(kl: float, factor: float) -> None:
    assert adapted_kl_weight(0.5, kl, target=0.02) == pytest.approx(0.5 * factor)


def test_the_divergence_of_a_policy_that_yields_to_the_weight_settles_at_the_target() -> None:
    weight, kl = 1.0, 0.0
    for _ in range(1000):
        kl = 0.01 / weight
        weight = adapted_kl_weight(weight, kl, target=0.05)
    assert kl == pytest.approx(0.05, rel=1e-3)
