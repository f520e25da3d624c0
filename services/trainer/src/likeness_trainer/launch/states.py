"""What a run in a cluster is doing, read from its objects. Pure: takes objects as the API server gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from likeness_trainer.launch.description import Manifest
from likeness_trainer.launch.failures import pod_trouble, troubles, verdict
from likeness_trainer.launch.objects import has_started, index_of, is_suspended, job_spec

STEP = re.compile(r"^step (\d+)/(\d+)\b")
"""The line that the trainer writes after each step, when it has no terminal."""


def state_of(workload: Manifest, pods: Iterable[Manifest] | None) -> str:
    """Returns ended, failed, stopping, queued, starting or running; without pods, as the status of the run counts."""
    ended = verdict(workload, ())
    if ended is not None:
        return "ended" if ended.succeeded else "failed"
    if workload["metadata"].get("deletionTimestamp"):
        return "stopping"
    if is_suspended(workload):
        return "queued"
    if pods is None:
        return "running" if _says_running(workload) else "starting"
    running = sum(pod.get("status", {}).get("phase") == "Running" and has_started(pod) for pod in pods)
    return "running" if running >= job_spec(workload)["completions"] else "starting"


def _says_running(workload: Manifest) -> bool:
    status = workload.get("status", {})
    if workload["kind"] == "Job":
        return int(status.get("ready") or 0) >= int(job_spec(workload)["completions"])
    return any(int(job.get("ready") or 0) > 0 for job in status.get("replicatedJobsStatus", []))


def last_step(lines: Iterable[str]) -> str | None:
    """Returns the last `step N/M ...` among lines of a log, or None."""
    return next((line for line in reversed(list(lines)) if STEP.match(line)), None)


def summary(workload: Manifest, pods: list[Manifest] | None) -> dict[str, Any]:
    """Returns a run in one line of values.

    Args:
        pods: of the run; without them its own status tells whether it runs.
    """
    spec = job_spec(workload)
    container = spec["template"]["spec"]["containers"][0]
    limits = container.get("resources", {}).get("limits", {})
    environment = {each["name"]: each.get("value") for each in container.get("env", [])}
    return {
        "name": workload["metadata"]["name"],
        "kind": workload["kind"],
        "state": state_of(workload, pods),
        "nodes": spec["completions"],
        "gpus_per_node": sum(int(value) for key, value in limits.items() if key not in {"memory", "cpu"}),
        "image": container["image"],
        "run_dir": environment.get("RUN_DIR"),
        "created": workload["metadata"].get("creationTimestamp"),
    }


def details(workload: Manifest, pods: list[Manifest], events: list[Manifest], step: str | None) -> dict[str, Any]:
    """Returns all that `status` tells about a run, ready for JSON."""
    ended = verdict(workload, pods)
    return {
        **summary(workload, pods),
        "step": step,
        "verdict": None if ended is None else ended.text,
        "troubles": [] if ended is not None else list(troubles(workload, pods, events)),
        "pods": [
            {
                "index": index_of(pod),
                "name": pod["metadata"]["name"],
                "phase": pod.get("status", {}).get("phase"),
                "node": pod.get("spec", {}).get("nodeName"),
                "trouble": pod_trouble(pod),
            }
            for pod in sorted(pods, key=lambda pod: (index_of(pod), str(pod["metadata"].get("creationTimestamp"))))
        ],
    }


def age(created: str | None, now: datetime | None = None) -> str:
    """Returns the time since an RFC 3339 time as kubectl writes it: 45s, 12m, 7h, 3d."""
    if created is None:
        return "?"
    seconds = int(((now or datetime.now(UTC)) - datetime.fromisoformat(created)).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"
