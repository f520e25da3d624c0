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
