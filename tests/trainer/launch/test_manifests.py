"""What is applied is valid, safe and starts the trainer in the way that it expects."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import custom_resources
import kubernetes_validate
import pytest
import yaml
from api_server import ApiServer, Refused
from launch_support import RECIPE, SUBMIT, Run
from torch.distributed.run import get_args_parser

from likeness_trainer.cli import build_parser
from likeness_trainer.config import load_config
from likeness_trainer.errors import ConfigError
from likeness_trainer.launch.description import name_of, require_name

Manifest = dict[str, Any]

SHAPES = {
    "one GPU": (),
    "one node": ("--gpus-per-node", "4"),
    "two nodes": ("--nodes", "2", "--gpus-per-node", "2"),
    "jobset": ("--nodes", "2", "--gpus-per-node", "2", "--kind", "jobset"),
    "everything": (
        "--nodes", "2", "--cpu", "8", "--memory", "64Gi", "--node-selector", "gpu=h100", "--toleration",
        "nvidia.com/gpu:NoSchedule", "--toleration", "team=studio", "--runtime-class", "nvidia", "--priority-class",
        "high", "--pull-secret", "registry", "--queue", "gpus", "--reward-token-secret", "likeness:key",
        "--reward-ca-secret", "ca", "--reward-client-secret", "client", "--env-secret", "wandb",
    ),
    "no GPU": ("--gpus-per-node", "0"),
}  # fmt: skip


@pytest.fixture(params=SHAPES)
def objects(request: pytest.FixtureRequest, run: Run) -> list[Manifest]:
    """The objects of a dry run, for each shape."""
    return dry_run(run, *SHAPES[request.param])


def dry_run(run: Run, *options: str) -> list[Manifest]:
    command = run(*SUBMIT, *options, "--dry-run")
    assert command.code() == 0
    return list(yaml.safe_load_all(command.out))


def pod_of(objects: list[Manifest]) -> Manifest:
    spec = objects[0]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if objects[0]["kind"] == "JobSet" else spec
    return job["template"]


def words_of(objects: list[Manifest]) -> list[str]:
    return pod_of(objects)["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_objects_are_valid(objects: list[Manifest], version: str) -> None:
    for each in objects:
        if each["kind"] == "JobSet":
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inside"},
                   "spec": each["spec"]["replicatedJobs"][0]["template"]["spec"]}  # fmt: skip
            kubernetes_validate.validate(job, version, strict=True)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_pods_meet_the_standard_restricted(objects: list[Manifest]) -> None:
    spec = pod_of(objects)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {key for volume in spec["volumes"] for key in volume} <= {
        "name", "configMap", "emptyDir", "persistentVolumeClaim", "secret"}  # fmt: skip
    (container,) = spec["containers"]
    rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == rights
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False


def test_pods_have_the_labels_that_the_reward_service_lets_in(objects: list[Manifest]) -> None:
    """Those of the chart's NetworkPolicy for the reward pods."""
    labels = pod_of(objects)["metadata"]["labels"]
    assert labels["app.kubernetes.io/part-of"] == "likeness"
    assert labels["app.kubernetes.io/component"] == "trainer"


def test_every_volume_is_mounted_and_every_mount_has_a_volume(objects: list[Manifest]) -> None:
    spec = pod_of(objects)["spec"]
    mounts = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
    assert sorted(mounts) == sorted(volume["name"] for volume in spec["volumes"])


def test_the_trainer_understands_its_command(objects: list[Manifest]) -> None:
    words = words_of(objects)
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        assert parsed.training_script == "likeness_trainer"
        assert parsed.module is True
        assert parsed.shutdown_timeout == 600
        words = parsed.training_script_args
    else:
        assert words[0] == "likeness-trainer"
        words = words[1:]
    assert build_parser().parse_args(words).recipe == Path("/etc/likeness/recipe/recipe.yaml")


def test_the_recipe_in_the_config_map_is_the_one_that_was_given(objects: list[Manifest], tmp_path: Path) -> None:
    (config_map,) = (each for each in objects if each["kind"] == "ConfigMap")
    file = tmp_path / "recipe.yaml"
    file.write_text(config_map["data"]["recipe.yaml"])
    there, here = load_config(file, environment={}), load_config(RECIPE, environment={})
    assert there.model_copy(update={"run_dir": "", "reward": None}) == here.model_copy(
        update={"run_dir": "", "reward": None})  # fmt: skip
    assert there.run_dir == "/runs/anna"


def test_processes_of_several_nodes_meet_at_the_first_pod(run: Run) -> None:
    job, _, service = dry_run(run, *SHAPES["two nodes"])
    words = words_of([job])
    assert words[words.index("--rdzv-endpoint") + 1] == "anna-0.anna:29500"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "anna"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    variables = {each["name"]: each.get("value") for each in pod_of([job])["spec"]["containers"][0]["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_jobset_names_its_first_pod_as_its_controller_does(run: Run) -> None:
    job_set, config_map = dry_run(run, *SHAPES["jobset"])
    words = words_of([job_set])
    assert words[words.index("--rdzv-endpoint") + 1] == "anna-node-0-0.anna:29500"
    assert job_set["spec"]["network"]["subdomain"] == "anna"
    assert config_map["kind"] == "ConfigMap"


def test_jobset_knows_every_field(run: Run) -> None:
    (job_set, _) = dry_run(run, *SHAPES["jobset"], "--queue", "gpus")
    assert custom_resources.check(job_set)


@pytest.mark.parametrize(("index", "is_host"), [("0", "true"), ("1", "false")])
@pytest.mark.parametrize("begun", [False, True])
def test_the_start_script_resumes_and_lets_pod_0_keep_the_store(
    run: Run, tmp_path: Path, index: str, is_host: str, begun: bool
) -> None:
    spec = pod_of(dry_run(run))["spec"]["containers"][0]
    if begun:
        (tmp_path / "config.yaml").touch()
    shown = ["sh", "-c", 'echo "$PET_RDZV_CONF" "$@"', "shown", "train", "recipe.yaml"]
    told = subprocess.run(
        [*spec["command"], *shown], capture_output=True, text=True, check=True,
        env={**os.environ, "RUN_DIR": str(tmp_path), "JOB_COMPLETION_INDEX": index},
    ).stdout  # fmt: skip
    assert told == f"is_host={is_host} train recipe.yaml{' --resume' if begun else ''}\n"


@pytest.mark.slow
def test_torchrun_starts_with_the_variables_of_the_script(run: Run, tmp_path: Path) -> None:
    """The command of a node with two processes, with a script that tells its rank in the trainer's place."""
    spec = pod_of(dry_run(run, "--gpus-per-node", "2"))["spec"]["containers"][0]
    (tmp_path / "likeness_trainer.py").write_text(
        "import os, sys\n"
        "told = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\"\n"
        "os.write(1, told.encode())\n"
    )  # fmt: skip
    words = [sys.executable, "-m", "torch.distributed.run", *spec["args"][1:]]
    told = subprocess.run(
        [*spec["command"], *words], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "RUN_DIR": str(tmp_path), "JOB_COMPLETION_INDEX": "0", "PYTHONPATH": str(tmp_path)},
    ).stdout  # fmt: skip
    assert sorted(told.splitlines()) == [
        f"rank {rank} of 2 ['train', '/etc/likeness/recipe/recipe.yaml']" for rank in (0, 1)
    ]


def test_kubectl_accepts_a_dry_run(server: ApiServer, kubeconfig: Path, run: Run, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = run(*SUBMIT, *SHAPES["two nodes"], "--dry-run", "--namespace", "studio")
    assert command.code() == 0
    told = subprocess.run(
        [kubectl, "create", "--dry-run=client", "--validate=false", "-f", "-", "--cache-dir", str(tmp_path)],
        input=command.out, capture_output=True, text=True, timeout=60,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )  # fmt: skip
    assert told.stdout == (
        "job.batch/anna created (dry run)\nconfigmap/anna created (dry run)\nservice/anna created (dry run)\n"
    ), told.stderr
    assert server.objects == {}


def test_a_dry_run_asks_nobody(server: ApiServer, run: Run) -> None:
    dry_run(run)
    assert server.requests == []


def test_a_dry_run_of_the_server_keeps_nothing(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, *SHAPES["two nodes"], "--dry-run", "server")
    assert command.code() == 0
    assert [each["kind"] for each in yaml.safe_load_all(command.out)] == ["Job", "ConfigMap", "Service"]
    assert len(server.asked("PATCH", "", dryRun="All")) == 3
    assert server.objects == {}


def test_a_dry_run_of_the_server_finds_what_is_invalid(server: ApiServer, run: Run) -> None:
    server.refuse("PATCH", "jobs", Refused(422, "Invalid", "resources.limits: must be greater than zero"))
    command = run(*SUBMIT, "--dry-run", "server")
    assert command.code() == 2
    assert "must be greater than zero" in str(command.error)
    assert command.out == ""


def test_doubts_are_told_before_anything_is_made(run: Run) -> None:
    command = run("submit", str(RECIPE), "--image", "i", "--dry-run")
    assert command.code() == 0
    assert "no --runs-claim: the run and its LoRA are lost with the pod" in command.err
    assert "reward.endpoint is localhost:50051, the pod itself; name the service with --reward-endpoint" in command.err
    assert "the recipe reads models/Wan2.1-T2V-1.3B/diffusion_pytorch_model.safetensors, and no --models" in command.err


def test_a_run_without_doubts_is_quiet(run: Run) -> None:
    command = run(*SUBMIT, "--dry-run")
    assert command.code() == 0
    assert command.err == ""


@pytest.mark.parametrize(
    ("run_dir", "expected"), [("runs/Wan2.2 Anna", "wan2-2-anna"), ("/runs/42/", "run-42"), ("a/" + "x" * 60, None)]
)
def test_a_run_is_named_after_its_folder(run_dir: str, expected: str | None) -> None:
    name = name_of(run_dir, "job")
    assert require_name(name, "job") == name
    assert len(name) <= 52
    assert expected in {None, name}


@pytest.mark.parametrize("name", ["Anna", "-anna", "anna-", "1anna", "a.b", "", "x" * 53])
def test_a_name_that_kubernetes_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name is"):
        require_name(name, "job")


def test_pods_of_a_jobset_have_longer_names_so_theirs_is_shorter() -> None:
    assert require_name("x" * 45, "jobset") == "x" * 45
    with pytest.raises(ConfigError, match="at most 45 characters"):
        require_name("x" * 46, "jobset")
