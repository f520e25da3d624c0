"""Loads the frozen parts of a Wan model through DiffSynth, and says in words what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os

os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

import torch
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

from likeness_trainer.errors import ModelLoadError
from likeness_trainer.wan.model_files import ModelPaths, read_model_paths, require_model_files, resolve_path
from likeness_trainer.wan.published import explain_wrong_files

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "likeness_trainer.diffsynth_models"
"""Packages that bring model definitions of their own register them with DiffSynth through this entry-point group."""


def register_models() -> None:
    """Tells DiffSynth of the models that installed packages bring."""
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()()


def load_pipeline(
    model_paths: ModelPaths,
    tokenizer_path: str | None,
    dtype: torch.dtype,
    device: torch.device | str,
    architecture: str = "",
) -> WanVideoPipeline:
    """Returns DiffSynth's Wan pipeline with every parameter frozen.

    Args:
        architecture: name of a published checkpoint; lets the message about wrong files say what is wrong with them.

    Raises:
        ModelLoadError: names every file that is missing, or the first one that DiffSynth does not recognise.
    """
    require_model_files(model_paths, tokenizer_path)
    pairs, tokenizer = read_model_paths(model_paths), resolve_path(str(tokenizer_path))
    register_models()
    configs = [ModelConfig(path=files) for _, files in pairs]
    try:
        pipeline = _from_pretrained(configs, ModelConfig(path=tokenizer), dtype, device)
    except ModelLoadError as error:
        wrong = explain_wrong_files(model_paths, architecture)
        if wrong:
            raise ModelLoadError("\n  ".join(["these model files are not what they should be:", *wrong])) from error
        raise
    _require_parts(pipeline, pairs)
    return pipeline.requires_grad_(False).eval()


def _from_pretrained(
    configs: list[ModelConfig], tokenizer: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> WanVideoPipeline:
    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter):
            return WanVideoPipeline.from_pretrained(
                torch_dtype=dtype, device=device, model_configs=configs, tokenizer_config=tokenizer
            )
    except ValueError as error:
        raise ModelLoadError(f"DiffSynth could not load a model: {error}") from error
    finally:
        logger.debug("%s", chatter.getvalue())


def _require_parts(pipeline: WanVideoPipeline, pairs: list[tuple[str | None, str | list[str]]]) -> None:
    for part in ("dit", "vae", "text_encoder"):
        if getattr(pipeline, part) is None:
            raise ModelLoadError(f"none of {[files for _, files in pairs]} holds the {part} of a Wan model")
    for role, files in pairs:
        if role is not None and getattr(pipeline, role) is None:
            raise ModelLoadError(f"{files} was given as {role}, but DiffSynth recognises it as another part")
