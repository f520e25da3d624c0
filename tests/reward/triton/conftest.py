"""Model repositories, and Tritons that serve them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_triton import NoTriton, TritonProcess, installed_triton

from likeness_reward.face.detector import LetterboxKind
from likeness_reward.pack.pack import load_pack
from likeness_reward.pack.triton_repository import ExportOptions, export_repository


@pytest.fixture(scope="session")
def start_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TritonProcess]]:
    """Starts Tritons: start_triton(repository, port=None), ready."""
    try:
        installed_triton()
    except NoTriton as missing:
        pytest.skip(f"no Triton: {missing}")
    folder = tmp_path_factory.mktemp("triton")
    started: list[TritonProcess] = []

    def start(repository: Path, port: int | None = None) -> TritonProcess:
        started.append(TritonProcess(repository, folder, port))
        return started[-1].wait_until_ready()

    yield start
    for triton in started:
        triton.kill()


def export(
    pack: Path,
    target: Path,
    detector_size: tuple[int, int] | None = None,
    letterbox: LetterboxKind | None = None,
    **options: object,
) -> Path:
    """Returns a model repository for the Triton of these tests."""
    settings = ExportOptions(**({"runtime": "python"} | options))
    export_repository(load_pack(pack, detector_size=detector_size, letterbox=letterbox), target, settings)
    return target


@pytest.fixture(scope="session")
def export_pack() -> Callable[..., Path]:
    """`export` for tests: export_pack(pack, target, detector_size=None, letterbox=None, **options)."""
    return export
