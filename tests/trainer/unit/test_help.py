"""The help names settings that exist."""

import pytest

from likeness_trainer.cli import MOST_CHANGED, build_parser
from likeness_trainer.config import setting_keys

KEYS = [key for settings in MOST_CHANGED.values() for key, _ in settings]


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_that_the_help_lists_exists(key: str) -> None:
    assert key in {*setting_keys(), "model.model_paths.dit"}


def test_the_help_of_train_groups_what_is_changed_most(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args(["train", "--help"])
    text = capsys.readouterr().out
    places = [
        text.index(part)
        for part in ("positional arguments", "settings that are changed", *MOST_CHANGED, "RUN/config.yaml")
    ]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--learning-rate", "1e-3"], "settings of the recipe are given as --set optimizer.learning_rate=1e-3"),
        (["--steps=6"], "settings of the recipe are given as --set steps=6"),
        (["--kl-weight"], "settings of the recipe are given as --set algorithm.kl_weight=VALUE"),
    ],
)
def test_a_setting_given_as_an_option_is_told_how_to_give_it(
    option: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["train", "recipe.yaml", *option])
    assert capsys.readouterr().err.rstrip().endswith(told)


def test_an_option_that_is_no_setting_gets_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["train", "recipe.yaml", "--fast"])
    assert capsys.readouterr().err.rstrip().endswith("unrecognized arguments: --fast")
