"""The model card claims what the run knows, and nothing else."""

from pathlib import Path

import yaml

from likeness_trainer.config import load_config
from likeness_trainer.run.model_card import model_card

RECIPES = Path(__file__).parents[3] / "recipes"
HELD_OUT = {
    "before": 0.41, "after": 0.49, "difference": 0.08, "ci95": [0.05, 0.11], "pairs": 32, "pack": "antelopev2",
}  # fmt: skip


def front_matter(card: str) -> dict:
    _, matter, _ = card.split("---\n", 2)
    parsed: dict = yaml.safe_load(matter)
    return parsed


def test_a_card_of_two_experts_tells_files_loading_training_and_result() -> None:
    config = load_config(RECIPES / "wan2.2-i2v-a14b.yaml", environment={})
    summary = {"held_out": HELD_OUT}
    card = model_card("faces, step 100", config, ["high_noise", "low_noise"], 100, "face-models", summary)
    assert front_matter(card)["base_model"] == "Wan-AI/Wan2.2-I2V-A14B"
    assert front_matter(card)["pipeline_tag"] == "image-to-video"
    assert card.count("load_into_transformer_2=True") == 1
    for text in (
        "# faces, step 100", "`low_noise.safetensors`", "rank 32, alpha 32", "4 groups of 8", "face-models",
        "| antelopev2 | 0.410 | 0.490 | +0.080 | +0.050 to +0.110 | 32 |",
    ):  # fmt: skip
        assert text in card


def test_a_card_of_a_run_that_was_not_evaluated_claims_no_result() -> None:
    config = load_config(RECIPES / "toy.yaml", environment={})
    card = model_card("toy", config, ["lora"], 3, "f", {})
    assert "Not evaluated on held-out people" in card
    assert "base_model" not in front_matter(card)
    assert "transformer_2" not in card


def test_a_text_to_video_model_is_tagged_so() -> None:
    config = load_config(RECIPES / "wan2.1-t2v-1.3b.yaml", environment={})
    assert front_matter(model_card("t", config, ["lora"], 1, "f", {}))["pipeline_tag"] == "text-to-video"
