"""The recipes' real models, without weights: DiffSynth's own configurations on the meta device."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from likeness_trainer.config import load_config
from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.loading import load_pipeline
from likeness_trainer.wan.lora import inject_lora, lora_parameters, select_target_layers
from likeness_trainer.wan.model_files import read_model_paths
from likeness_trainer.wan.published import PUBLISHED, hash_of_part, meta_part, part_hashes, table_entry

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = ["wan2.2-i2v-a14b", "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b"]
PARAMETERS = {  # counted by torch on the meta device; the DiTs' names say 14B, 5B and 1.3B
    "wan2.2-i2v-a14b": {"dit": 14_288_901_184, "dit2": 14_288_901_184, "vae": 126_892_531},
    "wan2.2-ti2v-5b": {"dit": 4_999_787_712, "vae": 704_688_668},
    "wan2.1-t2v-1.3b": {"dit": 1_418_996_800, "vae": 126_892_531},
}
LORA = {  # blocks, width, width of the feed-forward
    "wan2.2-i2v-a14b": (40, 5120, 13824),
    "wan2.2-ti2v-5b": (30, 3072, 14336),
    "wan2.1-t2v-1.3b": (30, 1536, 8960),
}


def recipe(name: str):
    return load_config(RECIPES / f"{name}.yaml", environment={})


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_names_a_published_architecture_with_all_its_parts(name: str) -> None:
    config = recipe(name)
    roles = {role for role, _ in read_model_paths(config.model.model_paths)}
    assert roles == PUBLISHED[config.model.architecture].keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_and_shapes_are_those_of_the_published_files(name: str) -> None:
    """DiffSynth's table holds the hash of each published file; the model built from its configuration has it too."""
    for role, published in part_hashes(recipe(name).model).items():
        part = meta_part(published, role)
        assert {parameter.device.type for parameter in part.parameters()} == {"meta"}
        assert hash_of_part(part, role) == published
        if role in PARAMETERS[name]:
            assert sum(parameter.numel() for parameter in part.parameters()) == PARAMETERS[name][role]


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_sits_on_exactly_the_intended_layers(name: str) -> None:
    config = recipe(name).model
    dit = meta_part(part_hashes(config)["dit"], "dit")
    blocks, dim, ffn_dim = LORA[name]
    attention = [f"{kind}.{layer}" for kind in ("self_attn", "cross_attn") for layer in "qkvo"]
    intended = sorted(f"blocks.{n}.{layer}" for n in range(blocks) for layer in [*attention, "ffn.0", "ffn.2"])
    assert select_target_layers(dit, config.lora_target_modules) == intended

    inject_lora(dit, config.lora_rank, config.lora_rank, config.lora_target_modules)
    adapted = sorted(
        module.removesuffix(".lora_A.default") for module, _ in dit.named_modules() if module.endswith("lora_A.default")
    )
    assert adapted == intended
    count = sum(parameter.numel() for parameter in lora_parameters(dit))
    print(f"{name}: LoRA of rank {config.lora_rank} on {len(adapted)} layers, {count:,} parameters")
    assert count == blocks * config.lora_rank * (8 * (dim + dim) + 2 * (dim + ffn_dim))
    assert {name for name, parameter in dit.named_parameters() if parameter.requires_grad} == {
        f"{layer}.lora_{half}.default.weight" for layer in intended for half in "AB"
    }


def test_a_part_that_diffsynth_does_not_know_is_named() -> None:
    with pytest.raises(ModelLoadError, match="no vae of a Wan model"):
        table_entry(PUBLISHED["wan-2.2-i2v-a14b"]["dit"], "vae")


def test_an_unknown_architecture_without_files_is_named(tmp_path: Path) -> None:
    config = recipe("wan2.1-t2v-1.3b").model.model_copy(update={"architecture": "wan-9"})
    with pytest.raises(ModelLoadError, match=r"'wan-9'.*wan-2\.2-i2v-a14b"):
        part_hashes(config)


def sharded(tmp_path: Path, count: int = 3) -> Path:
    """Writes the toy's DiT as shards with their index; returns the index."""
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    tensors = load_file(toyworld.model_paths()["dit"])
    weight_map = {}
    for shard in range(count):
        name = f"diffusion_pytorch_model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = dict(sorted(tensors.items())[shard::count])
        save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize("by_index", [True, False])
def test_sharded_checkpoints_load_as_one_file_does(tmp_path: Path, shared_module, by_index: bool) -> None:
    import likeness_toyworld as toyworld

    index = sharded(tmp_path)
    given = str(index) if by_index else [str(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    paths = {**toyworld.model_paths(), "dit": given}
    pipe = load_pipeline(paths, toyworld.tokenizer_path(), torch.float32, "cpu")
    whole = shared_module.pipe.dit.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in pipe.dit.state_dict().items())


def test_a_shard_of_an_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    import likeness_toyworld as toyworld

    index = sharded(tmp_path)
    (tmp_path / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"dit: .*-00002-of-00003\.safetensors"):
        load_pipeline({**toyworld.model_paths(), "dit": str(index)}, toyworld.tokenizer_path(), torch.float32, "cpu")


def test_files_that_belong_to_another_model_are_told_apart(tmp_path: Path) -> None:
    """As when a shard was left out of the list, or another model's file was given."""
    import likeness_toyworld as toyworld

    save_file({"patch_embedding.bias": torch.zeros(8), "other": torch.zeros(1)}, tmp_path / "dit.safetensors")
    paths = {**toyworld.model_paths(), "dit": str(tmp_path / "dit.safetensors")}
    with pytest.raises(ModelLoadError) as caught:
        load_pipeline(paths, toyworld.tokenizer_path(), torch.float32, "cpu", "wan-2.1-t2v-1.3b")
    told = next(line for line in str(caught.value).splitlines() if line.strip().startswith("dit:"))
    for part in ("824 tensors are missing, such as blocks.0.", "1 tensors are unknown, such as other"):
        assert part in told
    assert "patch_embedding.bias is [8], needed is [1536]" in told
