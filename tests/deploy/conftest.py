"""The engine, the images and the projects of the tests that need Docker.

Those tests run with LIKENESS_DEPLOY=1, as `make test-deploy` does; they are marked `engine`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compositions import Composition
from docker_engine import ROOT, Engine, NoEngine, base_named_in, open_engine, provide_base, torch_index

REWARD, TRAINER = (ROOT / "services" / name / "Dockerfile" for name in ("reward", "trainer"))
BUILT: dict[str, tuple[float, int]] = {}


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine with the images' base."""
    if os.environ.get("LIKENESS_DEPLOY") != "1":
        pytest.skip("needs a Docker engine and builds images: run `make test-deploy`")
    try:
        opened = open_engine()
    except NoEngine as missing:
        pytest.skip(str(missing))
    opened.built = BUILT
    try:
        try:
            provide_base(opened, base_named_in(REWARD))
        except NoEngine as missing:
            pytest.skip(str(missing))
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="session")
def reward_image(engine: Engine) -> str:
    """The image of the reward service, under the name that the compositions give it."""
    return engine.build("likeness-reward", REWARD, ROOT)


@pytest.fixture(scope="session")
def toy_image(engine: Engine) -> str:
    """The image of the trainer with the toy world, under the name that the compositions give it."""
    return engine.build("likeness-trainer:toy", TRAINER, ROOT, target="toy", TORCH_INDEX=torch_index(TRAINER))


@pytest.fixture(scope="session")
def trainer_image(engine: Engine, toy_image: str) -> str:
    """The image of the trainer; its layers are the toy's."""
    return engine.build("likeness-trainer", TRAINER, ROOT, TORCH_INDEX=torch_index(TRAINER))


@pytest.fixture(scope="session")
def triton_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stand-in for NVIDIA's image: the Triton of nvidia-pytriton, with its python backend, on the CPU."""
    context = tmp_path_factory.mktemp("triton_stand_in")
    (context / "requirements.txt").write_text((ROOT / "requirements-triton.txt").read_text())
    return engine.build(
        "likeness-test-triton", Path(__file__).parent / "triton_stand_in" / "Dockerfile", context,
        BASE=base_named_in(REWARD),
    )  # fmt: skip


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a bearer token."""
    path = tmp_path_factory.mktemp("secret") / "token"
    path.write_text("open-sesame\n")
    return path


@pytest.fixture(scope="module")
def composition(
    engine: Engine, reward_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Composition]]:
    """Returns a function that gives a project of some files with some variables; all are taken down afterwards."""
    projects: list[Composition] = []

    def make(*files: str, **variables: str) -> Composition:
        projects.append(Composition(engine, files, tmp_path_factory.mktemp("runs"), **variables))
        return projects[-1]

    yield make
    for project in projects:
        project.down()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs a Docker engine."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker("engine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was built, how long it took and how large it is."""
    if BUILT:
        terminalreporter.section("images")
    for tag, (seconds, size) in BUILT.items():
        terminalreporter.write_line(f"{seconds:6.0f} s  {size / 1e6:7.0f} MB  {tag}")
