"""The trainer's command line with two faults in it, wherever the groups are computed: run it in place of the package.

Step 1 loses the rewards of its group 1; in step 2 the frames of group 3 are not finite. On two ranks both groups
belong to rank 1, which then has less to learn from than rank 0.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

LOST, NOT_FINITE = (0, 1), (1, 3)
"""(0-based step, place of the group among those of the step)."""


class _Lost:
    """A group whose videos were scored, and one of them in vain."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.latency_s = 0.0

    def results(self) -> Any:
        from likeness_trainer.reward_link import GroupDroppedError

        self._group.results()
        raise GroupDroppedError("video 0 was not scored")


def disturbed() -> Any:
    """Returns the patch, which works inside a `with` block."""
    from likeness_trainer import train

    roll_out, send_decoded = train.roll_out, train.send_decoded

    def disturbed_roll_out(config: Any, step: int, place: int, *rest: Any) -> Any:
        if (step, place) == NOT_FINITE:
            with mock.patch.object(train, "send_decoded", _spoiled(send_decoded)):
                return roll_out(config, step, place, *rest)
        rollout = roll_out(config, step, place, *rest)
        return replace(rollout, group=_Lost(rollout.group)) if (step, place) == LOST else rollout

    return mock.patch.object(train, "roll_out", disturbed_roll_out)


def _spoiled(send_decoded: Any) -> Any:
    return lambda model, latents, *rest: send_decoded(model, latents * float("nan"), *rest)


if __name__ == "__main__":
    from likeness_trainer.cli import main

    with disturbed():
        main()
