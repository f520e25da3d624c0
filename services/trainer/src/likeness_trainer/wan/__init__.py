"""Wan models: loading, sampling chain, decoding and LoRA; `WanTrainingModule` ties them to a reward."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from likeness_trainer.learn.training_module import WanTrainingModule

__all__ = ["WanTrainingModule"]


def __getattr__(name: str) -> Any:
    """Loads WanTrainingModule on first use, because importing DiffSynth takes seconds that `--help` does not need."""
    if name == "WanTrainingModule":
        from likeness_trainer.learn.training_module import WanTrainingModule

        return WanTrainingModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
