"""A frozen Wan model with trainable LoRA adapters, as a sampler sees it: conditioning in, velocities and frames out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffsynth.pipelines.wan_video import (
    WanVideoPipeline,
    WanVideoUnit_ImageEmbedderCLIP,
    WanVideoUnit_ImageEmbedderFused,
    WanVideoUnit_ImageEmbedderVAE,
    WanVideoUnit_PromptEmbedder,
)
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from likeness_trainer.wan import lora
from likeness_trainer.wan.base_lora import merge_base_loras
from likeness_trainer.wan.decoding import decode_latent_frames, to_uint8_rgb
from likeness_trainer.wan.expert_swap import ExpertSwap
from likeness_trainer.wan.loading import load_pipeline
from likeness_trainer.wan.memory_config import MemoryConfig
from likeness_trainer.wan.model_config import EXPERTS, WanModelConfig
from likeness_trainer.wan.sampler_config import SamplerConfig
from likeness_trainer.wan.scheduler import EulerSchedule

CONDITIONING_UNITS = (
    WanVideoUnit_PromptEmbedder,
    WanVideoUnit_ImageEmbedderVAE,
    WanVideoUnit_ImageEmbedderCLIP,
    WanVideoUnit_ImageEmbedderFused,
)


@dataclass(frozen=True)
class Conditioning:
    """What the DiT is told about one video, encoded once: prompt, first frame, and the shape of the latents."""

    inputs: dict[str, Any]
    """Keyword arguments of DiffSynth's model function, tensors of batch 1."""
    latent_shape: tuple[int, int, int, int]
    """C, T, h, w."""
    negative_inputs: dict[str, Any] = field(default_factory=dict)
    """What differs in `inputs` for the negative prompt; empty where the sampler is not guided."""

    @property
    def first_frame_latents(self) -> Tensor | None:
        """Latents that replace latent frame 0 after every step (TI2V models), or None: [1, C, 1, h, w]."""
        return self.inputs.get("first_frame_latents")

    def to(self, device: torch.device | str) -> Conditioning:
        """Returns the same conditioning with its tensors on a device."""
        moved, negative = (
            {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
            for inputs in (self.inputs, self.negative_inputs)
        )
        return Conditioning(moved, self.latent_shape, negative)


class WanModule(nn.Module):
    """A Wan DiT (or two experts) with LoRA, a frozen VAE and text encoder, and the Euler schedule."""

    def __init__(
        self,
        config: WanModelConfig,
        sampler: SamplerConfig,
        seed: int = 0,
        memory: MemoryConfig | None = None,
        pipe: WanVideoPipeline | None = None,
    ) -> None:
        """
        Args:
            seed: of the adapters.
            memory: what leaves the device; the defaults when not given.
            pipe: what the files of `config` hold, where it is there already; loaded when not given.
        """
        super().__init__()
        self.config = config
        self.sampler = sampler
        self.schedule = EulerSchedule.from_config(sampler)
        self.device = torch.device(_pick_device(config.device))
        self.dtype = getattr(torch, config.torch_dtype)
        self.memory = memory or MemoryConfig()
        first = "cpu" if self.memory.swap_idle_expert else self.device
        self.pipe = pipe or load_pipeline(
            config.model_paths, config.tokenizer_path, self.dtype, first, config.architecture
        )
        if isinstance(sampler.guidance_scale, dict) and self.pipe.dit2 is None:
            raise ValueError("sampler.guidance_scale names dit2, but model_paths holds one DiT only; give one number")
        self.base_loras = merge_base_loras(self.pipe, config.base_loras)
        self.trained_experts = self._choose_experts()
        for name in self.trained_experts:
            lora.inject_lora(
                getattr(self.pipe, name),
                rank=config.lora_rank,
                alpha=config.lora_alpha or config.lora_rank,
                target_modules=config.lora_target_modules,
                seed=seed,
            )
        self._swap = self._open_swap() if self.memory.swap_idle_expert else None

    def _open_swap(self) -> ExpertSwap:
        """Returns the swap of the experts, with everything else on the device."""
        if self.pipe.dit2 is None:
            raise ValueError("memory.swap_idle_expert is on, but model_paths holds one DiT only: there is none to swap")
        for part in (self.pipe.text_encoder, self.pipe.image_encoder, self.pipe.vae):
            if part is not None:
                part.to(self.device)
        self.pipe.device = self.device
        return ExpertSwap({name: getattr(self.pipe, name) for name in EXPERTS}, self.device)

    def _choose_experts(self) -> tuple[str, ...]:
        reached = {self.expert_name(step) for step in self.schedule.window}
        wanted = set(EXPERTS) if "dit" in self.config.trainable_models else {"dit2"}
        if "dit2" in self.config.trainable_models and self.pipe.dit2 is None:
            raise ValueError("trainable_models names dit2, but model_paths holds one DiT only")
        chosen = tuple(name for name in EXPERTS if name in reached & wanted)
        if not chosen:
            raise ValueError(
                f"trainable_models is {self.config.trainable_models}, but steps {list(self.schedule.window)} of the "
                f"window evaluate only {sorted(reached)}: nothing would be trained"
            )
        return chosen

    def expert_name(self, step: int) -> str:
        """Returns which DiT evaluates a step: `dit`, or `dit2` below the boundary of a two-expert model."""
        return "dit2" if self.pipe.dit2 is not None and self.schedule.uses_low_noise_expert(step) else "dit"

    def lora_parameters(self) -> list[nn.Parameter]:
        """Returns the trainable parameters, float32, in a fixed order."""
        return [p for name in self.trained_experts for p in lora.lora_parameters(getattr(self.pipe, name))]

    @property
    def needs_first_frame(self) -> bool:
        """Whether the model animates a picture and cannot do without one."""
        return bool(self.pipe.dit.require_vae_embedding and self.pipe.dit.in_dim > self.pipe.vae.z_dim)

    def drop_encoders(self) -> None:
        """Frees what only `encode` needs: the text encoder, the image encoder, the VAE's encoder. `decode` goes on."""
        self.pipe.text_encoder = self.pipe.image_encoder = None
        vae = self.pipe.vae.model
        vae.encoder = vae.conv1 = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def encode(
        self, prompt: str, first_frame: NDArray[np.uint8] | Image.Image | None, num_frames: int, height: int, width: int
    ) -> Conditioning:
        """Returns the conditioning of one video.

        Args:
            prompt: what the video shows.
            first_frame: uint8 RGB [height, width, 3], or a picture that is resized; None for text-to-video.
            num_frames: 4n + 1.
            height, width: pixels, multiples of 16 (32 for TI2V-5B).

        Raises ValueError for another size, and after `drop_encoders`.
        """
        if self.pipe.text_encoder is None:
            raise ValueError("the encoders were dropped; encode every prompt before drop_encoders")
        self.check_shape(num_frames, height, width)
        factor = self.pipe.vae.upsampling_factor
        shape = (self.pipe.vae.z_dim, (num_frames - 1) // 4 + 1, height // factor, width // factor)
        image = Image.fromarray(first_frame) if isinstance(first_frame, np.ndarray) else first_frame
        if not (self.needs_first_frame or self.pipe.dit.fuse_vae_embedding_in_latents):
            image = None  # text-to-video: the picture serves as identity only
        shared = {
            "input_image": image, "end_image": None, "num_frames": num_frames, "height": height, "width": width,
            "tiled": False, "tile_size": (30, 52), "tile_stride": (15, 26),
            "cfg_scale": 2.0 if self.sampler.guided else 1.0,  # DiffSynth encodes the negative prompt unless it is 1
            "latents": torch.zeros(1, *shape, device=self.device, dtype=self.dtype),
        }  # fmt: skip
        positive: dict[str, Any] = {"prompt": prompt, "positive": True}
        negative: dict[str, Any] = {"negative_prompt": self.sampler.negative_prompt, "positive": False}
        for unit in self.pipe.units:
            if isinstance(unit, CONDITIONING_UNITS):
                shared, positive, negative = self.pipe.unit_runner(unit, self.pipe, shared, positive, negative)
        self.pipe.vae.model.clear_cache()  # the encoder's, which would stay on the GPU for the whole run
        names = ("y", "clip_feature", "fuse_vae_embedding_in_latents", "first_frame_latents")
        inputs = {"context": positive["context"], **{name: shared[name] for name in names if name in shared}}
        return Conditioning(inputs, shape, {"context": negative["context"]} if self.sampler.guided else {})

    def check_shape(self, num_frames: int, height: int, width: int) -> None:
        """Raises ValueError for a size that the model does not take."""
        if num_frames < 1 or num_frames % 4 != 1:
            raise ValueError(f"num_frames is {num_frames}; Wan takes 4n + 1 frames: 1, 5, 9, ..., 81")
        for name, value, multiple in (
            ("height", height, self.pipe.height_division_factor),
            ("width", width, self.pipe.width_division_factor),
        ):
            if value < multiple or value % multiple:
                raise ValueError(f"{name} is {value}; this model takes multiples of {multiple}")

    def velocity(self, latents: Tensor, step: int, conditioning: Conditioning) -> Tensor:
        """Returns the predicted velocity at a step of the chain: float32 [B, C, T, h, w], with gradient when enabled.

        With a guidance scale ``g`` other than 1 it is ``v_neg + g (v - v_neg)``, where ``v_neg`` is predicted for the
        negative prompt (classifier-free guidance, arXiv 2207.12598); both predictions are part of the graph.

        Args:
            latents: float32 [B, C, T, h, w]; the batch shares one conditioning.
        """
        velocity = self._evaluate(latents, step, conditioning.inputs)
        scale = self.sampler.guidance_scale_of(self.expert_name(step))
        if scale == 1.0:
            return velocity
        if not conditioning.negative_inputs:
            raise ValueError("the conditioning holds no negative prompt: it was encoded by a model without guidance")
        negative = self._evaluate(latents, step, {**conditioning.inputs, **conditioning.negative_inputs})
        return negative + scale * (velocity - negative)

    def _evaluate(self, latents: Tensor, step: int, inputs: dict[str, Any]) -> Tensor:
        """Returns what the expert of a step predicts from inputs of batch 1: float32 [B, C, T, h, w]."""
        batch = latents.shape[0]
        expanded = {
            key: value.expand(batch, *value.shape[1:]) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
        if self._swap is not None:
            self._swap.bring(self.expert_name(step))
        timestep = torch.tensor([self.schedule.timestep(step)], dtype=self.dtype, device=self.device)
        checkpointing = self.config.use_gradient_checkpointing and torch.is_grad_enabled()
        result: Tensor = self.pipe.model_fn(
            dit=getattr(self.pipe, self.expert_name(step)),
            latents=latents.to(self.device, self.dtype),
            timestep=timestep,
            use_gradient_checkpointing=checkpointing,
            use_gradient_checkpointing_offload=checkpointing and self.config.use_gradient_checkpointing_offload,
            **expanded,
        )
        return result.float()

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, step: int, conditioning: Conditioning) -> Tensor:
        """Returns the velocity of the model without its adapter: float32 [B, C, T, h, w]."""
        with self.adapters_disabled(step):
            return self.velocity(latents, step, conditioning)

    def adapters_disabled(self, step: int) -> AbstractContextManager[None]:
        """Switches the adapter of the expert of this step off; its output is then that of the loaded model."""
        return lora.adapter_disabled(getattr(self.pipe, self.expert_name(step)))

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the module is the model as it was loaded."""
        with ExitStack() as stack:
            for name in self.trained_experts:
                stack.enter_context(lora.adapter_disabled(getattr(self.pipe, name)))
            yield

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Iterator[NDArray[np.uint8]]:
        """Yields uint8 RGB frames [B, t, H, W, 3] of each latent frame in turn, as soon as the VAE has them."""
        for chunk in decode_latent_frames(self.pipe.vae, latents):
            yield to_uint8_rgb(chunk)

    def expert_label(self, name: str) -> str:
        """Returns the name under which an expert's LoRA is published: high_noise, low_noise, or lora for one DiT."""
        if self.pipe.dit2 is None:
            return "lora"
        return {"dit": "high_noise", "dit2": "low_noise"}[name]


def _pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
