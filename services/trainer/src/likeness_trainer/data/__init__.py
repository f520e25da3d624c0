"""Training data: a metadata file of videos and prompts, checked before any model is loaded."""

from likeness_trainer.data.dataset import DataConfig, Dataset, VideoExample, check, load_dataset
from likeness_trainer.data.errors import DatasetError, RowProblem, UnusableMediaError

__all__ = [
    "DataConfig",
    "Dataset",
    "DatasetError",
    "RowProblem",
    "UnusableMediaError",
    "VideoExample",
    "check",
    "load_dataset",
]
