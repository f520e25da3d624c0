"""Which steps of the chain one iteration samples with noise and trains: all of the window, or one drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from likeness_trainer.learn.policy_gradient import WindowKind
from likeness_trainer.learn.seeds import derive_seed
from likeness_trainer.wan.scheduler import EulerSchedule


@dataclass(frozen=True)
class Window:
    """The steps of one iteration. The branches of a group part at the first stochastic step."""

    stochastic: tuple[int, ...]
    """Consecutive steps that add noise and so carry a policy gradient."""
    trained: tuple[int, ...]
    """Steps of the update: the stochastic ones first, then those that carry the divergence from the base only."""

    @property
    def start(self) -> int:
        """First step that the samples of a group do not share."""
        return self.stochastic[0]


def whole_window(schedule: EulerSchedule) -> Window:
    """Returns every stochastic step of the configured window, and its deterministic last step for the divergence."""
    return Window(tuple(schedule.stochastic_steps), tuple(schedule.window))


def windows_of(schedule: EulerSchedule, kind: WindowKind) -> list[Window]:
    """Returns the windows that an iteration can have, all equally likely.

    `all`: one, see `whole_window`. `one`: one for each stochastic step.
    """
    if kind == "all":
        return [whole_window(schedule)]
    return [Window((step,), (step,)) for step in schedule.stochastic_steps]


def window_of(schedule: EulerSchedule, kind: WindowKind, seed: int, step: int) -> Window:
    """Returns the window of a training step; the same on every rank and in a resumed run.

    `all`: see `whole_window`. `one`: one stochastic step, drawn uniformly; the other steps are deterministic, those
    before it are shared by the group, and the update evaluates this step only (mixed ODE and SDE sampling, as in
    MixGRPO, arXiv 2507.21802).

    Args:
        seed: seed of the run.
        step: 0-based training step.
    """
    windows = windows_of(schedule, kind)
    if len(windows) == 1:
        return windows[0]
    return windows[int(np.random.default_rng(derive_seed(seed, "window", step)).integers(len(windows)))]
