"""The objects of one run in a cluster, as plain mappings: what is applied is what a dry run prints.

A Job with one indexed pod a node, a ConfigMap with the resolved recipe, and, when several processes work together, a
headless Service under which the pods find each other. Imports no Kubernetes client.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from likeness_trainer.config import TrainConfig, dump_config

Manifest = dict[str, Any]

MANAGER = "likeness-trainer"
"""Field manager of server-side apply, and the value of app.kubernetes.io/managed-by."""
SELECTOR = f"app.kubernetes.io/managed-by={MANAGER}"
CONTAINER = "trainer"
GPU_RESOURCE = "nvidia.com/gpu"
RENDEZVOUS_PORT = 29500
TORCHRUN_RESTARTS = 3
RECIPE_FOLDER = "/etc/likeness"
TOKEN_FOLDER = "/etc/likeness-token"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
WRONG_SETTING_EXIT_CODE = 2
"""The trainer's exit code for a recipe, file or row that is wrong; another try gives the same."""
MAX_NAME_LENGTH = 52
"""A pod's hostname is NAME-INDEX, a DNS label of at most 63 characters."""

START_SCRIPT = """\
# A new pod goes on with the run of the pod that it replaces.
if [ -e "$RUN_DIR/config.yaml" ]; then set -- "$@" --resume; fi
# Pod 0 keeps the store at which the processes meet, even before its own name resolves.
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then export PET_RDZV_CONF=is_host=true; else export PET_RDZV_CONF=is_host=false; fi
exec "$@"
"""


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, or a folder in one."""

    name: str
    sub_path: str = ""


@dataclass(frozen=True)
class Placement:
    """Where pods may run, and what they get."""

    nodes: int
    gpus_per_node: int
    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Manifest, ...] = ()
    runtime_class: str | None = None
    cpu: str | None = None
    memory: str | None = None
    shared_memory: str = "8Gi"

    @property
    def processes_per_node(self) -> int:
        """One a GPU; one on a node without."""
        return max(self.gpus_per_node, 1)

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.nodes * self.processes_per_node


@dataclass(frozen=True)
class Launch:
    """Everything that the objects of one run are made of."""

    name: str
    config: TrainConfig
    placement: Placement
    version: str
    runs: Claim | None = None
    models: Claim | None = None
    data: Claim | None = None
    token_secret: tuple[str, str] | None = None
    """Name of a Secret, and the key in it that holds the bearer token."""
    backoff_limit: int = 6
    grace_period_s: int = 600
    keep_finished_s: int | None = 7 * 24 * 3600

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object."""
        return {**selector_labels(self.name), "app.kubernetes.io/part-of": "likeness",
                "app.kubernetes.io/version": self.version, "app.kubernetes.io/managed-by": MANAGER}  # fmt: skip


def selector_labels(name: str) -> dict[str, str]:
    """Returns the labels that select the pods of a run."""
    return {
        "app.kubernetes.io/name": "likeness-trainer",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "trainer",
    }


def name_of(run_dir: str) -> str:
    """Returns a name for the objects of a run: the last part of its folder, as a DNS label of at most 52 characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_dir.rstrip("/").rpartition("/")[2].lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")
    if len(slug) <= MAX_NAME_LENGTH:
        return slug
    return f"{slug[: MAX_NAME_LENGTH - 9].rstrip('-')}-{hashlib.sha256(slug.encode()).hexdigest()[:8]}"


def manifests(launch: Launch) -> list[Manifest]:
    """Returns the Job first, then the objects that belong to it."""
    objects = [job(launch), config_map(launch)]
    return [*objects, service(launch)] if launch.placement.world_size > 1 else objects


def to_yaml(objects: list[Manifest]) -> str:
    """Returns the objects as one YAML stream; texts of several lines stay readable."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)


def owned_by(manifest: Manifest, job_name: str, job_uid: str) -> Manifest:
    """Returns an object that the cluster deletes together with its Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job_name, "uid": job_uid}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


def config_map(launch: Launch) -> Manifest:
    """Returns the ConfigMap with the resolved recipe."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(launch),
            "data": {"recipe.yaml": dump_config(launch.config)}}  # fmt: skip


def service(launch: Launch) -> Manifest:
    """Returns the headless Service that gives pod INDEX the name NAME-INDEX.NAME, from its first moment on."""
    port = {"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT, "protocol": "TCP"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector_labels(launch.name),
            "ports": [port]}  # fmt: skip
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(launch), "spec": spec}


def job(launch: Launch) -> Manifest:
    """Returns the indexed Job: one pod a node; a wrong setting ends it at once, an evicted pod does not count."""
    nodes = launch.placement.nodes
    wrong_setting = {"containerName": CONTAINER, "operator": "In", "values": [WRONG_SETTING_EXIT_CODE]}
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": launch.backoff_limit,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": wrong_setting},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
    }
    if launch.keep_finished_s is not None:
        spec["ttlSecondsAfterFinished"] = launch.keep_finished_s
    spec["template"] = {"metadata": {"labels": launch.labels}, "spec": _pod(launch)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(launch), "spec": spec}


def train_command(launch: Launch) -> list[str]:
    """Returns the command of every pod: the trainer itself, or torchrun when several processes work together."""
    train = ["train", f"{RECIPE_FOLDER}/recipe.yaml"]
    placement = launch.placement
    if placement.world_size == 1:
        return ["likeness-trainer", *train]
    endpoint = f"{launch.name}-0.{launch.name}:{RENDEZVOUS_PORT}"
    return [
        "torchrun", "--nnodes", str(placement.nodes), "--nproc-per-node", str(placement.processes_per_node),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint,
        "--max-restarts", str(TORCHRUN_RESTARTS), "-m", "likeness_trainer", *train,
    ]  # fmt: skip


def _metadata(launch: Launch) -> Manifest:
    return {"name": launch.name, "labels": launch.labels}


def _pod(launch: Launch) -> Manifest:
    """Returns the pod's spec. It meets the Pod Security Standard "restricted".

    Service links stay off: a Service likeness-trainer would put LIKENESS_TRAINER_PORT into the environment, and the
    trainer would read it as a setting.
    """
    placement = launch.placement
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": launch.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": launch.grace_period_s,
        "securityContext": user,
        "containers": [_container(launch)],
        "volumes": [volume for volume, _ in _volumes(launch)],
    }
    optional: Manifest = {
        "imagePullSecrets": [{"name": name} for name in placement.pull_secrets],
        "nodeSelector": placement.node_selector,
        "tolerations": list(placement.tolerations),
        "runtimeClassName": placement.runtime_class,
    }
    return {**pod, **{key: value for key, value in optional.items() if value}}


def _container(launch: Launch) -> Manifest:
    placement = launch.placement
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    requests = {"cpu": placement.cpu, "memory": placement.memory}
    limits = {"memory": placement.memory, GPU_RESOURCE: str(placement.gpus_per_node or "") or None}
    resources = {
        kind: values
        for kind, given in (("requests", requests), ("limits", limits))
        if (values := {name: value for name, value in given.items() if value is not None})
    }
    return {
        "name": CONTAINER,
        "image": placement.image,
        "imagePullPolicy": placement.pull_policy,
        "command": ["sh", "-c", START_SCRIPT, "start"],
        "args": train_command(launch),
        "workingDir": "/",
        "env": [
            {"name": "RUN_DIR", "value": launch.config.run_dir},
            {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        ],
        **({"resources": resources} if resources else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount for _, mount in _volumes(launch)],
    }


def _volumes(launch: Launch) -> list[tuple[Manifest, Manifest]]:
    """Returns (volume, mount) of everything that a pod reads or writes."""
    memory = {"medium": "Memory", "sizeLimit": launch.placement.shared_memory}
    volumes: list[tuple[Manifest, Manifest] | None] = [
        ({"name": "recipe", "configMap": {"name": launch.name}}, {"mountPath": RECIPE_FOLDER, "readOnly": True}),
        ({"name": "temporary", "emptyDir": {}}, {"mountPath": "/tmp"}),
        ({"name": "shared-memory", "emptyDir": memory}, {"mountPath": "/dev/shm"}),
        _claimed("runs", launch.runs) or ({"name": "runs", "emptyDir": {}}, {"mountPath": "/runs"}),
        _claimed("models", launch.models),
        _claimed("data", launch.data),
    ]
    if launch.token_secret is not None:
        name, key = launch.token_secret
        secret = {"secretName": name, "items": [{"key": key, "path": "token"}], "defaultMode": 0o440}
        volumes.append(({"name": "reward-token", "secret": secret}, {"mountPath": TOKEN_FOLDER, "readOnly": True}))
    return [(volume, {"name": volume["name"], **mount}) for volume, mount in filter(None, volumes)]


def _claimed(what: str, claim: Claim | None) -> tuple[Manifest, Manifest] | None:
    if claim is None:
        return None
    mount: Manifest = {"mountPath": f"/{what}"}
    if claim.sub_path:
        mount["subPath"] = claim.sub_path
    if what != "runs":
        mount["readOnly"] = True
    return {"name": what, "persistentVolumeClaim": {"claimName": claim.name}}, mount


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
