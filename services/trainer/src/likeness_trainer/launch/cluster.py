"""One namespace of a cluster: the calls that a run needs, with every refusal told in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.incluster_config import InClusterConfigLoader

from likeness_trainer.launch import errors
from likeness_trainer.launch.manifests import MANAGER, SELECTOR, Manifest, owned_by

APPLY = "application/apply-patch+yaml"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = (10.0, 30.0)
"""To connect, and between two pieces of an answer."""


@dataclass(frozen=True)
class Cluster:
    """A namespace and the credentials for it."""

    api: client.ApiClient
    namespace: str

    @property
    def core(self) -> client.CoreV1Api:
        """Pods, events, ConfigMaps, Services."""
        return client.CoreV1Api(self.api)

    @property
    def batch(self) -> client.BatchV1Api:
        """Jobs."""
        return client.BatchV1Api(self.api)

    def apply(self, manifest: Manifest) -> Any:
        """Creates or updates an object by server-side apply and returns it. Raises ClusterError."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        patch = {
            "Job": self.batch.patch_namespaced_job,
            "ConfigMap": self.core.patch_namespaced_config_map,
            "Service": self.core.patch_namespaced_service,
        }[kind]
        with self.explained(f"apply {kind} {name}"):
            return patch(
                name, self.namespace, manifest, field_manager=MANAGER, field_validation="Strict",
                _content_type=APPLY, _request_timeout=TIMEOUT_S,
            )  # fmt: skip

    def create(self, manifests: list[Manifest]) -> client.V1Job:
        """Creates a Job and the objects that belong to it, and returns it.

        The Job comes first, so that its uid can own the others; its pods wait for them. If one cannot be made, the Job
        is deleted again, and nothing is left.

        Raises:
            AlreadyExistsError: there is a job of that name already.
            ClusterError: of another kind, when the server refuses an object.
        """
        job, *others = manifests
        name = job["metadata"]["name"]
        self._require_free(name)
        applied: client.V1Job = self.apply(job)
        uid = str(applied.metadata.uid) if applied.metadata is not None else ""
        try:
            for manifest in others:
                self.apply(owned_by(manifest, name, uid))
        except BaseException:
            self.delete_job(name)
            raise
        return applied

    def _require_free(self, name: str) -> None:
        try:
            taken = self.job(name)
        except errors.NoSuchObjectError:
            return
        labels = (taken.metadata.labels if taken.metadata is not None else None) or {}
        if labels.get("app.kubernetes.io/managed-by") == MANAGER:
            raise errors.AlreadyExistsError(
                f"there is a job {name} in namespace {self.namespace} already. Choose another --name, or remove it "
                f"with `likeness-trainer jobs cancel {name}`; the run's folder stays, and a new job goes on with it"
            )
        raise errors.AlreadyExistsError(
            f"there is a job {name} in namespace {self.namespace} that likeness-trainer did not make. "
            "Choose another --name"
        )

    def job(self, name: str) -> client.V1Job:
        """Returns a Job; raises NoSuchObjectError or another ClusterError."""
        with self.explained(f"read job {name}"):
            return self.batch.read_namespaced_job(name, self.namespace, _request_timeout=TIMEOUT_S)

    def own_job(self, name: str) -> client.V1Job:
        """Returns a Job that `submit` made; raises NoSuchObjectError when there is none of that name."""
        job = self.job(name)
        labels = (job.metadata.labels if job.metadata is not None else None) or {}
        if labels.get("app.kubernetes.io/managed-by") != MANAGER:
            raise errors.NoSuchObjectError(f"the job {name} in namespace {self.namespace} is not a run of this trainer")
        return job

    def jobs(self) -> list[client.V1Job]:
        """Returns all Jobs that `submit` made in the namespace."""
        with self.explained("list jobs"):
            return list(
                self.batch.list_namespaced_job(
                    self.namespace, label_selector=SELECTOR, _request_timeout=TIMEOUT_S
                ).items
            )

    def pods(self, name: str) -> list[client.V1Pod]:
        """Returns the pods of a Job, those that failed too."""
        with self.explained(f"list pods of {name}"):
            return list(
                self.core.list_namespaced_pod(
                    self.namespace, label_selector=pod_selector(name), _request_timeout=TIMEOUT_S
                ).items
            )

    def events(self) -> list[client.CoreV1Event]:
        """Returns the events of the namespace, or none where they may not be read."""
        try:
            with self.explained("list events"):
                return list(self.core.list_namespaced_event(self.namespace, _request_timeout=TIMEOUT_S).items)
        except errors.PermissionDeniedError:
            return []

    def delete_job(self, name: str) -> None:
        """Deletes a Job with its pods, which get a SIGTERM first, and all that it owns. Raises ClusterError."""
        with self.explained(f"delete job {name}"):
            self.batch.delete_namespaced_job(
                name, self.namespace, propagation_policy="Background", _request_timeout=TIMEOUT_S
            )

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Raises what the client raises inside as a ClusterError that says what could not be done, and why."""
        try:
            yield
        except ApiException as error:
            raise refusal(error, doing, self.namespace) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise errors.ClusterUnreachableError(
                f"cannot {doing}: no answer from {self.api.configuration.host}: {_innermost(error)}"
            ) from error


def pod_selector(job_name: str) -> str:
    """Returns the selector of a Job's pods; the Job controller sets this label."""
    return f"batch.kubernetes.io/job-name={job_name}"


def open_cluster(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
    """Returns a cluster: that of a kubeconfig, or, without one, the one around the pod that this runs in.

    Args:
        kubeconfig: a file; default: KUBECONFIG, else ~/.kube/config.
        context: of the kubeconfig; default: its current one.
        namespace: default: that of the context or of the pod, else "default".

    Raises:
        ClusterUnreachableError: there is neither, or the kubeconfig cannot be used.
    """
    settings = client.Configuration()
    try:
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    except config.ConfigException as error:
        inside = InClusterConfigLoader(str(SERVICE_ACCOUNT / "token"), str(SERVICE_ACCOUNT / "ca.crt"))
        if kubeconfig is not None or context is not None or not (SERVICE_ACCOUNT / "token").is_file():
            raise errors.ClusterUnreachableError(f"no cluster: {error}. Give one with --kubeconfig") from error
        inside.load_and_set(settings)
        own = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        return Cluster(client.ApiClient(settings), namespace or own)
    names = [each["name"] for each in contexts]
    if context is not None and context not in names:
        raise errors.ClusterUnreachableError(f"the kubeconfig has no context {context!r}; it has {', '.join(names)}")
    chosen = active if context is None else next(each for each in contexts if each["name"] == context)
    try:
        config.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=settings, persist_config=False
        )
    except config.ConfigException as error:
        raise errors.ClusterUnreachableError(f"the kubeconfig cannot be used: {error}") from error
    return Cluster(client.ApiClient(settings), namespace or chosen["context"].get("namespace") or "default")


def refusal(error: ApiException, doing: str, namespace: str) -> errors.ClusterError:
    """Returns what a refusal means, in words, as an error whose class gives the exit code."""
    message, details = _status(error)
    told = f"cannot {doing} in namespace {namespace}: "
    if error.status == 401:
        return errors.PermissionDeniedError(f"{told}the credentials are not accepted; log in anew. {message}".rstrip())
    if error.status == 403:
        return _forbidden(told, message, namespace)
    if error.status == 404:
        return _not_found(told, message, details, namespace)
    if error.status == 409:
        return errors.AlreadyExistsError(
            f"{told}the name is taken, or another program owns some of its fields. {message} Choose another --name"
        )
    if error.status in {400, 422}:
        return errors.ManifestRejectedError(f"{told}the cluster finds it invalid: {message}")
    return errors.ClusterUnreachableError(f"{told}the cluster answers {error.status} {error.reason}: {message}")


def _forbidden(told: str, message: str, namespace: str) -> errors.ClusterError:
    if "exceeded quota" in message:
        return errors.QuotaExceededError(
            f"{told}the quota is used up: {message}. See `kubectl describe quota --namespace {namespace}`"
        )
    if "violates PodSecurity" in message or "denied the request" in message or "admission webhook" in message:
        return errors.PermissionDeniedError(f"{told}a policy of the cluster refuses it: {message}")
    return errors.PermissionDeniedError(
        f"{told}you may not. {message}. Ask for a role in {namespace} that may get, list, watch, create, patch and "
        "delete jobs, configmaps and services, get, list and watch pods and events, and get pods/log"
    )


def _not_found(told: str, message: str, details: dict[str, Any], namespace: str) -> errors.NoSuchObjectError:
    if details.get("kind") == "namespaces":
        return errors.NoSuchObjectError(
            f"{told}there is no namespace {namespace}. Choose one with --namespace, or make it: "
            f"`kubectl create namespace {namespace}`"
        )
    if not details.get("name"):
        return errors.NoSuchObjectError(
            f"{told}the server does not know this kind of object. It must serve batch/v1 (Kubernetes 1.26 or newer); a "
            f"CustomResourceDefinition may be missing, or the address be no API server. {message}"
        )
    return errors.NoSuchObjectError(f"{told}there is no {details.get('kind', 'object')} {details['name']}")


def _status(error: ApiException) -> tuple[str, dict[str, Any]]:
    """Returns message and details of the Status object that an API server answers with, or the raw body."""
    try:
        status = json.loads(error.body or "")
        return str(status.get("message") or ""), dict(status.get("details") or {})
    except (ValueError, AttributeError):
        return (error.body or "").strip()[:300], {}


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)
