"""Recipes: precedence, and errors that name the key, the value and what is allowed."""

from pathlib import Path

import pytest

from likeness_trainer.config import dump_config, load_config
from likeness_trainer.errors import ConfigError

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("name", ["toy", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b"])
def test_every_recipe_is_valid_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = load_config(RECIPES / f"{name}.yaml", environment={})
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy, environment={}) == config


def test_set_wins_over_the_environment_and_the_environment_over_the_recipe() -> None:
    variables = {"LIKENESS_TRAINER_OPTIMIZER__LEARNING_RATE": "3e-4", "LIKENESS_TRAINER_STEPS": "7", "OTHER": "x"}
    config = load_config(RECIPES / "toy.yaml", ["steps=9"], environment=variables)
    assert (config.optimizer.learning_rate, config.steps) == (3e-4, 9)


@pytest.mark.parametrize(
    ("override", "key", "told"),
    [
        ("optimizer.learning_rate=-1", "optimizer.learning_rate", "-1"),
        ("optimizer.learning_rat=1", "optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "learning_rate", "did you mean optimizer.learning_rate?"),
        ("algorithm.groupsize=4", "algorithm.groupsize", "did you mean algorithm.group_size?"),
        ("optimizer.zzz=1", "optimizer.zzz", "allowed here: learning_rate, warmup_steps"),
        ("sampler.mid_timestep=7", "sampler", "must be below final_timestep"),
        ("sampler.final_timestep=8", "sampler", "last of 8 steps has index 7"),
        ("algorithm.group_size=1", "algorithm.group_size", "greater than or equal to 2"),
        ("algorithm.branch_batch=9", "(recipe)", "algorithm.group_size (8)"),
        ("model.trainable_models=[vae]", "model.trainable_models", "dit2"),
        ("data.num_frames=10", "data", "4n+1"),
    ],
)
def test_a_wrong_setting_is_named(override: str, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPES / "toy.yaml", [override], environment={})
    assert key in str(caught.value)
    assert told in str(caught.value)


def test_a_target_for_a_divergence_without_weight_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm: kl_target is 0\.1, but kl_weight is 0"):
        load_config(RECIPES / "toy.yaml", ["algorithm.kl_target=0.1", "algorithm.kl_weight=0"], environment={})


@pytest.mark.parametrize("override", ["steps", "=3", "seed.x=1"])
def test_a_wrong_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(RECIPES / "toy.yaml", [override], environment={})


@pytest.mark.parametrize("text", ["- a list", "a: [", "\xff"])
def test_a_file_that_is_no_recipe_is_named(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "broken.yaml"
    recipe.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(recipe, environment={})


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml.*No such file"):
        load_config(tmp_path / "absent.yaml", environment={})
