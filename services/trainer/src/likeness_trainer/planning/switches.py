"""Settings that make a run need less memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from likeness_trainer.config import TrainConfig, parse_config, set_dotted
from likeness_trainer.planning.meta_model import largest_size

FEWER_FRAMES = (49, 33, 17)
SIDE_MULTIPLE = 32
"""All Wan models take sides that are multiples of it."""


@dataclass(frozen=True)
class Switch:
    """Settings that belong together."""

    settings: tuple[str, ...]
    """As `--set` takes them."""
    costs: str
    """What is paid for it, in words."""


def with_settings(config: TrainConfig, settings: Sequence[str]) -> TrainConfig:
    """Returns a recipe with settings as `--set` takes them."""
    tree = config.model_dump(mode="json")
    for setting in settings:
        key, _, value = setting.partition("=")
        set_dotted(tree, key, value, "switch")
    return parse_config(tree)


def harmless_switches(config: TrainConfig, gpus: int, two_experts: bool) -> list[Switch]:
    """Returns the switches that are not thrown in a recipe and leave its samples as they are."""
    found = []
    if not config.memory.drop_encoders:
        found.append(Switch(("memory.drop_encoders=true",), "nothing"))
    if gpus > 1 and config.parallel.sharding == "none" and not config.memory.swap_idle_expert:
        found.append(Switch(("parallel.sharding=fsdp2",), "blocks travel between the GPUs at every evaluation"))
    checkpointing = "model.use_gradient_checkpointing=true"
    if not config.model.use_gradient_checkpointing:
        found.append(Switch((checkpointing,), "blocks are computed once more in the backward pass"))
    if config.algorithm.branch_batch > 1:
        found.append(Switch(("algorithm.branch_batch=1",), "one evaluation for each sample"))
    if gpus == 1 and not config.memory.swap_idle_expert and two_experts:
        found.append(Switch(("memory.swap_idle_expert=true",), "experts travel from the memory of the machine in turn"))
    if not config.model.use_gradient_checkpointing_offload:
        offload = (checkpointing, "model.use_gradient_checkpointing_offload=true")
        found.append(Switch(offload, "checkpoints travel to the memory of the machine and back"))
    return found


def lossy_switches(config: TrainConfig) -> list[Switch]:
    """Returns switches that make the videos shorter or smaller, the smallest change first."""
    found = [
        Switch((f"data.num_frames={frames}",), "shorter videos")
        for frames in FEWER_FRAMES
        if frames < config.data.num_frames
    ]
    height, width = (smaller(side) for side in largest_size(config.data))
    if min(height, width) >= 2 * SIDE_MULTIPLE:
        if config.data.height is None:
            found.append(Switch((f"data.max_pixels={height * width}",), "smaller videos"))
        else:
            found.append(Switch((f"data.height={height}", f"data.width={width}"), "smaller videos"))
    return found


def smaller(side: int) -> int:
    """Returns a side of about half the area: divided by the root of 2, down to a multiple of 32."""
    return int(side / math.sqrt(2.0)) // SIDE_MULTIPLE * SIDE_MULTIPLE
