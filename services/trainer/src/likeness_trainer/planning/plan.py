"""The plan of a run: what its recipe needs of GPUs and of time, before there are weights or a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from likeness_trainer.config import TrainConfig
from likeness_trainer.planning.measure import Measurement, Say, measure
from likeness_trainer.planning.memory import MemoryPlan, ModelBytes, memory_plan, model_bytes
from likeness_trainer.planning.meta_model import largest_size, meta_module
from likeness_trainer.planning.switches import Switch, harmless_switches, lossy_switches, with_settings
from likeness_trainer.planning.work import PhaseWork, Savings, savings, step_work
from likeness_trainer.preflight import require_equal_parts
from likeness_trainer.wan.module import WanModule

GPU_COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of GPUs that are looked at for the smallest that is enough."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a run is planned for."""

    count: int
    memory_bytes: int
    """Of each."""
    reserve_bytes: int
    """Of each, for what cannot be computed: the CUDA context, workspaces of kernels, fragmentation."""

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True)
class Video:
    """What is sampled."""

    num_frames: int
    height: int
    width: int
    latent_shape: tuple[int, int, int, int]
    """C, T, h, w."""
    tokens: int
    """Of the DiT."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of all frames, uint8 RGB."""
        return self.num_frames * self.height * self.width * 3


@dataclass(frozen=True)
class Remedy:
    """Settings, and what a GPU needs with them."""

    settings: tuple[str, ...]
    """As `--set` takes them."""
    costs: str
    """What is paid for it."""
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a recipe needs."""

    config: TrainConfig
    gpus: Gpus
    video: Video
    model: ModelBytes
    memory: MemoryPlan
    work: dict[str, PhaseWork]
    savings: Savings | None
    fits: bool
    remedies: tuple[Remedy, ...]
    """Empty when it fits: what was tried to make it fit."""
    fewest_gpus: int | None
    """Of `GPU_COUNTS`: the smallest number with which it fits, the DiTs sharded; None when none is enough."""

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as a tree of numbers and texts."""
        memory = asdict(self.memory) | {
            "totals": self.memory.totals, "peak_phase": self.memory.peak_phase, "peak": self.memory.peak,
        }  # fmt: skip
        return {
            "architecture": self.config.model.architecture,
            "gpus": asdict(self.gpus),
            "video": asdict(self.video),
            "model": asdict(self.model),
            "memory_bytes": memory,
            "step": {name: asdict(work) for name, work in self.work.items()},
            "savings": None if self.savings is None else asdict(self.savings),
            "fits": self.fits,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "fewest_gpus": self.fewest_gpus,
        }


def make_plan(config: TrainConfig, gpus: Gpus, say: Say) -> Plan:
    """Returns the plan of a recipe.

    Raises:
        ConfigError: the groups of a step cannot be divided among the GPUs.
        ModelLoadError: the model is neither a published one nor there as files.
    """
    require_equal_parts(config, gpus.count)
    say("the model without its weights")
    planner = _Planner(meta_module(config), gpus, say)
    memory = planner.memory(config)
    measured = planner.measurement(config)
    fits = memory.peak <= gpus.usable_bytes
    return Plan(
        config, gpus, planner.video(config), planner.model_bytes, memory,
        step_work(config, planner.model, measured), savings(config, planner.model, measured), fits,
        () if fits else planner.remedies(config), planner.fewest_gpus(config),
    )  # fmt: skip


class _Planner:
    """Plans variants of one recipe; what does not differ between them is measured once."""

    def __init__(self, model: WanModule, gpus: Gpus, say: Say) -> None:
        self.model = model
        self.model_bytes = model_bytes(model)
        self.gpus = gpus
        self._say = say
        self._prefix = ""
        self._measured: dict[str, Measurement] = {}

    def measurement(self, config: TrainConfig) -> Measurement:
        """Returns the costs of a recipe; how its weights are spread over GPUs has no influence."""
        key = config.model_dump_json(exclude={"parallel", "memory"})
        if key not in self._measured:
            video = self.video(config)
            size = (video.num_frames, video.height, video.width)
            self._measured[key] = measure(self.model, config, size, lambda what: self._say(self._prefix + what))
        return self._measured[key]

    def memory(self, config: TrainConfig, count: int | None = None) -> MemoryPlan:
        """Returns what each GPU needs; `count` GPUs when given."""
        video_bytes = self.video(config).frame_bytes
        return memory_plan(config, self.model_bytes, self.measurement(config), video_bytes, count or self.gpus.count)

    def video(self, config: TrainConfig) -> Video:
        """Returns the largest video that a recipe samples."""
        height, width = largest_size(config.data)
        vae = self.model.pipe.vae
        num_frames, factor = config.data.num_frames, vae.upsampling_factor
        shape = (vae.z_dim, (num_frames - 1) // 4 + 1, height // factor, width // factor)
        patch = self.model.pipe.dit.patch_size
        tokens = (shape[1] // patch[0]) * (shape[2] // patch[1]) * (shape[3] // patch[2])
        return Video(num_frames, height, width, shape, tokens)

    def remedies(self, config: TrainConfig) -> tuple[Remedy, ...]:
        """Returns switches and what each would do: alone, and together where none alone is enough.

        Those that change what is sampled are looked at where the others are not enough.
        """
        gentle, other = (
            harmless_switches(config, self.gpus.count, self.model.pipe.dit2 is not None),
            lossy_switches(config),
        )
        tried = [self._remedy(config, [switch]) for switch in gentle]
        if not any(remedy.fits for remedy in tried) and len(gentle) > 1:
            tried.append(self._remedy(config, gentle))
        for chosen in ([[switch] for switch in other], [[*gentle, switch] for switch in other]):
            for switches in chosen:
                if any(remedy.fits for remedy in tried):
                    return tuple(tried)
                tried.append(self._remedy(config, switches))
        return tuple(tried)

    def _remedy(self, config: TrainConfig, switches: list[Switch]) -> Remedy:
        settings = tuple(setting for switch in switches for setting in switch.settings)
        self._prefix = f"with {', '.join(settings)}: "
        peak = self.memory(with_settings(config, settings)).peak
        return Remedy(settings, "; ".join(s.costs for s in switches), peak, peak <= self.gpus.usable_bytes)

    def fewest_gpus(self, config: TrainConfig) -> int | None:
        """Returns the smallest number of GPUs that is enough with sharded DiTs, one group or more on each."""
        sharded = with_settings(config, ("memory.swap_idle_expert=false", "parallel.sharding=fsdp2"))
        for count in GPU_COUNTS:
            if self.memory(config if count == 1 else sharded, count).peak <= self.gpus.usable_bytes:
                return count
        return None
