"""Parts of objects as the API server gives them."""

from __future__ import annotations

from collections.abc import Iterable

from likeness_trainer.launch.description import Manifest

INDEX = "batch.kubernetes.io/job-completion-index"


def job_spec(workload: Manifest) -> Manifest:
    """Returns the spec of a Job, or of the one Job in a JobSet."""
    spec: Manifest = workload["spec"]
    return spec if workload["kind"] == "Job" else dict(spec["replicatedJobs"][0]["template"]["spec"])


def index_of(pod: Manifest) -> int:
    """Returns a pod's number in its Job; -1 for a pod without."""
    metadata = pod["metadata"]
    found = (metadata.get("annotations") or {}).get(INDEX) or (metadata.get("labels") or {}).get(INDEX)
    return -1 if found is None else int(found)


def newest(pods: Iterable[Manifest], index: int) -> Manifest | None:
    """Returns the pod that was made last under a number, or None."""
    of_index = [pod for pod in pods if index_of(pod) == index]
    return max(of_index, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), default=None)


def labels_of(manifest: Manifest) -> dict[str, str]:
    """Returns the labels of an object."""
    return dict(manifest["metadata"].get("labels") or {})


def is_suspended(workload: Manifest) -> bool:
    """Returns whether a run waits to be let in, by a queue or by hand."""
    return bool(workload.get("spec", {}).get("suspend"))


def has_started(pod: Manifest) -> bool:
    """Returns whether a pod's trainer runs or has run."""
    states = [container.get("state", {}) for container in pod.get("status", {}).get("containerStatuses", [])]
    return any("running" in state or "terminated" in state for state in states)
