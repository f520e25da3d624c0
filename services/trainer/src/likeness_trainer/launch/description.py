"""What a run in a cluster is made of: its recipe, image, GPUs, volumes and secrets. Imports no Kubernetes client."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from likeness_trainer.errors import ConfigError

if TYPE_CHECKING:
    from likeness_trainer.config import TrainConfig

Manifest = dict[str, Any]
Kind = Literal["job", "jobset"]

MANAGER = "likeness-trainer"
"""Field manager of server-side apply, and the value of app.kubernetes.io/managed-by."""
SELECTOR = f"app.kubernetes.io/managed-by={MANAGER},app.kubernetes.io/component=trainer"
"""Selects the objects and pods of every run."""
REPLICATED_JOB = "node"
"""Name of the one Job in a JobSet: its pods are NAME-node-0-INDEX."""
MAX_NAME_LENGTH = 52
"""A pod's hostname is NAME-INDEX, or NAME-node-0-INDEX in a JobSet: a DNS label of at most 63 characters."""
MAX_JOBSET_NAME_LENGTH = MAX_NAME_LENGTH - len(f"-{REPLICATED_JOB}-0")


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
    priority_class: str | None = None
    queue: str | None = None
    """A Kueue LocalQueue: the run is made suspended, and the queue lets it start."""
    gpu_resource: str = "nvidia.com/gpu"
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
class RewardAccess:
    """Secrets in the namespace of the run that open the reward service."""

    token_secret: tuple[str, str] | None = None
    """Name of a Secret, and the key in it that holds the bearer token."""
    ca_secret: str | None = None
    """Secret whose ca.crt has signed the service's certificate."""
    client_secret: str | None = None
    """Secret of type kubernetes.io/tls with the trainer's own certificate, for mutual TLS."""


@dataclass(frozen=True)
class Launch:
    """Everything that the objects of one run are made of."""

    name: str
    config: TrainConfig
    placement: Placement
    version: str
    kind: Kind = "job"
    runs: Claim | None = None
    models: Claim | None = None
    data: Claim | None = None
    access: RewardAccess = RewardAccess()
    environment_secrets: tuple[str, ...] = ()
    """Secrets whose keys become environment variables, for example a tracker's key."""
    backoff_limit: int = 6
    grace_period_s: int = 600
    keep_finished_s: int | None = 7 * 24 * 3600

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object and pod."""
        return {**selector_labels(self.name), "app.kubernetes.io/part-of": "likeness",
                "app.kubernetes.io/version": self.version, "app.kubernetes.io/managed-by": MANAGER}  # fmt: skip


def selector_labels(name: str) -> dict[str, str]:
    """Returns the labels that select the pods of a run."""
    return {
        "app.kubernetes.io/name": "likeness-trainer",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "trainer",
    }


def pod_selector(name: str) -> str:
    """Returns the label selector of a run's pods, of whatever kind the run is."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(name).items())


def name_of(run_dir: str, kind: Kind) -> str:
    """Returns a name for the objects of a run: the last part of its folder as a DNS label, shortened with a hash."""
    longest = MAX_JOBSET_NAME_LENGTH if kind == "jobset" else MAX_NAME_LENGTH
    slug = re.sub(r"[^a-z0-9]+", "-", run_dir.rstrip("/").rpartition("/")[2].lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")
    if len(slug) <= longest:
        return slug
    return f"{slug[: longest - 9].rstrip('-')}-{hashlib.sha256(slug.encode()).hexdigest()[:8]}"


def require_name(name: str, kind: Kind) -> str:
    """Returns the name of a run's objects; raises ConfigError where Kubernetes would not take it."""
    longest = MAX_JOBSET_NAME_LENGTH if kind == "jobset" else MAX_NAME_LENGTH
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise ConfigError(
            f"--name is {name!r}; it must have lower-case letters, digits and '-' only, begin with a letter, not end "
            f"with '-', and have at most {longest} characters"
        )
    return name
