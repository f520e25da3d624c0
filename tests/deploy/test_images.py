"""The images as they are built: who runs in them, what they hold, and that they run with nothing to write to."""

import json
import os
import subprocess
import time
from typing import Any

import pytest
from compositions import TOY_PACK
from docker_engine import ROOT, Engine, torch_index

pytestmark = pytest.mark.timeout(3600)
REWARD = ROOT / "services" / "reward" / "Dockerfile"
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
names = pytest.mark.parametrize("name", ["reward", pytest.param("trainer", marks=pytest.mark.slow)])
MODELS = (".onnx", ".safetensors", ".pth", ".pt", ".gguf", ".ckpt")


def config_of(engine: Engine, image: str) -> dict[str, Any]:
    """Returns the configuration of an image."""
    config: dict[str, Any] = json.loads(engine("image", "inspect", "--format", "{{json .Config}}", image))
    return config


def in_image(engine: Engine, image: str, *command: str, check: bool = True, options: tuple[str, ...] = ()) -> str:
    """Returns what a command prints in a hardened container of an image without a network."""
    program, *arguments = command
    words = ("run", "--rm", "--network", "none", *HARDENED, *options, "--entrypoint", program, image, *arguments)
    return engine(*words, check=check)


def packages_in(engine: Engine, image: str) -> set[str]:
    """Returns the names of the Python packages in an image."""
    code = "from importlib.metadata import distributions as d; print(*{each.name.lower() for each in d()})"
    return set(in_image(engine, image, "python", "-c", code).split())


@names
def test_nobody_has_rights_and_nothing_is_written(name: str, engine: Engine, request: pytest.FixtureRequest) -> None:
    image = request.getfixturevalue(f"{name}_image")
    config = config_of(engine, image)
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == [f"likeness-{name}"], "a list: no shell stands between it and SIGTERM"
    assert config["Labels"]["org.opencontainers.image.title"] == f"likeness-{name}"
    assert config["Labels"]["org.opencontainers.image.version"] == "0.1.0"
    assert f"likeness-{name}" in engine("run", "--rm", "--network", "none", *HARDENED, image, "--help")
    assert in_image(engine, image, "id", "-u") == "1000"
    refused = in_image(engine, image, "sh", "-c", "touch /opt/likeness/x 2>&1; true")
    assert "Read-only file system" in refused


def models_in(engine: Engine, image: str) -> list[str]:
    """Returns the files of more than 100 kB in an image that are models; the onnx package brings some for its tests."""
    found = in_image(
        engine, image, "find", "/opt", "/recipes", "/srv", "/home", "-size", "+100k", check=False
    ).splitlines()
    assert any(path.endswith(".so") for path in found), "the search sees no file"
    return [path for path in found if path.endswith(MODELS) and "/onnx/backend/test/" not in path]


@names
def test_no_model_is_baked_in(name: str, engine: Engine, request: pytest.FixtureRequest) -> None:
    assert models_in(engine, request.getfixturevalue(f"{name}_image")) == []


@pytest.mark.slow
def test_the_toy_image_holds_the_toy_alone(engine: Engine, toy_image: str) -> None:
    models = models_in(engine, toy_image)
    assert models
    assert all("/likeness_toyworld/weights/" in path for path in models)


def test_the_reward_image_holds_no_torch(engine: Engine, reward_image: str) -> None:
    packages = packages_in(engine, reward_image)
    assert {"likeness-reward", "onnxruntime", "tritonclient", "opentelemetry-sdk"} <= packages
    assert not {"torch", "torchvision", "onnx2torch", "pip"} & packages
    assert not [name for name in packages if name.startswith("nvidia")]


@names
def test_the_versions_are_those_of_the_constraints(name: str, engine: Engine, request: pytest.FixtureRequest) -> None:
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    code = "from importlib.metadata import distributions as d; print(*{f'{each.name}=={each.version}' for each in d()})"
    packages = in_image(engine, request.getfixturevalue(f"{name}_image"), "python", "-c", code).lower().split()
    found = {name: version.partition("+")[0] for name, version in (text.split("==") for text in packages)}
    assert {package for package in found if package in pinned}
    assert {package: version for package, version in found.items() if package in pinned} == {
        package: pinned[package] for package in found if package in pinned
    }


@pytest.mark.slow
def test_the_trainer_reads_its_recipes(engine: Engine, trainer_image: str, toy_image: str) -> None:
    code = (
        "from pathlib import Path; from likeness_trainer.config import load_config;"
        "recipes = [load_config(path, environment={}) for path in Path('/recipes').glob('*.yaml')];"
        "print(*[recipe.model.architecture for recipe in recipes])"
    )
    architectures = in_image(engine, trainer_image, "python", "-c", code).split()
    assert "likeness-toy" in architectures
    assert "wan-2.1-t2v-1.3b" in architectures
    assert "torchrun" in in_image(engine, trainer_image, "sh", "-c", "command -v torchrun")
    assert "likeness-toyworld" in packages_in(engine, toy_image) - packages_in(engine, trainer_image)


def test_the_health_check_tells_what_the_service_is(engine: Engine, reward_image: str) -> None:
    check = config_of(engine, reward_image)["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    pack = ("--volume", f"{TOY_PACK}:/packs/default:ro")
    name = engine("run", "--detach", "--network", "none", *HARDENED, *pack, reward_image)
    try:
        give_up_at = time.monotonic() + 60
        while engine.completed([engine.docker, "exec", name, *check[1:]], 30).returncode != 0:
            assert time.monotonic() < give_up_at, engine("logs", name)
            time.sleep(0.2)
        elsewhere = ("exec", "--env", "LIKENESS_REWARD_HEALTH_PORT=50059")
        asked = engine.completed([engine.docker, *elsewhere, name, *check[1:]], 30)
        assert (asked.returncode, "UNAVAILABLE" in asked.stderr) == (1, True)
        engine("stop", "--time", "30", name)
        state = json.loads(engine("inspect", "--format", "{{json .State}}", name))
        assert state["ExitCode"] == 0, "SIGTERM reaches the service, which drains and ends"
    finally:
        engine("rm", "--force", name)


def test_a_missing_pack_ends_the_container_with_a_reason(engine: Engine, reward_image: str) -> None:
    done: subprocess.CompletedProcess[str] = engine.completed(
        [engine.docker, "run", "--rm", "--network", "none", *HARDENED, reward_image], 60
    )
    assert done.returncode == 4
    assert "/packs/default" in done.stderr


@pytest.mark.slow
def test_gradients_are_a_build_argument(engine: Engine, reward_image: str) -> None:
    if os.environ.get("LIKENESS_DEPLOY_GRADIENTS") != "1":
        pytest.skip("builds an image with torch, gigabytes: set LIKENESS_DEPLOY_GRADIENTS=1")
    image = engine.build(
        "likeness-reward:gradients",
        REWARD,
        ROOT,
        EXTRAS="server,triton,otel,gradients",
        TORCH_INDEX=torch_index(REWARD),
    )
    added = packages_in(engine, image) - packages_in(engine, reward_image)
    assert {"torch", "torchvision", "onnx2torch"} <= added
