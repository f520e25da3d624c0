"""The recipe of a run in a cluster: resolved here, read there; and what about it cannot work there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from likeness_trainer.config import TrainConfig, load_config
from likeness_trainer.launch.manifests import TOKEN_FILE, Launch, name_of


def resolve(
    recipe: Path, overrides: Sequence[str], name: str | None, reward_endpoint: str | None, token: bool
) -> tuple[str, TrainConfig]:
    """Returns the name of the run and its resolved recipe, whose run_dir is /runs/NAME unless an override gives one.

    Args:
        name: of the objects in the cluster; the last part of run_dir when not given.
        token: whether a Secret with the reward service's token is mounted.

    Raises:
        ConfigError: the recipe or an override is not valid.
    """
    own = [f"reward.endpoint={reward_endpoint}"] if reward_endpoint else []
    own += [f"reward.token_file={TOKEN_FILE}"] if token else []
    config = load_config(recipe, [*own, *overrides])
    name = name or name_of(config.run_dir)
    if not any(override.partition("=")[0].strip() == "run_dir" for override in overrides):
        config = config.model_copy(update={"run_dir": f"/runs/{name}"})
    return name, config


def doubts(launch: Launch) -> Iterator[str]:
    """Yields what will probably not work in the cluster, in words; an image of one's own may make it right."""
    config, placement = launch.config, launch.placement
    if launch.runs is None:
        yield "no --runs-claim: the run and its LoRA are lost with the pod"
    elif placement.nodes > 1:
        yield f"the claim {launch.runs.name} must be ReadWriteMany: {placement.nodes} pods mount it"
    for what, claim, paths in (
        ("models", launch.models, list(_model_paths(config))), ("data", launch.data, list(_data_paths(config)))
    ):  # fmt: skip
        inside = [path for path in paths if PurePosixPath("/", path).is_relative_to(f"/{what}")]
        if inside and claim is None:
            yield f"the recipe reads {inside[0]}, and no --{what}-claim is mounted at /{what}: the image must hold it"
    host = config.reward.endpoint.rpartition(":")[0]
    if host in {"localhost", "127.0.0.1", "[::1]"}:
        yield f"reward.endpoint is {config.reward.endpoint}, the pod itself; name the service with --reward-endpoint"
    if config.reward.token_file is not None and launch.token_secret is None:
        yield f"reward.token_file is {config.reward.token_file}, and no --reward-token-secret mounts it"
    groups = config.algorithm.groups_per_step
    if groups % placement.world_size:
        yield (
            f"algorithm.groups_per_step is {groups}, which {placement.world_size} processes cannot share equally; "
            f"set a multiple of {placement.world_size}"
        )
    if placement.gpus_per_node and config.model.device == "cpu":
        yield f"model.device is cpu, and --gpus-per-node {placement.gpus_per_node} asks for GPUs that would stay idle"


def _model_paths(config: TrainConfig) -> Iterator[str]:
    paths = config.model.model_paths
    for value in paths.values() if isinstance(paths, dict) else [paths] if isinstance(paths, str) else paths:
        yield from [value] if isinstance(value, str) else value
    yield config.model.tokenizer_path


def _data_paths(config: TrainConfig) -> Iterator[str]:
    yield str(config.data.metadata)
    if config.evaluation.metadata is not None:
        yield config.evaluation.metadata
