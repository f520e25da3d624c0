"""The weight of the divergence from the base, adapted so that the divergence stays near a target."""

from __future__ import annotations

GAIN = 0.1
MAX_ERROR = 0.2


def adapted_kl_weight(weight: float, kl: float, target: float) -> float:
    """Returns the weight for the next step: ``beta (1 + 0.1 e)`` with ``e = clip(KL / target - 1, -0.2, 0.2)``.

    A proportional controller in log-space (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): at most 2 % a step, so
    that the noise of one step's KL does not swing the objective.
    """
    error = max(-MAX_ERROR, min(MAX_ERROR, kl / target - 1.0))
    return weight * (1.0 + GAIN * error)
