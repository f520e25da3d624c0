"""The toy model, loaded once: importing DiffSynth takes longer than most of these tests."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

SAMPLER = {"num_inference_steps": 8, "mid_timestep": 4, "final_timestep": 7}


@pytest.fixture(scope="session")
def make_module() -> Callable[..., Any]:
    """Returns a function that loads the toy model with given settings."""
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    from likeness_trainer.wan.memory_config import MemoryConfig
    from likeness_trainer.wan.model_config import WanModelConfig
    from likeness_trainer.wan.module import WanModule
    from likeness_trainer.wan.sampler_config import SamplerConfig

    def make(sampler: dict[str, Any] | None = None, memory: dict[str, Any] | None = None, **settings: Any) -> WanModule:
        config = WanModelConfig(
            **{
                "model_paths": toyworld.model_paths(), "tokenizer_path": toyworld.tokenizer_path(), "lora_rank": 4,
                "torch_dtype": "float32", "device": "cpu", "use_gradient_checkpointing": False, **settings,
            }
        )  # fmt: skip
        sampling = SamplerConfig(**{**SAMPLER, **(sampler or {})})
        return WanModule(config, sampling, seed=0, memory=MemoryConfig(**(memory or {})))

    return make


@pytest.fixture(scope="session")
def shared_module(make_module: Callable[..., Any]) -> Any:
    """Returns one toy model for the whole session; use `module`, which puts its adapters back."""
    return make_module()


@pytest.fixture
def module(shared_module: Any) -> Iterator[Any]:
    """Returns the toy model with adapters that do something; every test gets the same ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in shared_module.lora_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.grad = None
    yield shared_module
    for parameter in shared_module.lora_parameters():
        parameter.grad = None


@pytest.fixture(scope="session")
def person_frames() -> np.ndarray:
    """Returns a painted person, uint8 RGB [9, 64, 64, 3]."""
    painter = pytest.importorskip("likeness_toyworld.painter", reason="the toy world is not installed")
    motion = painter.sample_motion(np.random.default_rng(5))
    frames: np.ndarray = painter.paint_clip(painter.sample_identity(5), motion, 9, 64)[0]
    return frames


@pytest.fixture(scope="session")
def conditioning(shared_module: Any, person_frames: np.ndarray) -> Any:
    """Returns the painted person's prompt and first frame, encoded."""
    return shared_module.encode("a portrait of a person", person_frames[0], 9, 64, 64)
