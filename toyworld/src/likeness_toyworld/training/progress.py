"""A line of progress for the training scripts."""

import time


class Progress:
    """Prints step, smoothed values, seconds a step and time left, every `every` steps."""

    def __init__(self, name: str, steps: int, every: int = 100) -> None:
        self._name, self._steps, self._every = name, steps, every
        self._started = time.monotonic()
        self._smooth: dict[str, float] = {}

    def update(self, step: int, **values: float) -> None:
        """Take the values of step 1, 2, ..., steps into the running means; print now and then."""
        keep = min(0.98, (step - 1) / step)
        for key, value in values.items():
            self._smooth[key] = keep * self._smooth.get(key, 0.0) + (1 - keep) * value
        if step % self._every and step != self._steps:
            return
        each = (time.monotonic() - self._started) / step
        shown = "  ".join(f"{key} {value:.4f}" for key, value in self._smooth.items())
        left = each * (self._steps - step)
        print(f"{self._name} {step}/{self._steps}  {shown}  {each:.3f} s/step  {left / 60:.1f} min left", flush=True)
