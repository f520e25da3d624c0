"""Bytes of a GPU and of the machine that a run needs, by part and by phase of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from likeness_trainer.config import TrainConfig
from likeness_trainer.planning.measure import Cost, Measurement
from likeness_trainer.planning.meta_model import parts_of
from likeness_trainer.ranks import BUCKET_BYTES
from likeness_trainer.wan.model_config import EXPERTS
from likeness_trainer.wan.module import WanModule

GATHERED_BLOCKS = 3
"""Whole blocks of a sharded DiT that are there at once: the one that is computed, the next one, which FSDP2 gathers
meanwhile, and the buffer of the gathering before."""


@dataclass(frozen=True)
class ModelBytes:
    """What the weights of a model take."""

    parameters: dict[str, int]
    """Role to number of parameters, adapters left out."""
    weights: dict[str, int]
    """Role to bytes."""
    adapter_parameters: int
    adapters: int
    """Bytes of all adapters, float32."""
    largest_block: int
    """Bytes of the largest block of a DiT."""
    outside_blocks: int
    """Bytes of the largest rest of a DiT, what is in no block."""


def model_bytes(model: WanModule) -> ModelBytes:
    """Returns the bytes of a model's weights; those of the adapters apart."""
    adapters = {id(parameter) for parameter in model.lora_parameters()}

    def own(part: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in part.parameters() if id(parameter) not in adapters]

    def size(part: nn.Module) -> int:
        return sum(parameter.nbytes for parameter in own(part))

    parts = parts_of(model)
    dits = {role: part for role, part in parts.items() if role in EXPERTS}
    blocks = {role: [size(block) for block in dit.get_submodule("blocks").children()] for role, dit in dits.items()}
    return ModelBytes(
        {role: sum(parameter.numel() for parameter in own(part)) for role, part in parts.items()},
        {role: size(part) for role, part in parts.items()},
        sum(parameter.numel() for parameter in model.lora_parameters()),
        sum(parameter.nbytes for parameter in model.lora_parameters()),
        max(max(sizes) for sizes in blocks.values()),
        max(size(dit) - sum(blocks[role]) for role, dit in dits.items()),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one GPU and one machine need."""

    weights: dict[str, int]
    """Role to bytes on each GPU: with sharding each its part of the DiTs."""
    gathered: int
    """Blocks of sharded DiTs that are whole for a moment."""
    adapters: int
    gradients: int
    optimizer: int
    """AdamW's two moments, and the average of the adapters where one is kept."""
    latents: int
    """Trajectories of all samples of this GPU's groups, and what the DiT is told about each."""
    working: dict[str, int]
    """Phase to what its computation takes at most, beside all of the above: activations, graphs, pixels."""
    frames_in_flight: int
    """Machine, for each GPU: uint8 frames of all groups, at most; they are kept until their rewards have come."""
    checkpoints_on_host: int
    """Machine, for each GPU: activations that use_gradient_checkpointing_offload moves there."""
    loading: int
    """Machine, for each GPU: weights that a sharded model is loaded into before they are spread; 0 without sharding."""

    @property
    def resident(self) -> int:
        """Bytes that are there in every phase of a step."""
        weights = sum(self.weights.values()) + self.gathered
        return weights + self.adapters + self.gradients + self.optimizer + self.latents

    @property
    def totals(self) -> dict[str, int]:
        """Phase to all bytes of a GPU. Encoding is done before there are gradients, moments and latents."""
        first = sum(self.weights.values()) + self.adapters
        return {name: size + (first if name == "encoding" else self.resident) for name, size in self.working.items()}

    @property
    def peak_phase(self) -> str:
        totals = self.totals
        return max(totals, key=lambda name: totals[name])

    @property
    def peak(self) -> int:
        """Bytes that one GPU needs."""
        return self.totals[self.peak_phase]


def memory_plan(
    config: TrainConfig, model: ModelBytes, measured: Measurement, video_bytes: int, gpus: int
) -> MemoryPlan:
    """Returns what each of `gpus` GPUs needs.

    Args:
        video_bytes: of the uint8 frames of one video.
    """
    algorithm, sharded = config.algorithm, config.parallel.sharding == "fsdp2"
    groups = -(-algorithm.groups_per_step // gpus)
    samples = groups * algorithm.group_size if algorithm.name != "reward_feedback" else 0
    weights = {role: -(-size // gpus) if sharded and role in EXPERTS else size for role, size in model.weights.items()}
    return MemoryPlan(
        weights,
        GATHERED_BLOCKS * model.largest_block + model.outside_blocks if sharded else 0,
        model.adapters,
        model.adapters * (1 if measured.feedback is None else 2),
        model.adapters * (2 if config.optimizer.ema_decay is None else 3),
        samples * measured.trajectory_bytes + groups * measured.conditioning_bytes,
        _working(config, measured, gpus),
        (groups * algorithm.feedback.samples if measured.feedback else 0) * video_bytes + samples * video_bytes,
        max(cost.host_bytes for cost in _costs(measured)),
        sum(model.weights.values()) if sharded else 0,
    )


def _working(config: TrainConfig, measured: Measurement, gpus: int) -> dict[str, int]:
    working = {"encoding": measured.encoding.peak_bytes}
    batch = config.algorithm.branch_batch
    if config.algorithm.name != "reward_feedback":
        held = batch * measured.trajectory_bytes  # counted among the latents
        working["sampling"] = measured.sampling.peak_bytes - held
        working["decoding"] = measured.decoding.peak_bytes + measured.sampling.kept_bytes - held
        working["update"] = max(cost.peak_bytes for cost in measured.update.values())
    if measured.feedback is not None:
        working["feedback"] = measured.feedback.peak_bytes
    summing = 2 * BUCKET_BYTES if gpus > 1 else 0
    working["optimizer"] = max(measured.optimizer.peak_bytes, summing)
    return working


def _costs(measured: Measurement) -> list[Cost]:
    return [*measured.update.values(), *([measured.feedback] if measured.feedback else [])]
