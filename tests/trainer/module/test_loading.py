"""Model files that are missing or wrong are named."""

import json
from pathlib import Path

import pytest
import torch

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.loading import load_pipeline
from likeness_trainer.wan.model_files import read_model_paths, resolve_path

toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")


def load(model_paths, tokenizer=None):
    return load_pipeline(model_paths, tokenizer or toyworld.tokenizer_path(), torch.float32, "cpu")


def test_a_mapping_a_list_and_a_json_file_of_either_mean_the_same(tmp_path: Path) -> None:
    mapping = toyworld.model_paths()
    file = tmp_path / "models.json"
    file.write_text(json.dumps(mapping))
    by_role = [files for _, files in read_model_paths(mapping)]
    assert by_role == [files for _, files in read_model_paths(str(file))] == [f for _, f in read_model_paths(by_role)]


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    paths = {**toyworld.model_paths(), "vae": str(tmp_path / "no_vae"), "dit2": [str(tmp_path / "no_shard")]}
    with pytest.raises(ModelLoadError) as caught:
        load(paths, str(tmp_path / "no_tokenizer"))
    for name in ("vae: ", "no_vae", "dit2: ", "no_shard", "tokenizer_path: ", "no_tokenizer"):
        assert name in str(caught.value)


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ModelLoadError, match="decoder"):
        read_model_paths({"decoder": "x"})


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"other\.safetensors"):
        load({**toyworld.model_paths(), "dit": str(tmp_path / "other.safetensors")})


def test_a_part_that_is_absent_is_named() -> None:
    paths = toyworld.model_paths()
    with pytest.raises(ModelLoadError, match="vae"):
        load({"dit": paths["dit"], "text_encoder": paths["text_encoder"]})


def test_a_package_path_of_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModelLoadError, match="no_such_package"):
        resolve_path("no_such_package:weights/x")
