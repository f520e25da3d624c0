"""Other tools load both files: every key finds its place and the result computes what the adapter computed."""

from __future__ import annotations

import json
from datetime import date

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from likeness_trainer.wan.lora import adapter_disabled, checksum, inject_lora, lora_state
from likeness_trainer.wan.lora_files import (
    LoraMetadata,
    adapter_weights,
    load_peft_directory,
    write_peft_directory,
    write_single_file,
)

METADATA = LoraMetadata(
    title="Likeness toy",
    architecture="wan-2.2-i2v-a14b/lora",
    base_model="toy",
    license="Apache-2.0",
    created=date(2026, 1, 2),
    expert="low_noise",
    reward_fingerprint="sha256:ab12",
)
# float32 sums in another order: B (A x) against (B A) x
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


def test_single_file_names_scale_and_header(make_trained_dit, tmp_path):
    dit = make_trained_dit(rank=4, alpha=6.0)
    path = write_single_file(adapter_weights(dit), tmp_path / "lora" / "low_noise.safetensors", METADATA)
    tensors = load_file(path)
    state = lora_state(dit)
    assert set(tensors) == {f"diffusion_model.{name}" for name in state}
    a, b = "blocks.1.cross_attn.v.lora_A.weight", "blocks.1.cross_attn.v.lora_B.weight"
    assert torch.equal(tensors[f"diffusion_model.{a}"], state[a])
    assert torch.equal(tensors[f"diffusion_model.{b}"], state[b] * 1.5)  # alpha / rank = 6 / 4
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    with safe_open(path, framework="pt") as opened:
        header = opened.metadata()
    assert header["modelspec.title"] == "Likeness toy"
    assert header["modelspec.architecture"] == "wan-2.2-i2v-a14b/lora"
    assert header["modelspec.date"] == "2026-01-02"
    assert header["modelspec.license"] == "Apache-2.0"
    assert header["likeness.rank"] == "4"
    assert header["likeness.expert"] == "low_noise"
    assert header["likeness.reward_fingerprint"] == "sha256:ab12"


def test_diffsynth_fuses_every_layer_and_computes_the_same(make_dit, make_trained_dit, velocity, tmp_path, capsys):
    from diffsynth.pipelines.wan_video import WanVideoPipeline

    dit = make_trained_dit()
    path = write_single_file(adapter_weights(dit), tmp_path / "lora.safetensors", METADATA)
    pipe = WanVideoPipeline(device="cpu", torch_dtype=torch.float32)
    pipe.dit = make_dit()
    pipe.load_lora(pipe.dit, str(path))
    assert "20 tensors are fused" in capsys.readouterr().out  # 2 blocks x 10 layers
    with torch.no_grad():
        adapted = velocity(dit)
        torch.testing.assert_close(velocity(pipe.dit), adapted, **TOLERANCE)
        with adapter_disabled(dit):
            assert not torch.allclose(velocity(dit), adapted, atol=1e-2), "the adapter must matter for this test"


def _diffusers_transformer():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=36,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=192,
        num_layers=2,
    )


@pytest.mark.parametrize("target_modules", ["q,k,v,o,ffn.0,ffn.2", "q,v"])
def test_diffusers_converts_and_loads_every_key(make_trained_dit, tmp_path, target_modules):
    from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin

    dit = make_trained_dit(target_modules=target_modules)
    path = write_single_file(adapter_weights(dit), tmp_path / "lora.safetensors", METADATA)
    converted = WanLoraLoaderMixin.lora_state_dict(str(path))
    exported = load_file(path)
    assert len(converted) == len(exported)
    transformer = _diffusers_transformer()
    WanLoraLoaderMixin.load_lora_into_transformer(converted, transformer, adapter_name="likeness")
    loaded = {name: tensor for name, tensor in transformer.state_dict().items() if ".lora_" in name}
    assert len(loaded) == len(exported), "every exported tensor must land in the model, none silently skipped"
    # The values that arrived are those exported: compare as multisets of checksums, names differ by design.
    arrived = sorted(tensor.double().sum().item() for tensor in loaded.values())
    assert arrived == pytest.approx(sorted(tensor.double().sum().item() for tensor in exported.values()), abs=1e-6)
    query = loaded["blocks.1.attn2.to_q.lora_B.likeness.weight"]
    assert torch.equal(query, exported["diffusion_model.blocks.1.cross_attn.q.lora_B.weight"])
    scalings = {module.scaling["likeness"] for module in transformer.modules() if hasattr(module, "scaling")}
    assert scalings == {1.0}, "the scale is folded into lora_B already"


def test_peft_directory_loads_with_peft_itself(make_dit, make_trained_dit, velocity, tmp_path):
    from peft import PeftModel

    dit = make_trained_dit()
    directory = write_peft_directory(adapter_weights(dit), tmp_path / "peft", base_model="toy")
    assert sorted(child.name for child in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6, "LORA")
    assert "base_model.model.blocks.0.self_attn.q.lora_A.weight" in load_file(directory / "adapter_model.safetensors")
    wrapped = PeftModel.from_pretrained(make_dit(), str(directory))
    with torch.no_grad():
        assert torch.equal(velocity(wrapped.base_model.model), velocity(dit))
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(velocity(merged), velocity(dit), **TOLERANCE)


def test_peft_directory_round_trip(make_dit, make_trained_dit, tmp_path):
    trained = make_trained_dit()
    write_peft_directory(adapter_weights(trained), tmp_path / "peft")
    dit = make_dit()
    inject_lora(dit, rank=4, alpha=6.0)
    load_peft_directory(dit, tmp_path / "peft")
    assert checksum(dit) == checksum(trained)


def test_peft_directory_of_another_rank_or_incomplete_is_refused(make_dit, make_trained_dit, tmp_path):
    directory = write_peft_directory(adapter_weights(make_trained_dit()), tmp_path / "peft")
    dit = make_dit()
    inject_lora(dit, rank=8, alpha=8.0)
    with pytest.raises(ValueError, match="rank 4 and alpha 6, the model has 8 and 8"):
        load_peft_directory(dit, directory)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors is missing"):
        load_peft_directory(dit, directory)


def test_exports_replace_older_ones_and_leave_nothing_behind(make_trained_dit, tmp_path):
    old, new = make_trained_dit(rank=2), make_trained_dit(rank=4)
    for dit in (old, new):
        write_single_file(adapter_weights(dit), tmp_path / "lora.safetensors", METADATA)
        write_peft_directory(adapter_weights(dit), tmp_path / "peft")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["lora.safetensors", "peft"]
    single = load_file(tmp_path / "lora.safetensors")
    assert single["diffusion_model.blocks.0.ffn.0.lora_A.weight"].shape == (4, 96)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 4


def test_an_interrupted_export_keeps_the_old_file(make_trained_dit, tmp_path, monkeypatch):
    dit = make_trained_dit()
    path = write_single_file(adapter_weights(dit), tmp_path / "lora.safetensors", METADATA)
    before = path.read_bytes()

    def full_disk(tensors, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("likeness_trainer.wan.lora_files.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_single_file(adapter_weights(dit), path, METADATA)
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == ["lora.safetensors"]
