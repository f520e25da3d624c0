"""The README.md beside an exported LoRA: what it is, how it was trained, what was measured, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from likeness_trainer.config import TrainConfig
from likeness_trainer.wan.model_config import WanModelConfig
from likeness_trainer.wan.sampler_config import SamplerConfig

HUB_IDS = {
    "wan-2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B",
    "wan-2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B",
    "wan-2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B",
}
"""Architecture in a recipe to the model's name on the Hugging Face Hub."""


def model_card(
    title: str,
    config: TrainConfig,
    labels: list[str],
    step: int,
    reward_fingerprint: str,
    summary: Mapping[str, Any],
) -> str:
    """Returns the card as Markdown with the front matter that the Hugging Face Hub reads.

    Args:
        labels: names of the exported files without their suffix.
        step: optimizer steps behind the exported adapters.
        reward_fingerprint: of the face models that gave the rewards.
        summary: summary.json of the run; empty while it goes on. Only what it holds is claimed.
    """
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(config), sort_keys=False)}---",
        f"# {title}",
        "A LoRA that keeps the face of the person in the first frame or the prompt's reference, trained by "
        "reinforcement learning against a face recogniser with Likeness.",
        _files(labels),
        _loading(labels),
        _training(config, step, reward_fingerprint),
        _measured(summary),
        "## Use it with consent\n\nIt makes videos in which a real person is easier to recognise. Use pictures of "
        "people who agreed to it.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(config: TrainConfig) -> dict[str, Any]:
    hub_id = HUB_IDS.get(config.model.architecture)
    task = "text-to-video" if "t2v" in config.model.architecture.split("-") else "image-to-video"
    base = {} if hub_id is None else {"base_model": hub_id, "base_model_relation": "adapter"}
    return {**base, "pipeline_tag": task, "tags": ["lora", "wan", "reinforcement-learning", "likeness"]}


def _files(labels: list[str]) -> str:
    rows = [f"| `{label}.safetensors` | ComfyUI, diffusers, DiffSynth | {_expert(label)} |" for label in labels]
    rows += [f"| `peft/{label}/` | PEFT | {_expert(label)} |" for label in labels]
    return "\n".join(["## Files", "", "| file | loads in | goes into |", "| --- | --- | --- |", *rows])


def _expert(label: str) -> str:
    return {"high_noise": "the high-noise expert", "low_noise": "the low-noise expert"}.get(label, "the DiT")


def _loading(labels: list[str]) -> str:
    lines = [
        f'pipe.load_lora_weights(".", weight_name="{label}.safetensors", adapter_name="{label}"'
        + (", load_into_transformer_2=True)" if label == "low_noise" else ")")
        for label in labels
    ]
    return "## Loading with diffusers\n\n```python\n" + "\n".join(lines) + "\n```"


def _training(config: TrainConfig, step: int, reward_fingerprint: str) -> str:
    algorithm, sampler, model = config.algorithm, config.sampler, config.model
    weights = ", ".join(f"{name} {weight:g}" for name, weight in algorithm.reward_weights.items())
    facts = {
        "optimizer steps": step,
        "adapter": f"rank {model.lora_rank}, alpha {model.lora_alpha or model.lora_rank:g}",
        "layers": model.lora_target_modules,
        "samples a step": f"{algorithm.groups_per_step} groups of {algorithm.group_size}",
        "steps of the chain": (
            f"{sampler.num_inference_steps}, trained {sampler.mid_timestep} to {sampler.final_timestep}, "
            f"{sampler.stochastic_step} at noise level {sampler.noise_level:g}"
        ),
        "guidance": _guidance(sampler),
        "merged into the base": _merged(model),
        "KL weight": f"{algorithm.kl_weight:g}",
        "learning rate": f"{config.optimizer.learning_rate:g}",
        "averaged": "no" if config.optimizer.ema_decay is None else f"yes, decay {config.optimizer.ema_decay:g}",
        "reward": weights,
        "fingerprint of the face models": reward_fingerprint,
    }
    return "## Training\n\n| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in facts.items())


def _guidance(sampler: SamplerConfig) -> str:
    if not sampler.guided:
        return "none: sample with a guidance scale of 1"
    scales = sampler.guidance_scale
    if isinstance(scales, dict):
        told = f"scale {scales['dit']:g} in the high-noise expert, {scales['dit2']:g} in the low-noise expert"
    else:
        told = f"scale {scales:g}"
    return f"{told}, negative prompt {sampler.negative_prompt!r}"


def _merged(model: WanModelConfig) -> str:
    """Returns the LoRA files that the base had merged: whoever uses this LoRA must load them as well."""
    told = [f"`{Path(m.path).name}` into {m.expert} at strength {m.strength:g}" for m in model.base_loras]
    return f"{', '.join(told)}: load them beside this LoRA" if told else "nothing"


def _measured(summary: Mapping[str, Any]) -> str:
    if "held_out" not in summary:
        return "## Measured\n\nNot evaluated on held-out people."
    rows = [
        f"| {item['pack']} | {item['before']:.3f} | {item['after']:.3f} | {item['difference']:+.3f} | "
        f"{item['ci95'][0]:+.3f} to {item['ci95'][1]:+.3f} | {item['pairs']} |"
        for item in (summary["held_out"], *summary.get("held_out_other_packs", ()))
    ]
    header = "| face pack | without | with the LoRA | difference | 95 % interval | pairs |"
    text = "Identity similarity on held-out people, same noise with and without; the first pack gave the rewards."
    return "\n".join(["## Measured", "", text, "", header, "| --- | --- | --- | --- | --- | --- |", *rows])
