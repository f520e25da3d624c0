"""The processes of one run: one alone, or as many as torchrun started, each with a share of every step.

Whoever uses this writes the same lines for one process and for many: alone, every call returns what it was given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as distributed
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from likeness_trainer.errors import ConfigError, RanksDivergedError, TrainerError

T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
"""Tensors are summed over the ranks in pieces of about this size: few messages, and no second copy of everything."""


class ParallelConfig(BaseModel):
    """How a run that torchrun started uses its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Literal["none", "fsdp2"] = "none"
    """`none`: every process holds the whole model. `fsdp2`: each holds its part of the frozen DiTs' weights."""
    timeout_s: float = Field(3600.0, gt=0)
    """Time that a process waits for another one; must exceed reward.give_up_after_s."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Place among the processes of this machine."""
    restarts: int = 0
    """How often torchrun has started the processes anew."""
    sharded: bool = False
    """Whether the DiTs' weights are spread over the ranks, so that all ranks must evaluate them together."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.rank == 0

    def device_of(self, wanted: str) -> str:
        """Returns the device of this rank, one GPU each: `cuda:1` for `auto` or `cuda` on the second of a machine."""
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        return f"cuda:{self.local_rank}" if wanted == "cuda" and distributed.is_initialized() else wanted

    def even_share(self, count: int) -> list[int]:
        """Returns this rank's part of 0 .. count - 1: every world_size-th index, from its own on.

        All ranks get equally many, since a sharded model must be evaluated by all of them: where the count cannot be
        divided, the last index is given out more than once.
        """
        return [min(index, count - 1) for index in range(self.rank, count + -count % self.world_size, self.world_size)]

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_to_first(self, value: T) -> list[T] | None:
        """Returns the values of all ranks on rank 0, None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] | None = [None] * self.world_size if self.is_first else None
        distributed.gather_object(value, values)
        return values  # type: ignore[return-value]

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns on every rank what `make` gives on rank 0; an error of the trainer is raised on every rank."""
        with self.together():
            made = [make() if self.is_first else None]
        if self.world_size > 1:
            distributed.broadcast_object_list(made)
        return made[0]  # type: ignore[return-value]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sum over the ranks of each number, in float64 and in the order of the ranks."""
        return [float(sum(column)) for column in zip(*self.gather(list(numbers)), strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error of the trainer on one rank is raised on all of them, once all have come to the end.

        Other errors are not agreed upon: they end their process, and torchrun ends the rest.
        """
        failure: TrainerError | None = None
        try:
            yield
        except TrainerError as error:
            failure = error
        first = next((error for error in self.gather(failure) if error is not None), None)
        if failure is not None:
            raise failure
        if first is not None:
            raise first

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Adds up the gradients of all ranks, in place; those that no rank has stay None.

        The sum of one bucket is the same bits on every rank. A rank without a gradient adds zero: AdamW moves
        a parameter by its momentum even when the gradient is zero, and not at all when it is None, as in one process.
        """
        if self.world_size == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        distributed.all_reduce(present)
        bucket: list[Tensor] = []
        for parameter, count in zip(parameters, present.tolist(), strict=True):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
                _sum_bucket(bucket)
                bucket = []
        if bucket:
            _sum_bucket(bucket)

    def require_equal(self, value: str, what: str) -> None:
        """Raises RanksDivergedError on every rank when `value` is not the same on all of them; names each one's."""
        values = self.gather(value)
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} has {found[:12]}" for rank, found in enumerate(values))
            raise RanksDivergedError(
                f"{what} differ between the ranks: {listed}. Nothing is saved of this step; go on from the last "
                "checkpoint with --resume, and check that all machines run the same software"
            )

    def mesh(self) -> DeviceMesh:
        """Returns the one-dimensional mesh of all ranks, on their GPUs or, without, on their CPUs."""
        kind = "cuda" if "nccl" in distributed.get_backend_config() else "cpu"
        return init_device_mesh(kind, (self.world_size,))


@contextmanager
def open_ranks(config: ParallelConfig, device: str) -> Iterator[Ranks]:
    """Gives the ranks that torchrun's variables describe, connected; one process alone without them.

    Args:
        device: model.device of the recipe; on GPUs the ranks talk through NCCL, on CPUs through gloo.

    Raises:
        ConfigError: the weights are to be sharded and there is nothing to spread them over, or a GPU is missing.
    """
    if "WORLD_SIZE" not in os.environ:
        if config.sharding != "none":
            raise ConfigError(
                f"parallel.sharding is {config.sharding}, but this run is one process: start it with "
                "`torchrun --nproc-per-node N -m likeness_trainer train ...`, or set parallel.sharding=none"
            )
        yield Ranks()
        return
    ranks = Ranks(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        sharded=config.sharding == "fsdp2",
    )
    _connect(ranks, _backend(device, ranks.local_rank), timedelta(seconds=config.timeout_s))
    yield ranks
    distributed.destroy_process_group()  # not after an error: the others may be gone, and this would wait for them


def _connect(ranks: Ranks, backend: str, timeout: timedelta) -> None:
    """Connects the ranks. torchrun keeps one store over its restarts: without a name of its own, a process that was
    started anew would read the addresses of those that died. Machines count their restarts apart, so with several of
    them the store must be a new one each time (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see docs/scale.md)."""
    store, rank, world_size = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
    attempt = ranks.restarts if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else 0
    named = PrefixStore(f"attempt-{attempt}", store)
    distributed.init_process_group(backend, store=named, rank=rank, world_size=world_size, timeout=timeout)


def _backend(device: str, local_rank: int) -> str:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "gloo"
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"model.device is {device} and this is process {local_rank} of its machine, which shows "
            f"{torch.cuda.device_count()} GPUs; give torchrun --nproc-per-node as many as there are"
        )
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


def _sum_bucket(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
