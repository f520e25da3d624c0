"""Why pods do not start and runs do not end well, in words. Pure: takes objects as the API server gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from likeness_trainer.launch.description import REPLICATED_JOB, Manifest
from likeness_trainer.launch.objects import has_started, index_of, job_spec

IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
                           "ImageInspectError", "RegistryUnavailable"})  # fmt: skip
CONFIGURATION_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
PLACEMENT_HINTS = (
    ("insufficient nvidia.com/gpu", "no node has as many free GPUs as --gpus-per-node; wait, or ask for fewer"),
    ("insufficient memory", "no node has as much free memory as --memory"),
    ("insufficient cpu", "no node has as many free CPUs as --cpu"),
    ("untolerated taint", "nodes are reserved; --toleration KEY lets the pods onto them"),
    ("node affinity/selector", "no node has the labels of --node-selector"),
    ("persistentvolumeclaim", "look at the claims: `kubectl get pvc`"),
)
EVENT_REASONS = {
    "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached",
    "FailedCreatePodSandBox": "the node cannot make the pod's network",
    "NetworkNotReady": "the node's network is not ready",
}
"""Events about pods whose cause the pods' own status does not tell."""
EXIT_CODES = {
    2: "a setting, file or row is wrong",
    75: "the reward server stayed away",
    134: "aborted",
    137: "killed by SIGKILL",
    139: "segmentation fault",
    143: "ended by SIGTERM",
}


@dataclass(frozen=True)
class Verdict:
    """How a run ended."""

    succeeded: bool
    text: str


def troubles(workload: Manifest, pods: Sequence[Manifest], events: Iterable[Manifest]) -> Iterator[str]:
    """Yields what keeps the pods of a run from being made or started, or has ended one, each as a sentence.

    Args:
        events: those of the namespace that warn; the ones about other objects, or from before the run, are left out.
    """
    waiting = {pod["metadata"]["name"] for pod in pods if not has_started(pod)}
    made = {index_of(pod) for pod in pods if pod.get("status", {}).get("phase") != "Failed"}
    all_made = len(made) >= job_spec(workload)["completions"]
    for event in events:
        if _time_of(event) < str(workload["metadata"].get("creationTimestamp") or ""):
            continue
        if event.get("involvedObject", {}).get("kind") == "Pod":
            yield from _pod_event_trouble(waiting, event)
        elif not all_made:
            yield from _job_event_trouble(workload["metadata"]["name"], event)
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        trouble = pod_trouble(pod)
        if trouble is not None:
            yield f"pod {pod['metadata']['name']}: {trouble}"


def pod_trouble(pod: Manifest) -> str | None:
    """Returns why a pod does not start, or why it ended early; None when it is well, or ended well."""
    status = pod.get("status", {})
    ended = _ended(pod)
    if ended is not None:
        return ended
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _placement_trouble(condition)
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        trouble = _waiting_trouble(container, waiting.get("reason", ""), waiting.get("message", ""))
        if trouble is not None:
            return trouble
    return None


def verdict(workload: Manifest, pods: Iterable[Manifest]) -> Verdict | None:
    """Returns how a run ended, with what its pods tell of the cause; None while it has not ended."""
    name = workload["metadata"]["name"]
    for condition in workload.get("status", {}).get("conditions", []):
        if condition["status"] != "True":
            continue
        if condition["type"] in {"Complete", "Completed"}:
            return Verdict(True, f"run {name} has ended well")
        if condition["type"] == "Failed":
            reason = condition.get("reason") or "no reason given"
            told = f"run {name} has failed ({reason}: {condition.get('message', '')})"
            causes = [f"pod {pod['metadata']['name']}: {cause}" for pod in pods if (cause := _ended(pod))]
            return Verdict(False, "\n  ".join([told, *causes]))
    return None


def _ended(pod: Manifest) -> str | None:
    """Returns why a pod ended early, or None."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"taken off its node ({condition.get('reason', '')}: {condition.get('message', '')})"
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}"
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        terminated = container.get("state", {}).get("terminated")
        if terminated is not None and terminated.get("exitCode") != 0:
            return _exit_trouble(terminated)
    return None


def _exit_trouble(terminated: Manifest) -> str:
    code, message = terminated.get("exitCode"), terminated.get("message", "")
    if terminated.get("reason") == "OOMKilled":
        return (
            f"out of memory: the container used more than its limit (OOMKilled, exit code {code}). Give more --memory"
        )
    known = f" ({EXIT_CODES[code]})" if code in EXIT_CODES else ""
    told = f"ended with exit code {code}{known}"
    if re.search(r"exitcode\s*:\s*-9\b", message):
        told += ": a process was killed by SIGKILL, most often because memory ran out"
    last = next((line.strip() for line in reversed(message.splitlines()) if line.startswith("error")), "")
    return f"{told}: {last}" if last else told


def _placement_trouble(condition: Manifest) -> str:
    message = condition.get("message", "")
    if condition.get("reason") == "SchedulingGated":
        return "not to be placed yet: a queue holds it back"
    hints = [hint for part, hint in PLACEMENT_HINTS if part in message.lower()]
    return f"no node can take it ({message.rstrip('.')})" + (f": {'; '.join(hints)}" if hints else "")


def _waiting_trouble(container: Manifest, reason: str, message: str) -> str | None:
    if reason in IMAGE_REASONS:
        return f"the image {container.get('image')} cannot be pulled ({reason}: {message}){_image_hint(message)}"
    if reason in CONFIGURATION_REASONS:
        return f"the container cannot be made ({reason}: {message})"
    if reason == "CrashLoopBackOff":
        last = container.get("lastState", {}).get("terminated")
        return f"it ends each time it is started ({_exit_trouble(last) if last else message})"
    return None


def _image_hint(message: str) -> str:
    lowered = message.lower()
    if any(word in lowered for word in ("unauthorized", "denied", "forbidden", "no basic auth")):
        return ". The registry wants credentials: --pull-secret, or the name is wrong"
    if "not found" in lowered or "manifest unknown" in lowered:
        return ". There is no such image or tag: --image"
    if any(word in lowered for word in ("no such host", "timeout", "connection refused", "x509")):
        return ". The node does not reach the registry"
    return ""


def _job_event_trouble(name: str, event: Manifest) -> Iterator[str]:
    """Yields why the Job of a run, NAME or, in a JobSet, NAME-node-0, cannot make pods."""
    about, message = event.get("involvedObject", {}), event.get("message", "")
    if event.get("reason") != "FailedCreate" or about.get("name") not in {name, f"{name}-{REPLICATED_JOB}-0"}:
        return
    if "exceeded quota" in message:
        yield f"no pod can be made, the namespace's quota is used up: {message}"
    elif "violates PodSecurity" in message:
        yield f"no pod can be made, the namespace's Pod Security Standard refuses it: {message}"
    else:
        yield f"no pod can be made: {message}"


def _pod_event_trouble(waiting: set[str], event: Manifest) -> Iterator[str]:
    pod, reason = event["involvedObject"].get("name"), event.get("reason", "")
    if pod in waiting and reason in EVENT_REASONS:
        yield f"pod {pod}: {EVENT_REASONS[reason]} ({event.get('message', '')})"


def _time_of(event: Manifest) -> str:
    """Returns when an event happened last; RFC 3339 in UTC, so that texts compare as times."""
    for key in ("lastTimestamp", "eventTime"):
        if event.get(key):
            return str(event[key])
    return str(event["metadata"].get("creationTimestamp") or "")
