"""A run of a few steps on the toy world, with a real reward server as its own process."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import RECIPE, SMALL, Server, free_port


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that stays up for the session."""
    pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    running = Server(free_port(), tmp_path_factory.mktemp("server") / "server.log").start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and held_out/ data sets."""
    dataset = pytest.importorskip("likeness_toyworld.dataset", reason="the toy world is not installed")
    folder = tmp_path_factory.mktemp("people")
    dataset.write_dataset(folder / "train", 4, 0)
    dataset.write_dataset(folder / "held_out", 2, 0, held_out=True)
    return folder


@pytest.fixture(scope="session")
def settings(people: Path) -> Callable[..., list[str]]:
    """Returns a function that gives the overrides of a small run."""

    def make(run_dir: Path, endpoint: str, *more: str) -> list[str]:
        return [
            f"run_dir={run_dir}", f"reward.endpoint={endpoint}", f"data.metadata={people / 'train' / 'metadata.csv'}",
            f"evaluation.metadata={people / 'held_out' / 'metadata.csv'}", *SMALL, *more,
        ]  # fmt: skip

    return make


@pytest.fixture(scope="session")
def run_here(settings: Callable[..., list[str]]) -> Callable[..., Any]:
    """Returns a function that trains in this process, where DiffSynth is imported already."""

    def run(run_dir: Path, endpoint: str, *more: str, resume: bool = False, accept_other_reward: bool = False) -> Any:
        from likeness_trainer.config import load_config
        from likeness_trainer.preflight import check_run
        from likeness_trainer.run.progress import RunProgress
        from likeness_trainer.train import train

        config = load_config(RECIPE, settings(run_dir, endpoint, *more), environment={})
        return train(config, check_run(config, resume, accept_other_reward), resume, RunProgress(quiet=True))

    return run


@pytest.fixture(scope="session")
def command(settings: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Returns a function that gives the command line of a small run."""

    def make(run_dir: Path, endpoint: str, *flags: str, more: tuple[str, ...] = ()) -> list[str]:
        overrides = [part for text in settings(run_dir, endpoint, *more) for part in ("--set", text)]
        return [sys.executable, "-m", "likeness_trainer", "train", str(RECIPE), *overrides, *flags]

    return make


@pytest.fixture(scope="session")
def undisturbed(run_here: Callable[..., Any], server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run_here(path, server.endpoint)
    return path


@pytest.fixture(scope="session")
def person_png(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of a painted person."""
    import numpy as np
    from PIL import Image

    from likeness_toyworld import painter

    motion = painter.sample_motion(np.random.default_rng(5))
    path = tmp_path_factory.mktemp("person") / "person.png"
    Image.fromarray(painter.paint_clip(painter.sample_identity(5), motion, 9, 64)[0][0]).save(path)
    return path
