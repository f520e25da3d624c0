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

ENCODING = "encoding"
"""Phase before the first step: prompts and first frames are encoded."""
ENCODERS = ("text_encoder", "image_encoder")
"""Roles that only this phase needs, and so does the VAE's encoder."""
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
    vae_encoder: int
    """Bytes of the VAE's weights that only encoding needs."""
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
    vae = model.pipe.vae.model
    return ModelBytes(
        {role: sum(parameter.numel() for parameter in own(part)) for role, part in parts.items()},
        {role: size(part) for role, part in parts.items()},
        size(vae.encoder) + size(vae.conv1),
        sum(parameter.numel() for parameter in model.lora_parameters()),
        sum(parameter.nbytes for parameter in model.lora_parameters()),
        max(max(sizes) for sizes in blocks.values()),
        max(size(dit) - sum(blocks[role]) for role, dit in dits.items()),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one GPU and one machine need."""

    parts: dict[str, dict[str, int]]
    """Phase to part to bytes of each GPU."""
    frames_in_flight: int
    """Machine, for each GPU: uint8 frames of all groups, at most; they are kept until their rewards have come."""
    checkpoints_on_host: int
    """Machine, for each GPU: activations that use_gradient_checkpointing_offload moves there."""
    weights_on_host: int
    """Machine, for each GPU: weights loaded there before they are spread, or waiting there for their turn."""

    @property
    def totals(self) -> dict[str, int]:
        """Phase to all bytes of a GPU."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def peak_phase(self) -> str:
        totals = self.totals
        return max(totals, key=lambda phase: totals[phase])

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
    algorithm = config.algorithm
    groups = -(-algorithm.groups_per_step // gpus)
    samples = groups * algorithm.group_size if algorithm.name != "reward_feedback" else 0
    feedback_videos = groups * algorithm.feedback.samples if measured.feedback else 0
    trained = {
        "LoRA": model.adapters,
        "gradients": model.adapters * (1 if measured.feedback is None else 2),
        "optimizer": model.adapters * (2 if config.optimizer.ema_decay is None else 3),
        "latents": samples * measured.trajectory_bytes + groups * measured.conditioning_bytes,
    }
    parts: dict[str, dict[str, int]] = {}
    for phase, working in _working(config, model, measured, gpus).items():
        beside = {"LoRA": model.adapters} if phase == ENCODING else trained
        parts[phase] = {**_weights(config, model, phase, gpus), **beside, "activations": working}
    leaves = config.parallel.sharding == "fsdp2" or config.memory.swap_idle_expert
    return MemoryPlan(
        parts,
        (samples + feedback_videos) * video_bytes,
        max(cost.host_bytes for cost in _backward_costs(measured)),
        sum(model.weights.values()) if leaves else 0,
    )


def _weights(config: TrainConfig, model: ModelBytes, phase: str, gpus: int) -> dict[str, int]:
    """Returns part to bytes of the weights that are on a GPU in a phase."""
    weights = dict(model.weights)
    if config.memory.drop_encoders and phase != ENCODING:
        weights = {role: size for role, size in weights.items() if role not in ENCODERS}
        weights["vae"] -= model.vae_encoder
    experts = {role: weights.pop(role) for role in EXPERTS if role in weights}
    if config.parallel.sharding == "fsdp2":
        spread = {role: -(-size // gpus) for role, size in experts.items()}
        gathered = GATHERED_BLOCKS * model.largest_block + model.outside_blocks
        return {**spread, "gathered": 0 if phase == ENCODING else gathered, **weights}
    if config.memory.swap_idle_expert:
        return {"dit or dit2": 0 if phase == ENCODING else max(experts.values()), **weights}
    return {**experts, **weights}


def _working(config: TrainConfig, model: ModelBytes, measured: Measurement, gpus: int) -> dict[str, int]:
    """Returns phase to what its computation takes at most: activations, graphs, pixels, temporary tensors."""
    working = {ENCODING: measured.encoding.peak_bytes}
    if config.algorithm.name != "reward_feedback":
        held = config.algorithm.branch_batch * measured.trajectory_bytes  # counted among the latents
        working["sampling"] = measured.sampling.peak_bytes - held
        working["decoding"] = measured.decoding.peak_bytes + measured.sampling.kept_bytes - held
        working["update"] = max(cost.peak_bytes for cost in measured.update.values())
    if measured.feedback is not None:
        working["feedback"] = measured.feedback.peak_bytes
    summing = min(model.adapters, BUCKET_BYTES) if gpus > 1 else 0
    working["optimizer"] = max(measured.optimizer.peak_bytes, summing)
    return working


def _backward_costs(measured: Measurement) -> list[Cost]:
    return [*measured.update.values(), *([measured.feedback] if measured.feedback else [])]
