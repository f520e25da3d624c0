"""A toy module and a face, for tests of reward feedback."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

PROMPT = "a portrait of a person"


@pytest.fixture(scope="session")
def make_training_module() -> Callable[..., Any]:
    """Returns a function that makes a WanTrainingModule on the toy, its adapters moved away from zero."""
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    from likeness_trainer.wan import WanTrainingModule

    def make(reward: str | None = None, **settings: Any) -> Any:
        module = WanTrainingModule(
            **{
                "model_paths": toyworld.model_paths(), "reward_model_path": reward or toyworld.face_pack_path(),
                "tokenizer_path": toyworld.tokenizer_path(), "trainable_models": ["dit"], "lora_rank": 4,
                "torch_dtype": "float32", "device": "cpu", "use_gradient_checkpointing": False, "min_face_pixels": 16,
                "algorithm": "reward_feedback", "gradient_encoding": "float32", **settings,
            }
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.lora_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return module

    return make


@pytest.fixture(scope="session")
def training_module(make_training_module: Callable[..., Any]) -> Any:
    """One WanTrainingModule for the session."""
    return make_training_module()


@pytest.fixture
def data(person_frames: np.ndarray) -> dict[str, Any]:
    """One row of training data."""
    return {"prompt": PROMPT, "video": person_frames, "seed": 3}


@pytest.fixture
def gradients_of() -> Callable[..., list[torch.Tensor]]:
    """Returns a function that gives a loss's gradients by the adapters, and leaves none behind."""

    def gradients(module: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, module.lora_parameters()))

    return gradients


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Starts reward servers on a scorer, in threads of this process."""
    from server_thread import ServerThread

    from likeness_reward.settings import ServerSettings

    running: list[ServerThread] = []

    def start(scorer: Any) -> ServerThread:
        running.append(ServerThread(scorer, ServerSettings(pack=".", port=0, drain_timeout_s=5.0)))
        return running[-1]

    yield start
    for server in running:
        server.stop()
