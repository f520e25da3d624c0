"""What is checked before any model is loaded: data, reward server, run folder. Imports no torch model code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from likeness_reward.domain import ServerInfo
from likeness_trainer.config import TrainConfig
from likeness_trainer.data.dataset import Dataset, load_dataset
from likeness_trainer.reward_link import RewardLink
from likeness_trainer.run.folder import RunFolder


@dataclass(frozen=True)
class Preflight:
    """What a run starts from."""

    folder: RunFolder
    dataset: Dataset
    held_out: Dataset | None
    """People that are not trained on, or None when the recipe names none."""
    link: RewardLink
    server: ServerInfo


def check_run(config: TrainConfig, resume: bool) -> Preflight:
    """Returns the parts of a run that need no model; nothing is written unless all of them are in order.

    Raises:
        DatasetError: lists every row that cannot be used.
        RewardUnavailableError, RewardRejectedError: see `RewardLink.connect`.
        RunFolderError: the run folder holds another run, or none to resume.
    """
    path = Path(config.run_dir)
    RunFolder.check(path, resume)
    dataset = load_dataset(config.data)
    held_out = load_held_out(config)
    link = RewardLink(config.reward)
    server = link.connect()
    link.require_capacity(config.algorithm.branch_batch)
    folder = RunFolder.resume(path, config) if resume else RunFolder.create(path, config)
    return Preflight(folder, dataset, held_out, link, server)


def load_held_out(config: TrainConfig) -> Dataset | None:
    """Returns the held-out people, or None when the recipe names none."""
    if config.evaluation.metadata is None:
        return None
    return load_dataset(config.data.model_copy(update={"metadata": Path(config.evaluation.metadata)}))
