"""The objects of one run in a cluster, as plain mappings: what is applied is what a dry run prints.

A Job (or a JobSet) with one indexed pod a node, a ConfigMap with the resolved recipe, and, when several nodes work
together, a headless Service under which the pods find each other. Imports no Kubernetes client.
"""

from __future__ import annotations

from typing import Any

import yaml

from likeness_trainer.config import dump_config
from likeness_trainer.launch.description import REPLICATED_JOB, Launch, Manifest, selector_labels
from likeness_trainer.launch.pod import CONTAINER, RENDEZVOUS_PORT, pod

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
WRONG_SETTING_EXIT_CODE = 2
"""The trainer's exit code for a recipe, file or row that is wrong; another try gives the same."""


def manifests(launch: Launch) -> list[Manifest]:
    """Returns the Job or JobSet first, then the objects that belong to it.

    The controller of a JobSet makes the headless Service itself.
    """
    if launch.kind == "jobset":
        return [job_set(launch), config_map(launch)]
    return [job(launch), config_map(launch), *([service(launch)] if launch.placement.nodes > 1 else [])]


def to_yaml(objects: list[Manifest]) -> str:
    """Returns the objects as one YAML stream; texts of several lines stay readable."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=True)


def owned_by(manifest: Manifest, owner: Manifest) -> Manifest:
    """Returns an object that the cluster deletes together with its owner, an object as the server returned it."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"],
                 "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}  # fmt: skip
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


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
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(launch, queued=True),
            "spec": {**_suspended(launch), **_kept(launch), **_job_spec(launch, launch.backoff_limit)}}  # fmt: skip


def job_set(launch: Launch) -> Manifest:
    """Returns the JobSet with one Job: whenever a pod fails, all pods are started anew together."""
    replicated = {
        "name": REPLICATED_JOB,
        "replicas": 1,
        "template": {"metadata": {"labels": launch.labels}, "spec": _job_spec(launch, 0)},
    }
    rule = {"name": "wrongSetting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec: Manifest = {
        **_suspended(launch),
        **_kept(launch),
        "network": {"enableDNSHostnames": True, "subdomain": launch.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": launch.backoff_limit, "rules": [rule]},
        "replicatedJobs": [replicated],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
            "metadata": _metadata(launch, queued=True), "spec": spec}  # fmt: skip


def _job_spec(launch: Launch, backoff_limit: int) -> Manifest:
    nodes = launch.placement.nodes
    wrong_setting = {"containerName": CONTAINER, "operator": "In", "values": [WRONG_SETTING_EXIT_CODE]}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": backoff_limit,
        # Two pods must never write the same run: a new one waits until the old one has ended.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": wrong_setting},
            ]
        },
        "template": {"metadata": {"labels": launch.labels}, "spec": pod(launch)},
    }


def _suspended(launch: Launch) -> Manifest:
    return {"suspend": True} if launch.placement.queue else {}


def _kept(launch: Launch) -> Manifest:
    return {} if launch.keep_finished_s is None else {"ttlSecondsAfterFinished": launch.keep_finished_s}


def _metadata(launch: Launch, queued: bool = False) -> Manifest:
    queue = {QUEUE_LABEL: launch.placement.queue} if queued and launch.placement.queue else {}
    return {"name": launch.name, "labels": {**launch.labels, **queue}}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
