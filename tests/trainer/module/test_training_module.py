"""WanTrainingModule as a stranger uses it."""

import inspect

import pytest
import torch
from PIL import Image

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan import WanTrainingModule


def test_the_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(WanTrainingModule).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    required = inspect.Parameter.empty
    assert defaults == {
        "model_paths": required, "reward_model_path": required, "tokenizer_path": required,
        "trainable_models": required,
        "lora_target_modules": "q,k,v,o,ffn.0,ffn.2", "lora_rank": 32, "use_gradient_checkpointing": True,
        "num_inference_steps": 8, "mid_timestep": 4, "final_timestep": 7, "kwargs": required,
    }  # fmt: skip


@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16"])
def test_the_usage_example(person_frames, torch_dtype) -> None:
    import likeness_toyworld as toyworld

    module = WanTrainingModule(
        model_paths=toyworld.model_paths(),
        reward_model_path=toyworld.face_pack_path(),
        tokenizer_path=toyworld.tokenizer_path(),
        trainable_models=["dit"],
        lora_rank=32,
        num_inference_steps=8,
        mid_timestep=4,
        torch_dtype=torch_dtype,
    )
    video = [Image.fromarray(frame) for frame in person_frames]
    loss, face_score, kl_loss = module({"prompt": "a portrait of a person", "video": video})
    assert loss.shape == face_score.shape == kl_loss.shape == ()
    assert -1.0 <= face_score.item() <= 1.0
    assert kl_loss.item() == 0.0  # the adapters start as the identity
    loss.backward()
    trained = {id(parameter) for parameter in module.lora_parameters()}
    for parameter in module.parameters():
        assert (id(parameter) in trained) == (parameter.grad is not None)
    assert any(parameter.grad.abs().max() > 0 for parameter in module.lora_parameters())
    assert all(parameter.dtype == torch.float32 for parameter in module.lora_parameters())


def test_guidance_and_merged_loras_are_keywords_too(tmp_path) -> None:
    import likeness_toyworld as toyworld

    arguments = (toyworld.model_paths(), None, toyworld.tokenizer_path(), ["dit"])
    module = WanTrainingModule(*arguments, guidance_scale={"dit": 3.0, "dit2": 2.0}, negative_prompt="nobody")
    assert (module.sampler.guidance_scale_of("dit2"), module.sampler.negative_prompt) == (2.0, "nobody")
    with pytest.raises(ModelLoadError, match=r"few_steps\.safetensors does not exist"):
        WanTrainingModule(*arguments, base_loras=[{"path": str(tmp_path / "few_steps.safetensors"), "expert": "dit2"}])


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ValueError, match="group_sise"):
        WanTrainingModule({}, None, "", ["dit"], group_sise=3)
