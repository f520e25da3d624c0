"""LoRA files merged into the base: every naming gives W + strength alpha / r B A, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.base_lora import merge_base_loras, merge_lora
from likeness_trainer.wan.lora import adapter_disabled, inject_lora, lora_state
from likeness_trainer.wan.lora_files import (
    AdapterWeights,
    LoraMetadata,
    adapter_weights,
    write_peft_directory,
    write_single_file,
)
from likeness_trainer.wan.model_config import BaseLora
from likeness_trainer.wan.published import PUBLISHED, meta_part

RANK, ALPHA, STRENGTH = 4, 6.0, 0.5
METADATA = LoraMetadata(title="few steps", architecture="wan/lora", created=date(2026, 1, 2))
Writer = Callable[[AdapterWeights, Path], Path]


def peft_folder(weights: AdapterWeights, folder: Path) -> Path:
    return write_peft_directory(weights, folder / "peft")


def comfyui(weights: AdapterWeights, folder: Path) -> Path:
    return write_single_file(weights, folder / "comfyui.safetensors", METADATA)


def comfyui_with_alpha(weights: AdapterWeights, folder: Path) -> Path:
    """lora_down, lora_up and an alpha for each layer, as extracted LoRAs come; half precision."""
    tensors = {}
    for name, tensor in weights.state.items():
        layer = name.rsplit(".lora_", 1)[0]
        half = "lora_down" if ".lora_A." in name else "lora_up"
        tensors[f"diffusion_model.{layer}.{half}.weight"] = tensor.to(torch.bfloat16)
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(weights.alpha)
    save_file(tensors, folder / "extracted.safetensors")
    return folder / "extracted.safetensors"


def diffusers_names(weights: AdapterWeights, folder: Path) -> dict[str, torch.Tensor]:
    """Renamed by diffusers itself; the scale is folded into the file that it converts."""
    from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin

    return WanLoraLoaderMixin.lora_state_dict(str(comfyui(weights, folder)))


def diffusers(weights: AdapterWeights, folder: Path) -> Path:
    tensors = diffusers_names(weights, folder)
    assert "transformer.blocks.1.attn2.to_out.0.lora_A.weight" in tensors
    save_file(tensors, folder / "diffusers.safetensors")
    return folder / "diffusers.safetensors"


def diffusers_with_metadata(weights: AdapterWeights, folder: Path) -> Path:
    """As diffusers saves adapters: unscaled halves, and their PEFT configuration in the header."""
    from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin

    unscaled = diffusers_names(AdapterWeights(weights.state, weights.rank, weights.rank), folder)
    layers = {name.removeprefix("transformer."): tensor for name, tensor in unscaled.items()}
    WanLoraLoaderMixin.save_lora_weights(
        folder / "saved", transformer_lora_layers=layers,
        transformer_lora_adapter_metadata={"r": weights.rank, "lora_alpha": weights.alpha},
    )  # fmt: skip
    return folder / "saved" / "pytorch_lora_weights.safetensors"


WRITERS = [peft_folder, comfyui, comfyui_with_alpha, diffusers, diffusers_with_metadata]


@pytest.fixture
def weights(make_trained_dit) -> AdapterWeights:
    """An adapter of rank 4 and alpha 6 on every target, in numbers that bfloat16 holds exactly."""
    held = adapter_weights(make_trained_dit(RANK, ALPHA))
    state = {name: tensor.to(torch.bfloat16).float() for name, tensor in held.state.items()}
    return AdapterWeights(state, held.rank, held.alpha)


@pytest.mark.parametrize("write", WRITERS, ids=lambda writer: writer.__name__)
def test_every_naming_merges_the_same_weights(make_dit, weights, tmp_path, write: Writer) -> None:
    base, dit = make_dit().state_dict(), make_dit()
    path = write(weights, tmp_path)
    merged = merge_lora(dit, BaseLora(path=str(path), expert="dit", strength=STRENGTH))
    assert (merged.path, merged.strength, len(merged.sha256)) == (str(path), STRENGTH, 64)
    adapted = {name.rsplit(".lora_", 1)[0] for name in weights.state}
    assert len(adapted) == 2 * 10
    for name, tensor in dit.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in adapted and name.endswith(".weight"):
            up, down = weights.state[f"{layer}.lora_B.weight"], weights.state[f"{layer}.lora_A.weight"]
            expected = base[name] + STRENGTH * (ALPHA / RANK) * up @ down
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-6)
            assert not torch.equal(tensor, base[name])
        else:
            assert torch.equal(tensor, base[name]), name


def test_the_merged_model_computes_what_the_adapter_computed(make_dit, make_trained_dit, velocity, tmp_path) -> None:
    adapter, dit = make_trained_dit(RANK, ALPHA), make_dit()
    path = comfyui(adapter_weights(adapter), tmp_path)
    (merged,) = merge_base_loras(Pipe(dit), [BaseLora(path=str(path), expert="dit")])
    with torch.no_grad():
        torch.testing.assert_close(velocity(dit), velocity(adapter), atol=2e-5, rtol=1e-4)
        # A new adapter stands on the merged base: switched off, it computes the merged base bit for bit.
        expected = velocity(dit)
        inject_lora(dit, rank=2, alpha=2.0)
        for name, parameter in dit.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        assert not torch.equal(velocity(dit), expected)
        with adapter_disabled(dit):
            assert torch.equal(velocity(dit), expected)
    assert merged.contents[:2] == ("dit", 1.0)


class Pipe:
    def __init__(self, dit, dit2=None) -> None:
        self.dit, self.dit2 = dit, dit2


def test_patterns_and_the_rank_stabilised_scale_of_peft_are_read(make_dit, weights, tmp_path) -> None:
    directory = peft_folder(weights, tmp_path)
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text()) | {"use_rslora": True, "alpha_pattern": {"self_attn.q": 16}}
    file.write_text(json.dumps(config))
    base, dit = make_dit().state_dict(), make_dit()
    merge_lora(dit, BaseLora(path=str(directory), expert="dit"))
    for layer, scale in (("blocks.1.self_attn.q", 16 / 2.0), ("blocks.1.self_attn.k", ALPHA / 2.0)):
        up, down = weights.state[f"{layer}.lora_B.weight"], weights.state[f"{layer}.lora_A.weight"]
        expected = base[f"{layer}.weight"] + scale * up @ down
        torch.testing.assert_close(dit.state_dict()[f"{layer}.weight"], expected, atol=1e-5, rtol=1e-5)


def test_differences_of_weights_biases_and_modulation_are_added(make_dit, tmp_path) -> None:
    """Extracted distillations hold those beside the LoRA."""
    tensors = {
        "diffusion_model.blocks.0.cross_attn.k.diff_b": torch.full((96,), 0.25),
        "diffusion_model.blocks.0.cross_attn.norm_k.diff": torch.full((96,), 0.5),
        "diffusion_model.blocks.1.diff_m": torch.full((1, 6, 96), 0.125),
    }
    save_file(tensors, tmp_path / "diff.safetensors")
    base, dit = make_dit().state_dict(), make_dit()
    merge_lora(dit, BaseLora(path=str(tmp_path / "diff.safetensors"), expert="dit", strength=2.0))
    changed = {name for name, tensor in dit.state_dict().items() if not torch.equal(tensor, base[name])}
    expected = {
        "blocks.0.cross_attn.k.bias": 0.5, "blocks.0.cross_attn.norm_k.weight": 1.0, "blocks.1.modulation": 0.25,
    }  # fmt: skip
    assert changed == expected.keys()
    for name, change in expected.items():
        torch.testing.assert_close(dit.state_dict()[name] - base[name], torch.full_like(base[name], change))


def test_weights_in_half_precision_are_merged_in_float32(make_dit, weights, tmp_path) -> None:
    dit = make_dit(torch.bfloat16)
    before = dit.state_dict()["blocks.0.ffn.0.weight"].float().clone()
    merge_lora(dit, BaseLora(path=str(comfyui(weights, tmp_path)), expert="dit"))
    up, down = weights.state["blocks.0.ffn.0.lora_B.weight"], weights.state["blocks.0.ffn.0.lora_A.weight"]
    expected = (before + ALPHA / RANK * up @ down).to(torch.bfloat16)
    merged = dit.state_dict()["blocks.0.ffn.0.weight"]
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged, expected, atol=0, rtol=2**-7)


PAIR = {
    "diffusion_model.blocks.0.ffn.0.lora_A.weight": torch.zeros(4, 96),
    "diffusion_model.blocks.0.ffn.0.lora_B.weight": torch.ones(192, 4),
}
UP = "diffusion_model.blocks.0.ffn.0.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"diffusion_model.blocks.9.ffn.0.diff_b": torch.zeros(192)}, r"blocks\.9\.ffn\.0 is no layer of the model"),
        ({"text_model.encoder.q.lora_A.weight": torch.zeros(4, 9)}, r"text_model\.encoder\.q has one half"),
        ({"diffusion_model.blocks.0.ffn.0.lora_magnitude_vector": torch.zeros(192)}, "magnitude_vector is no part"),
        ({UP: torch.ones(190, 4)}, r"changes blocks\.0\.ffn\.0\.weight \[192, 96\] by \[190, 96\]"),
        ({UP: torch.ones(192, 8)}, r"halves that cannot be multiplied, \[192, 8\] and \[4, 96\]"),
        ({"transformer.blocks.0.ffn.net.0.proj.lora_B.weight": torch.ones(192, 4)}, "there twice"),
        ({"diffusion_model.blocks.0.ffn.2.alpha": torch.tensor(4.0)}, r"ffn\.2 has an alpha without a LoRA"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_merged(make_dit, tmp_path, change, told) -> None:
    dit = make_dit()
    save_file(PAIR | change, tmp_path / "bad.safetensors")
    with pytest.raises(ModelLoadError, match=rf"bad\.safetensors does not fit dit: .*{told}"):
        merge_lora(dit, BaseLora(path=str(tmp_path / "bad.safetensors"), expert="dit"))
    assert all(
        torch.equal(t, b) for t, b in zip(dit.state_dict().values(), make_dit().state_dict().values(), strict=True)
    )


def test_files_that_are_no_lora_are_named(make_dit, tmp_path) -> None:
    (tmp_path / "text.safetensors").write_text("not one")
    save_file({}, tmp_path / "empty.safetensors")
    (tmp_path / "folder").mkdir()
    for name, told in (
        ("text.safetensors", "no safetensors file"), ("empty.safetensors", "holds no LoRA"),
        ("folder", r"adapter_model\.safetensors does not exist"), ("absent.safetensors", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(ModelLoadError, match=told):
            merge_lora(make_dit(), BaseLora(path=str(tmp_path / name), expert="dit"))
    with pytest.raises(ModelLoadError, match="is for dit2, but"):
        merge_base_loras(Pipe(make_dit()), [BaseLora(path="x", expert="dit2")])


@pytest.mark.parametrize("strength", [0.0, float("nan"), float("inf")])
def test_a_strength_that_means_nothing_is_refused(strength) -> None:
    with pytest.raises(ValueError, match="strength is"):
        BaseLora(path="x", expert="dit", strength=strength)


DIFFUSERS_NAMES = {
    "self_attn.q": "attn1.to_q", "self_attn.k": "attn1.to_k", "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0", "cross_attn.q": "attn2.to_q", "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v", "cross_attn.o": "attn2.to_out.0", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
}  # fmt: skip


@pytest.mark.parametrize("naming", ["base_model.model.", "diffusion_model.", "transformer."])
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_a_lora_of_a_published_model_finds_every_layer(tmp_path, architecture, naming) -> None:
    """The model has no weights here: names and shapes are what is checked."""
    dit = meta_part(PUBLISHED[architecture]["dit"], "dit")
    tensors = {}
    for block in (0, len(dit.blocks) - 1):
        for ours, theirs in DIFFUSERS_NAMES.items():
            weight = dit.get_parameter(f"blocks.{block}.{ours}.weight")
            layer = f"{naming}blocks.{block}.{theirs if naming == 'transformer.' else ours}"
            tensors[f"{layer}.lora_A.weight"] = torch.zeros(1, weight.shape[1])
            tensors[f"{layer}.lora_B.weight"] = torch.zeros(weight.shape[0], 1)
    save_file(tensors, tmp_path / "lora.safetensors")
    lora = BaseLora(path=str(tmp_path / "lora.safetensors"), expert="dit")
    merge_lora(dit, lora)
    save_file(
        {name.replace("blocks.0.", "blocks.77."): t for name, t in tensors.items()}, tmp_path / "lora.safetensors"
    )
    with pytest.raises(ModelLoadError, match=r"blocks\.77\..*and 5 more"):
        merge_lora(dit, lora)


def test_the_state_of_an_adapter_does_not_hold_what_was_merged(make_dit, weights, tmp_path) -> None:
    dit = make_dit()
    merge_lora(dit, BaseLora(path=str(comfyui(weights, tmp_path)), expert="dit"))
    inject_lora(dit, rank=2, alpha=2.0)
    assert all(not tensor.any() for name, tensor in lora_state(dit).items() if ".lora_B." in name)
