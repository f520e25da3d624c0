"""What is checked before a model is loaded: its files, data, reward server, run folder. Imports no torch model code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from likeness_reward.domain import ServerInfo
from likeness_trainer.config import TrainConfig
from likeness_trainer.data.dataset import Dataset, load_dataset
from likeness_trainer.data.images import IMAGE_SUFFIXES
from likeness_trainer.errors import ConfigError, RunFolderError
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import RewardLink
from likeness_trainer.run.checkpoint import reward_fingerprint_of
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.trackers import require_trackers
from likeness_trainer.wan.model_files import require_base_loras, require_model_files


@dataclass(frozen=True)
class Preflight:
    """What a run starts from."""

    folder: RunFolder
    dataset: Dataset
    held_out: Dataset | None
    """People that are not trained on, or None when the recipe names none."""
    link: RewardLink
    server: ServerInfo
    ranks: Ranks = Ranks()


def check_run(
    config: TrainConfig, resume: bool, accept_other_reward: bool = False, ranks: Ranks | None = None
) -> Preflight:
    """Returns the parts of a run that need no model; nothing is written unless all of them are in order.

    What is wrong on one rank is raised on all of them; only the first rank looks at and writes the run folder.

    Args:
        accept_other_reward: resume although the reward server has other models than those that gave the rewards so far.
        ranks: one process alone when not given.

    Raises:
        ConfigError: the recipe weighs a component that the server does not give, a tracker is not installed, or the
            groups of a step cannot be divided among the ranks.
        ModelLoadError: names every model file that does not exist.
        DatasetError: lists every row that cannot be used.
        RewardUnavailableError, RewardRejectedError: see `RewardLink.connect`.
        RunFolderError: the run folder holds another run, or none to resume, or one that other models rewarded.
    """
    path, ranks = Path(config.run_dir), ranks or Ranks()
    with ranks.together():
        if ranks.is_first:
            RunFolder.check(path, resume)
        require_equal_parts(config, ranks.world_size)
        require_trackers(config.tracking)
        require_model_files(config.model.model_paths, config.model.tokenizer_path)
        require_base_loras([lora.path for lora in config.model.base_loras])
        dataset = load_dataset(config.data)
        held_out = load_held_out(config)
        if config.algorithm.measures_motion:
            _require_clips(config, dataset, held_out)
        link = RewardLink(config.reward, config.algorithm.measures_motion)
        server = link.connect()
        link.require_capacity(config.algorithm.branch_batch)
        if config.algorithm.name != "policy_gradient":
            link.require_gradients(server)
        _require_components(config, server)
    with ranks.together():
        folder = _open_folder(path, config, resume, server, accept_other_reward) if ranks.is_first else RunFolder(path)
    return Preflight(folder, dataset, held_out, link, server, ranks)


def resumes(config: TrainConfig, asked: bool, ranks: Ranks) -> bool:
    """Returns whether a run goes on where it was: when asked to, and by itself when torchrun started it anew."""
    begun = RunFolder(Path(config.run_dir)).config_file
    restarted = max(ranks.gather(ranks.restarts)) > 0
    return ranks.from_first(lambda: asked or (restarted and begun.is_file()))


def _open_folder(
    path: Path, config: TrainConfig, resume: bool, server: ServerInfo, accept_other_reward: bool
) -> RunFolder:
    rewarded_by_others = resume and _rewarded_by_others(RunFolder.existing(path), server, accept_other_reward)
    folder = RunFolder.resume(path, config) if resume else RunFolder.create(path, config)
    if rewarded_by_others:
        folder.forget_evaluation()
    return folder


def require_equal_parts(config: TrainConfig, world_size: int) -> None:
    """Raises ConfigError where so many processes cannot share a run's steps."""
    groups = config.algorithm.groups_per_step
    if groups % world_size:
        raise ConfigError(
            f"algorithm.groups_per_step is {groups}, which {world_size} ranks cannot share equally; "
            f"choose a multiple of {world_size}"
        )


def _require_components(config: TrainConfig, server: ServerInfo) -> None:
    unknown = [name for name in config.algorithm.reward_weights if name not in server.component_names]
    if unknown:
        raise ConfigError(
            f"algorithm.reward_weights names {', '.join(unknown)}; the reward server at {config.reward.endpoint} gives "
            f"{', '.join(server.component_names)}"
        )


def _require_clips(config: TrainConfig, *datasets: Dataset | None) -> None:
    """Raises ConfigError naming the rows whose video is a still picture, which has no motion to compare with."""
    rows = [row for dataset in datasets if dataset is not None for row in dataset.rows]
    still = [str(row.video) for row in rows if row.video.suffix.lower() in IMAGE_SUFFIXES]
    if still:
        shown = ", ".join(still[:5]) + (f" and {len(still) - 5} more" if len(still) > 5 else "")
        raise ConfigError(
            f"algorithm.reward_weights names motion, which is measured against the row's clip, but {shown} "
            f"{'is a still picture' if len(still) == 1 else 'are still pictures'}; give clips, or leave motion out"
        )


def _rewarded_by_others(folder: RunFolder, server: ServerInfo, accept: bool) -> bool:
    """Returns whether other models gave the rewards so far; raises RunFolderError where that is not accepted."""
    latest = folder.latest_checkpoint()
    before = server.model_fingerprint if latest is None else reward_fingerprint_of(latest)
    if before == server.model_fingerprint:
        return False
    if not accept:
        raise RunFolderError(
            f"{folder.path} was rewarded by models {before}, the reward server has {server.model_fingerprint}: rewards "
            "before and after cannot be compared. Serve the same face pack, or resume with --accept-other-reward"
        )
    return True


def load_held_out(config: TrainConfig) -> Dataset | None:
    """Returns the held-out people, or None when the recipe names none."""
    if config.evaluation.metadata is None:
        return None
    return load_dataset(config.data.model_copy(update={"metadata": Path(config.evaluation.metadata)}))
