"""The compositions for real: they train, and what dies on the way changes no bit of the LoRA."""

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from compositions import CONNECT, CPU, GPU_SHAPE, STEPS, Composition
from docker_engine import Engine

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(scope="module")
def calm(composition: Callable[..., Composition], toy_image: str, token_file: Path) -> Composition:
    """A run to its end that nothing disturbs, with a token."""
    project = composition(*CPU, LIKENESS_TOKEN_FILE=str(token_file))
    project.up()
    project.reward_as_the_trainer_started = project.state("reward")
    project.wait_for_end()
    return project


def moment(text: str) -> datetime:
    """Returns the time that the engine tells in RFC 3339 with nanoseconds."""
    whole, _, fraction = re.sub(r"(Z|[+-]\d\d:\d\d)$", "", text).partition(".")
    offset = text[-6:] if text[-6] in "+-" else "+00:00"
    return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}{offset}")


def info(project: Composition, *more: str) -> subprocess.CompletedProcess[str]:
    """Asks the reward service on the host's port."""
    words = ["info", "--endpoint", f"localhost:{project.port}", "--timeout", "10", *more]
    return subprocess.run([sys.executable, "-m", "likeness_reward", *words], capture_output=True, text=True)


def test_it_trains_and_reports(calm: Composition) -> None:
    lines = (calm.run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    (calm.run / "report.html").unlink()
    calm("run", "--rm", "--no-deps", "trainer", "report", "/runs/toy")
    assert "</html>" in (calm.run / "report.html").read_text()


def test_services_start_in_order_of_health(calm: Composition) -> None:
    health = calm.reward_as_the_trainer_started["Health"]
    checks = [each["End"] for each in health["Log"] if each["ExitCode"] == 0]  # type: ignore[index]
    started = str(calm.state("trainer")["StartedAt"])
    assert moment(checks[0]) < moment(started)
    assert moment(str(calm.state("people")["FinishedAt"])) < moment(started)


def test_the_port_on_the_host_wants_the_token(calm: Composition, token_file: Path) -> None:
    assert info(calm, "--token-file", str(token_file)).returncode == 0
    refused = info(calm)
    assert refused.returncode != 0
    assert "no valid bearer token" in refused.stderr


def test_the_trainer_reaches_the_reward_service_and_nothing_outside(calm: Composition, engine: Engine) -> None:
    def reached(host: str, port: str) -> str:
        words = ("run", "--rm", "--no-deps", "--entrypoint", "python", "trainer", "-c", CONNECT, host, port)
        return calm(*words, check=False).strip()

    gateway = engine("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    assert reached("reward", "50051") == "reached"
    assert reached(gateway, str(calm.port)) == ""


def test_a_killed_reward_container_changes_nothing(composition, calm: Composition) -> None:
    disturbed = composition(*CPU)
    disturbed.up()
    disturbed.wait_for_steps(1)
    disturbed.crash("reward")
    disturbed.wait_for_end()
    disturbed.assert_same_lora(calm)
    assert info(disturbed).returncode == 0, "without LIKENESS_TOKEN_FILE no token is asked for"


def test_the_gpu_composition_trains_the_same_with_triton_on_the_cpu(
    composition, calm: Composition, triton_image: str, token_file: Path
) -> None:
    project = composition(*GPU_SHAPE, LIKENESS_TOKEN_FILE=str(token_file))
    project.up()
    project.wait_for_steps(1)
    project.crash("triton")
    project.wait_for_end()
    project.assert_same_lora(calm)
    log = project("logs", "--no-color", "reward")
    assert "images go there in shared memory" in log
    assert "ready again" in log, "the service has seen that Triton was away"
