"""The tiny Wan model: DiffSynth loads it as any other, and its fast forms compute what DiffSynth's compute."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import likeness_toyworld
from likeness_toyworld.assets import ASSETS
from likeness_toyworld.painter import paint_clip, sample_identity, sample_motion

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

BUDGET_BYTES = 12_000_000
PERSON, MOTION = 470_001, 1


@pytest.fixture(scope="module")
def pipe():
    from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

    likeness_toyworld.register_models()
    return WanVideoPipeline.from_pretrained(
        torch_dtype=torch.float32,
        device="cpu",
        model_configs=[ModelConfig(path=path) for path in likeness_toyworld.model_paths().values()],
        tokenizer_config=ModelConfig(path=likeness_toyworld.tokenizer_path()),
    )


@pytest.fixture(scope="module")
def video() -> torch.Tensor:
    from likeness_toyworld.training.vae import as_video

    frames_rgb, _ = paint_clip(sample_identity(PERSON), sample_motion(MOTION))
    return as_video(frames_rgb[None])


def test_all_assets_together_fit_the_budget() -> None:
    sizes = {path.name: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= BUDGET_BYTES, sizes


def test_registering_twice_adds_nothing() -> None:
    from diffsynth.configs import MODEL_CONFIGS

    likeness_toyworld.register_models()
    before = copy.deepcopy(MODEL_CONFIGS)
    likeness_toyworld.register_models()
    assert before == MODEL_CONFIGS
    ours = [entry["model_hash"] for entry in MODEL_CONFIGS if "likeness_toyworld" in entry["model_class"]]
    assert len(ours) == len(set(ours)) == 2


def test_the_entry_point_names_the_registration() -> None:
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="likeness_trainer.diffsynth_models") if p.name == "toyworld"]
    assert point.load() is likeness_toyworld.register_models


def test_both_experts_are_loaded_from_their_own_files(pipe) -> None:
    from safetensors.torch import load_file

    paths = likeness_toyworld.model_paths()
    for expert, name in ((pipe.dit, "dit"), (pipe.dit2, "dit2")):
        stored = load_file(paths[name])
        for key, value in expert.state_dict().items():
            assert torch.equal(value, stored[key].float()), f"{name} {key}"
    assert not torch.equal(pipe.dit.head.head.weight, pipe.dit2.head.head.weight)


def test_the_pipeline_samples_a_clip_of_the_right_shape(pipe) -> None:
    from PIL import Image

    frames_rgb, _ = paint_clip(sample_identity(PERSON), sample_motion(MOTION))
    sampled = pipe(
        prompt="a portrait of a person, static camera", input_image=Image.fromarray(frames_rgb[0]), height=64, width=64,
        num_frames=9, num_inference_steps=8, cfg_scale=1.0, seed=0, tiled=False, progress_bar_cmd=lambda steps: steps,
    )  # fmt: skip
    assert [np.asarray(frame).shape for frame in sampled] == [(64, 64, 3)] * 9
    # the first frame is given: the model only has to copy it
    assert np.abs(np.asarray(sampled[0]).astype(float) - frames_rgb[0]).mean() < 10


def test_context_is_short_and_depends_on_the_prompt(pipe) -> None:
    from diffsynth.pipelines.wan_video import WanVideoUnit_PromptEmbedder

    encode = WanVideoUnit_PromptEmbedder().encode_prompt
    portrait, empty = encode(pipe, "a portrait of a person, static camera"), encode(pipe, "")
    assert portrait.shape == (1, likeness_toyworld.TEXT_TOKENS, pipe.text_encoder.dim)
    assert float((portrait - empty).detach().abs().max()) > 0.1


def test_vae_reconstructs_a_person_whom_it_never_saw(pipe, video: torch.Tensor) -> None:
    with torch.no_grad():
        decoded = pipe.vae.decode(pipe.vae.encode(video, "cpu"), "cpu")
    assert decoded.shape == video.shape
    psnr = 10 * torch.log10(4 / ((decoded - video) ** 2).mean())
    assert float(psnr) > 25  # dB


def test_fast_vae_equals_the_one_of_diffsynth(pipe, video: torch.Tensor) -> None:
    from diffsynth.models.wan_video_vae import CausalConv3d, RMS_norm

    from likeness_toyworld.folded_convolution import FoldedCausalConv3d, FoldedRmsNorm

    original = copy.deepcopy(pipe.vae)
    for module in original.modules():
        if type(module) is FoldedCausalConv3d:
            module.__class__ = CausalConv3d
        if type(module) is FoldedRmsNorm:
            module.__class__ = RMS_norm
    with torch.no_grad():
        ours, theirs = (vae.model.encode(video, vae.scale) for vae in (pipe.vae, original))
        assert ours == pytest.approx(theirs, abs=1e-4)
        ours, theirs = (vae.model.decode(theirs, vae.scale) for vae in (pipe.vae, original))
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("history", [0, 1, 2])
def test_folded_convolution_equals_the_one_of_diffsynth(frames: int, history: int) -> None:
    from diffsynth.models.wan_video_vae import CausalConv3d

    from likeness_toyworld.folded_convolution import FoldedCausalConv3d

    torch.manual_seed(0)
    original = CausalConv3d(4, 6, 3, padding=1)
    folded = FoldedCausalConv3d(4, 6, 3, padding=1)
    folded.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, frames, 8, 8)
    cache = torch.randn(2, 4, history, 8, 8) if history else None
    with torch.no_grad():
        assert torch.allclose(folded(x, cache), original(x, cache), atol=1e-5)


def test_training_conditioning_equals_the_one_of_the_pipeline(pipe, video: torch.Tensor) -> None:
    from diffsynth.pipelines.wan_video import WanVideoUnit_ImageEmbedderVAE
    from PIL import Image

    from likeness_toyworld.training.dit import conditioning
    from likeness_toyworld.training.latents import encode_batch

    frames_rgb, _ = paint_clip(sample_identity(PERSON), sample_motion(MOTION))
    theirs = WanVideoUnit_ImageEmbedderVAE().process(
        pipe, input_image=Image.fromarray(frames_rgb[0]), end_image=None, num_frames=9, height=64, width=64,
        tiled=False, tile_size=(30, 52), tile_stride=(15, 26),
    )["y"]  # fmt: skip
    _, first_frame = encode_batch(pipe.vae, video)
    assert torch.allclose(conditioning(first_frame), theirs, atol=1e-4)


def test_tokenizer_knows_the_words_of_the_prompts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(likeness_toyworld.tokenizer_path())
    tokens = tokenizer.tokenize("A portrait of a person, static camera")
    assert tokens == ["▁a", "▁portrait", "▁of", "▁a", "▁person", ",", "▁static", "▁camera"]
    assert tokenizer.convert_tokens_to_ids(tokens).count(tokenizer.unk_token_id) == 0
