"""The recipe of a run in a cluster: resolved here, read there; and what about it cannot work there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from likeness_trainer.config import TrainConfig, load_config
from likeness_trainer.errors import ConfigError
from likeness_trainer.launch.description import Kind, Launch, RewardAccess, name_of, require_name
from likeness_trainer.launch.pod import CA_FOLDER, CLIENT_FOLDER, TOKEN_FOLDER


def resolve(
    recipe: Path,
    overrides: Sequence[str],
    name: str | None,
    kind: Kind,
    reward_endpoint: str | None,
    access: RewardAccess,
) -> tuple[str, TrainConfig]:
    """Returns the name of the run and its resolved recipe, whose run_dir is /runs/NAME unless an override gives one.

    Args:
        name: of the objects in the cluster; the last part of run_dir when not given.
        access: the recipe names the files of the Secrets that are mounted.

    Raises:
        ConfigError: the recipe, an override or the name is not valid.
    """
    own = [f"reward.endpoint={reward_endpoint}"] if reward_endpoint else []
    own += [f"reward.token_file={TOKEN_FOLDER}/token"] if access.token_secret else []
    own += [f"reward.tls_ca={CA_FOLDER}/ca.crt"] if access.ca_secret else []
    if access.client_secret:
        own += [f"reward.tls_cert={CLIENT_FOLDER}/tls.crt", f"reward.tls_key={CLIENT_FOLDER}/tls.key"]
    config = load_config(recipe, [*own, *overrides])
    name = require_name(name or name_of(config.run_dir, kind), kind)
    if not any(override.partition("=")[0].strip() == "run_dir" for override in overrides):
        config = config.model_copy(update={"run_dir": f"/runs/{name}"})
    return name, config


def require_possible(launch: Launch) -> None:
    """Raises ConfigError for what every pod would refuse at its start, so that no GPU is claimed for it."""
    algorithm, world_size = launch.config.algorithm, launch.placement.world_size
    if algorithm.groups_per_step % world_size:
        raise ConfigError(
            f"algorithm.groups_per_step is {algorithm.groups_per_step}, which {world_size} processes cannot share "
            f"equally; give --set algorithm.groups_per_step=N with a multiple of {world_size}"
        )
    if world_size > 1 and algorithm.name != "policy_gradient":
        raise ConfigError(
            f"algorithm.name is {algorithm.name}, which runs in one process only, not in {world_size}; "
            "choose policy_gradient, or --nodes 1 --gpus-per-node 1"
        )
    if world_size == 1 and launch.config.parallel.sharding != "none":
        raise ConfigError(
            f"parallel.sharding is {launch.config.parallel.sharding}, and one process has nothing to share; "
            "give --gpus-per-node or --set parallel.sharding=none"
        )


def doubts(launch: Launch) -> Iterator[str]:
    """Yields what will probably not work in the cluster, in words; an image of one's own may make it right."""
    config, placement = launch.config, launch.placement
    if launch.runs is None:
        yield "no --runs-claim: the run and its LoRA are lost with the pod"
    elif placement.nodes > 1:
        yield f"the claim {launch.runs.name} must be ReadWriteMany: {placement.nodes} pods mount it"
    if launch.runs is not None and not PurePosixPath("/", config.run_dir).is_relative_to("/runs"):
        yield f"run_dir is {config.run_dir}, which is not below /runs, where --runs-claim is mounted"
    for what, claim, paths in (
        ("models", launch.models, list(_model_paths(config))), ("data", launch.data, list(_data_paths(config)))
    ):  # fmt: skip
        inside = [path for path in paths if PurePosixPath("/", path).is_relative_to(f"/{what}")]
        if inside and claim is None:
            yield f"the recipe reads {inside[0]}, and no --{what}-claim is mounted at /{what}: the image must hold it"
    host = config.reward.endpoint.rpartition(":")[0]
    if host in {"localhost", "127.0.0.1", "[::1]"}:
        yield f"reward.endpoint is {config.reward.endpoint}, the pod itself; name the service with --reward-endpoint"
    if config.reward.token_file is not None and launch.access.token_secret is None:
        yield f"reward.token_file is {config.reward.token_file}, and no --reward-token-secret mounts it"
    if placement.gpus_per_node and config.model.device == "cpu":
        yield f"model.device is cpu, and --gpus-per-node {placement.gpus_per_node} asks for GPUs that would stay idle"


def _model_paths(config: TrainConfig) -> Iterator[str]:
    paths = config.model.model_paths
    for value in paths.values() if isinstance(paths, dict) else [paths] if isinstance(paths, str) else paths:
        yield from [value] if isinstance(value, str) else value
    yield config.model.tokenizer_path
    yield from (lora.path for lora in config.model.base_loras)


def _data_paths(config: TrainConfig) -> Iterator[str]:
    yield str(config.data.metadata)
    if config.evaluation.metadata is not None:
        yield config.evaluation.metadata
