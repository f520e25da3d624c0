"""Why pods do not start and runs do not end well, in words that name what to do."""

from typing import Any

import pytest
from api_server import container

from likeness_trainer.launch.failures import pod_trouble, troubles, verdict

JOB = {"kind": "Job", "metadata": {"name": "anna", "creationTimestamp": "2026-03-01T10:00:00Z"},
       "spec": {"completions": 2}}  # fmt: skip


def pod(index: int = 0, **status: Any) -> dict[str, Any]:
    number = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {"metadata": {"name": f"anna-{index}-x", "annotations": number}, "status": status}


def unschedulable(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return pod(phase="Pending", containerStatuses=[container(waiting={"reason": reason, "message": message})])


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    state = container(terminated={"exitCode": code, "reason": reason, "message": message})
    return pod(phase="Failed" if code else "Succeeded", containerStatuses=[state])


def event(kind: str, name: str, reason: str, message: str, at: str = "2026-03-01T10:00:05Z") -> dict[str, Any]:
    return {"metadata": {"name": "e"}, "involvedObject": {"kind": kind, "name": name}, "reason": reason,
            "message": message, "lastTimestamp": at}  # fmt: skip


TORCHRUN = """\
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : -9 (pid: 22)
"""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "--gpus-per-node; wait, or ask for"),
        (unschedulable("0/3 nodes are available: 3 Insufficient memory."), "--memory"),
        (unschedulable("3 node(s) had untolerated taint {gpu: true}"), "--toleration KEY"),
        (unschedulable("3 node(s) didn't match Pod's node affinity/selector"), "--node-selector"),
        (unschedulable('persistentvolumeclaim "likeness-runs" not found'), "kubectl get pvc"),
        (waiting("ErrImagePull", "401 Unauthorized"), "wants credentials: --pull-secret"),
        (waiting("ImagePullBackOff", "manifest unknown"), "no such image or tag"),
        (waiting("ErrImagePull", "dial tcp: lookup registry: no such host"), "does not reach the registry"),
        (waiting("InvalidImageName", "couldn't parse image reference"), "trainer:1 cannot be pulled (InvalidImageName"),
        (waiting("CreateContainerConfigError", 'secret "likeness" not found'), 'cannot be made (CreateContainerConfig'),
        (waiting("CrashLoopBackOff", "back-off 5m0s restarting"), "ends each time it is started (back-off"),
        (ended(137, "OOMKilled"), "Give more --memory"),
        (ended(2, message="error: steps: 0 is too small"), "(a setting, file or row is wrong): error: steps"),
        (ended(75, message="error: no reward server"), "(the reward server stayed away): error: no reward"),
        (ended(1, message=TORCHRUN), "killed by SIGKILL, most often because memory ran out"),
        (pod(phase="Failed", reason="Evicted", message="The node was low on memory"), "Evicted: The node was low"),
        (pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]),
         "taken off its node (PreemptionByScheduler"),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_well_is_explained(given: dict[str, Any], words: str) -> None:
    told = pod_trouble(given)
    assert told is not None
    assert words in told


@pytest.mark.parametrize(
    "given",
    [
        pod(phase="Pending"),
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        pod(phase="Running", containerStatuses=[container(running={})]),
        ended(0, "Completed"),
        pod(conditions=[{"type": "PodScheduled", "status": "True"}]),
    ],
)
def test_a_pod_that_is_well_has_no_trouble(given: dict[str, Any]) -> None:
    assert pod_trouble(given) is None


def test_events_tell_what_pods_do_not() -> None:
    mount = event("Pod", "anna-0-x", "FailedMount", 'configmap "anna" not found')
    quota = event("Job", "anna", "FailedCreate", "pods is forbidden: exceeded quota: gpus")
    assert list(troubles(JOB, [pod(phase="Pending")], [mount, quota])) == [
        'pod anna-0-x: a volume cannot be mounted (configmap "anna" not found)',
        "no pod can be made, the namespace's quota is used up: pods is forbidden: exceeded quota: gpus",
    ]


def test_events_of_the_past_and_of_others_are_left_out() -> None:
    running = pod(phase="Running", containerStatuses=[container(running={})])
    events = [
        event("Job", "anna", "FailedCreate", "before this run", at="2026-03-01T09:59:59Z"),
        event("Job", "anna-2", "FailedCreate", "of another run"),
        event("Pod", "anna-0-x", "FailedMount", "over, it runs"),
        event("Pod", "bert-0-x", "FailedMount", "of another run"),
        event("Pod", "anna-0-x", "Unhealthy", "not our business"),
    ]
    assert list(troubles(JOB, [running], events)) == []


def test_a_quota_is_no_trouble_once_all_pods_are_made() -> None:
    quota = event("Job", "anna", "FailedCreate", "exceeded quota: gpus")
    assert list(troubles(JOB, [pod(0), pod(1)], [quota])) == []
    assert len(list(troubles(JOB, [pod(0), pod(1, phase="Failed")], [quota]))) == 1


@pytest.mark.parametrize("condition", ["Complete", "Completed"])
def test_jobs_and_jobsets_end_well(condition: str) -> None:
    status = {"conditions": [{"type": "Suspended", "status": "False"}, {"type": condition, "status": "True"}]}
    told = verdict({**JOB, "status": status}, [])
    assert told is not None
    assert told.succeeded


def test_a_run_that_has_not_ended_has_no_verdict() -> None:
    status = {"conditions": [{"type": "Failed", "status": "False"}, {"type": "FailureTarget", "status": "True"}]}
    assert verdict({**JOB, "status": status}, []) is None
    assert verdict(JOB, []) is None


def test_a_failure_names_the_pods_that_failed_and_only_those() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "limit reached"}
    told = verdict({**JOB, "status": {"conditions": [failed]}}, [ended(0), ended(139)])
    assert told is not None
    assert not told.succeeded
    assert told.text == (
        "run anna has failed (BackoffLimitExceeded: limit reached)\n"
        "  pod anna-0-x: ended with exit code 139 (segmentation fault)"
    )
