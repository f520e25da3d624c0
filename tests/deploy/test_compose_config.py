"""What the compositions say, without an engine: who may write, reach, use and know what."""

import os
import re
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml
from docker_engine import ROOT, NoEngine, compose_command

try:
    COMPOSE = compose_command()
except NoEngine as missing:
    pytest.skip(str(missing), allow_module_level=True)

CPU, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
NEEDED = {"LIKENESS_PACK": "/packs/anna", "LIKENESS_TOKEN_FILE": "/secrets/token"}


def run(file: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Resolves a composition with these variables and no others of Likeness."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIKENESS_")} | variables
    command = [*COMPOSE, "--file", str(ROOT / file), "config", "--format", "yaml"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@cache
def composition(file: str, with_token: bool = True) -> dict[str, Any]:
    """Returns a composition as Compose understands it."""
    done = run(file, **(NEEDED if with_token else {}))
    assert done.returncode == 0, done.stderr
    resolved: dict[str, Any] = yaml.safe_load(done.stdout)
    return resolved


SERVICES = [(file, service) for file in (CPU, GPU) for service in composition(file)["services"]]


@pytest.mark.parametrize(("file", "service"), SERVICES)
def test_services_have_no_more_rights_than_they_need(file: str, service: str) -> None:
    told = composition(file)["services"][service]
    assert told["user"] == "1000:1000"
    assert told["read_only"] is True
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert not told.keys() & {"privileged", "cap_add", "pid", "ipc"}
    limits = told["deploy"]["resources"]["limits"]
    assert int(limits["memory"]) > 0
    assert limits["pids"] > 0
    assert told["restart"] in ("no", "unless-stopped", "on-failure:3")


@pytest.mark.parametrize(("file", "service"), SERVICES)
def test_what_is_not_made_here_is_read_only(file: str, service: str) -> None:
    writable = {
        mount["target"] for mount in composition(file)["services"][service]["volumes"] if not mount.get("read_only")
    }
    allowed = {"people": {"/data"}, "trainer": {"/runs"}, "export-pack": {"/repository"}}
    assert writable == allowed.get(service, {"/dev/shm"} if file == GPU else set())


def neighbours(file: str, service: str) -> set[str]:
    """Returns the services that share a network with one."""
    services = composition(file)["services"]
    own = services[service].get("networks", {}).keys()
    return {name for name, told in services.items() if name != service and own & told.get("networks", {}).keys()}


def test_triton_is_reached_by_the_reward_service_alone() -> None:
    assert neighbours(GPU, "triton") == {"reward"}
    told = composition(GPU)
    assert told["services"]["triton"]["networks"].keys() == {"inference"}
    assert told["networks"]["inference"]["internal"] is True
    assert "ports" not in told["services"]["triton"]


@pytest.mark.parametrize("file", [CPU, GPU])
def test_only_loopback_is_published(file: str) -> None:
    services = composition(file)["services"]
    published = {(name, port["host_ip"]) for name, told in services.items() for port in told.get("ports", [])}
    assert published == {("reward", "127.0.0.1")}
    assert "trainer" in neighbours(file, "reward")


def test_images_travel_in_memory_that_both_sides_mount() -> None:
    told = composition(GPU)
    assert told["volumes"]["shared-memory"]["driver_opts"]["type"] == "tmpfs"
    for service in ("triton", "reward"):
        (mount,) = (each for each in told["services"][service]["volumes"] if each["target"] == "/dev/shm")
        assert mount["source"] == "shared-memory"
    assert "--triton-shared-memory=on" in told["services"]["reward"]["command"]


@pytest.mark.parametrize(("file", "names"), [(CPU, {"reward", "trainer"}), (GPU, {"reward", "trainer"})])
def test_the_token_is_known_to_both_ends_and_nobody_else(file: str, names: set[str]) -> None:
    told = composition(file)
    assert told["secrets"]["token"]["file"] == NEEDED["LIKENESS_TOKEN_FILE"]
    assert {name for name, each in told["services"].items() if each.get("secrets")} == names
    reward, trainer = told["services"]["reward"], told["services"]["trainer"]
    assert "--set=reward.token_file=/run/secrets/token" in trainer["command"]
    from_environment = reward["environment"].get("LIKENESS_REWARD_TOKEN_FILE") == "/run/secrets/token"
    assert from_environment or "--token-file=/run/secrets/token" in reward["command"]


def test_without_a_token_none_is_asked_for_on_the_toy_world() -> None:
    services = composition(CPU, with_token=False)["services"]
    assert services["reward"]["environment"]["LIKENESS_REWARD_TOKEN_FILE"] == ""
    assert "--set=reward.token_file=" in services["trainer"]["command"]


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_the_gpu_composition_says_what_it_needs(name: str) -> None:
    done = run(GPU, **{other: value for other, value in NEEDED.items() if other != name})
    assert done.returncode != 0
    assert name in done.stderr


def test_gpus_are_reserved_for_triton_and_the_trainer() -> None:
    services = composition(GPU)["services"]
    reserved = {
        name: told["deploy"]["resources"]["reservations"]["devices"]
        for name, told in services.items()
        if "reservations" in told["deploy"]["resources"]
    }
    assert reserved == {
        "triton": [{"capabilities": ["gpu"], "driver": "nvidia", "device_ids": ["0"]}],
        "trainer": [{"capabilities": ["gpu"], "driver": "nvidia", "count": -1}],
    }


@pytest.mark.parametrize(
    ("file", "order"),
    [
        (CPU, {("trainer", "reward", "service_healthy"), ("trainer", "people", "service_completed_successfully")}),
        (
            GPU,
            {
                ("triton", "export-pack", "service_completed_successfully"),
                ("reward", "triton", "service_healthy"),
                ("trainer", "reward", "service_healthy"),
            },
        ),
    ],
)
def test_each_waits_for_what_it_asks(file: str, order: set[tuple[str, str, str]]) -> None:
    services = composition(file)["services"]
    assert order == {
        (name, other, how["condition"])
        for name, told in services.items()
        for other, how in told.get("depends_on", {}).items()
    }
    grace = services["reward"]["stop_grace_period"]
    assert grace == "35s", "longer than the 30 s that the service gives running calls"


def test_every_variable_is_described() -> None:
    text = (ROOT / "docs" / "deploy-compose.md").read_text()
    for file in (CPU, GPU):
        used = set(re.findall(r"\$\{(LIKENESS_\w+)", (ROOT / file).read_text()))
        assert used
        assert {name for name in used if f"`{name}`" not in text} == set()
