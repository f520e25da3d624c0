"""One namespace of a cluster: the calls that a run needs, as plain mappings, with every refusal told in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from likeness_trainer.launch import errors
from likeness_trainer.launch.description import MANAGER, SELECTOR, Manifest, pod_selector
from likeness_trainer.launch.manifests import owned_by
from likeness_trainer.launch.objects import labels_of
from likeness_trainer.launch.refusals import TRANSIENT, explained

APPLY = "application/apply-patch+yaml"
TIMEOUT_S = (10.0, 30.0)
"""To connect, and between two pieces of an answer."""
PAUSES_S = (0.5, 1.0, 2.0)
"""Before each new try of a request that may be sent twice."""
WORKLOADS = {"Job": ("batch", "v1", "jobs"), "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets")}
"""Kinds that a run can be: group, version and plural of each."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Cluster:
    """A namespace and the credentials for it."""

    api: client.ApiClient
    namespace: str

    def command(self, name: str, run: str = "", options: str = "") -> str:
        """Returns a command of `likeness-trainer` for a run of this namespace, to be shown to a person."""
        return " ".join(filter(None, ("likeness-trainer", name, run, options, f"--namespace {self.namespace}")))

    def create(self, manifests: list[Manifest]) -> Manifest:
        """Creates a Job or JobSet and the objects that belong to it, and returns it.

        It comes first, so that its uid can own the others; its pods wait for them. If one cannot be made, it is deleted
        again, and nothing is left.

        Raises:
            AlreadyExistsError: there is one of that name already.
            ClusterError: of another kind, when the server refuses an object.
        """
        workload, *others = manifests
        self._require_free(workload)
        applied, is_new = self._apply(workload)
        if not is_new:
            raise self._taken(applied)
        try:
            for manifest in others:
                self._apply(owned_by(manifest, applied))
        except BaseException as error:
            self._take_back(applied, error)
            raise
        return applied

    def try_out(self, manifests: list[Manifest]) -> None:
        """Lets the server check every object as if it were created, and keep none. Raises ClusterError."""
        self._require_free(manifests[0])
        for manifest in manifests:
            self._apply(manifest, dry_run="All")

    def find(self, name: str) -> Manifest:
        """Returns the Job or JobSet of a run; raises NoSuchObjectError when there is none that `submit` made."""
        for kind in WORKLOADS:
            found = self._workload(kind, name)
            if found is not None and labels_of(found).get("app.kubernetes.io/managed-by") == MANAGER:
                return found
        raise errors.NoSuchObjectError(
            f"there is no run {name} in namespace {self.namespace}; `{self.command('list')}` names those that there are"
        )

    def runs(self) -> list[Manifest]:
        """Returns the Jobs and JobSets that `submit` made in the namespace, the newest first."""
        found: list[Manifest] = []
        for kind in WORKLOADS:
            try:
                found += self._asked(f"list {kind}s", self.workloads(kind), label_selector=SELECTOR)["items"]
            except (errors.NoSuchKindError, errors.PermissionDeniedError):
                if kind == "Job":
                    raise
        return sorted(found, key=lambda run: str(run["metadata"].get("creationTimestamp")), reverse=True)

    def pods(self, name: str) -> list[Manifest]:
        """Returns the pods of a run, those that failed too."""
        call = client.CoreV1Api(self.api).list_namespaced_pod
        return list(self._asked(f"list pods of {name}", call, label_selector=pod_selector(name))["items"])

    def warnings(self) -> list[Manifest]:
        """Returns the events of the namespace that warn, or none where they may not be read."""
        call = client.CoreV1Api(self.api).list_namespaced_event
        try:
            return list(self._asked("list events", call, field_selector="type=Warning")["items"])
        except errors.PermissionDeniedError:
            return []

    def delete(self, workload: Manifest) -> None:
        """Deletes a Job or JobSet with its pods, which get a SIGTERM first, and all that it owns; fine if it is gone.

        Raises ClusterError, AlreadyExistsError among them when another one has its name by now.
        """
        kind, metadata = workload["kind"], workload["metadata"]
        options = client.V1DeleteOptions(
            propagation_policy="Background", preconditions=client.V1Preconditions(uid=metadata["uid"])
        )
        group, version, plural = WORKLOADS[kind]
        call = client.CustomObjectsApi(self.api).delete_namespaced_custom_object
        try:
            self._asked(f"delete {kind} {metadata['name']}", call, group, version, name=metadata["name"],
                        plural=plural, body=options)  # fmt: skip
        except errors.NoSuchObjectError:
            return

    def workloads(self, kind: str) -> Call:
        """Returns the client's call that lists or watches a kind of workload."""
        group, version, plural = WORKLOADS[kind]
        call = client.CustomObjectsApi(self.api).list_namespaced_custom_object

        def listed(namespace: str, **options: Any) -> Any:
            return call(group, version, namespace, plural, **options)

        return listed

    def open_log(
        self, pod: str, container: str, since: str | None = None, follow: bool = False, tail: int | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Returns the open log of a pod, each line with its time in front.

        Asked through the client's lower level, because its own call cannot say `sinceTime`.

        Args:
            since: RFC 3339, whole seconds; lines before are left out.
            tail: only as many lines of the end.

        Raises:
            ApiException: the server's refusal as it is; the pod may only just be starting.
            urllib3.exceptions.HTTPError: no answer.
        """
        wanted = {"container": container, "timestamps": "true", "follow": "true" if follow else None,
                  "sinceTime": since, "tailLines": None if tail is None else str(tail)}  # fmt: skip
        request = self.api.param_serialize(
            "GET", "/api/v1/namespaces/{namespace}/pods/{name}/log",
            path_params={"namespace": self.namespace, "name": pod},
            query_params=[(key, value) for key, value in wanted.items() if value is not None],
            header_params={"Accept": "*/*"}, auth_settings=["BearerToken"],
        )  # fmt: skip
        answer = self.api.call_api(*request, _request_timeout=(TIMEOUT_S[0], 300.0))
        if answer.status != 200:
            answer.read()
            raise ApiException.from_response(http_resp=answer, body=None, data=None)
        opened: urllib3.BaseHTTPResponse = answer.response
        return opened

    def _take_back(self, workload: Manifest, cause: BaseException) -> None:
        try:
            self.delete(workload)
        except errors.ClusterError as error:
            name = workload["metadata"]["name"]
            raise errors.ClusterError(
                f"{cause or 'interrupted'}; and {workload['kind']} {name} could not be taken back ({error}): remove it "
                f"with `{self.command('cancel', name)}`"
            ) from cause

    def _apply(self, manifest: Manifest, dry_run: str | None = None) -> tuple[Manifest, bool]:
        """Creates or updates an object by server-side apply; returns it, and whether it is new.

        201 says that it is; after a second try 200 does too, since the answer to the first may have been lost.
        """
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        core = client.CoreV1Api(self.api)
        options = {"field_manager": MANAGER, "field_validation": "Strict", "dry_run": dry_run, "_content_type": APPLY}
        calls: dict[str, Call] = {
            "ConfigMap": core.patch_namespaced_config_map,
            "Service": core.patch_namespaced_service,
        }
        call = calls.get(kind, client.CustomObjectsApi(self.api).patch_namespaced_custom_object)
        if kind in WORKLOADS:
            options |= dict(zip(("group", "version", "plural"), WORKLOADS[kind], strict=True))
        answer, tries = self._sent(f"apply {kind} {name}", call, name=name, body=manifest, **options)
        return json.loads(answer.data), answer.status == 201 or tries > 1

    def _require_free(self, workload: Manifest) -> None:
        taken = self._workload(workload["kind"], workload["metadata"]["name"])
        if taken is not None:
            raise self._taken(taken)

    def _taken(self, workload: Manifest) -> errors.AlreadyExistsError:
        kind, name = workload["kind"], workload["metadata"]["name"]
        if labels_of(workload).get("app.kubernetes.io/managed-by") == MANAGER:
            return errors.AlreadyExistsError(
                f"there is a run {name} in namespace {self.namespace} already. Choose another --name, or remove it "
                f"with `{self.command('cancel', name)}`: its folder stays, and a new run of that name goes on with it"
            )
        return errors.AlreadyExistsError(
            f"there is a {kind} {name} in namespace {self.namespace} that likeness-trainer did not make. "
            "Choose another --name"
        )

    def _workload(self, kind: str, name: str) -> Manifest | None:
        group, version, plural = WORKLOADS[kind]
        call = client.CustomObjectsApi(self.api).get_namespaced_custom_object
        try:
            return self._asked(f"read {kind} {name}", call, group, version, plural=plural, name=name)
        except errors.NoSuchObjectError:
            return None
        except errors.PermissionDeniedError:
            if kind == "Job":
                raise
            return None

    def _asked(self, doing: str, call: Call, *arguments: Any, **options: Any) -> Manifest:
        answer, _ = self._sent(doing, call, *arguments, **options)
        told: Manifest = json.loads(answer.data)
        return told

    def _sent(self, doing: str, call: Call, *arguments: Any, **options: Any) -> tuple[Any, int]:
        """Returns the answer to a request that may be sent twice, and how often it was sent."""
        options |= {"namespace": self.namespace, "_preload_content": False, "_request_timeout": TIMEOUT_S}
        with explained(doing, self.namespace, self.api.configuration.host):
            for tries, pause in enumerate(PAUSES_S, start=1):
                try:
                    return call(*arguments, **options), tries
                except ApiException as error:
                    if error.status not in TRANSIENT:
                        raise
                except urllib3.exceptions.HTTPError:
                    pass  # asked again below
                time.sleep(pause)
            return call(*arguments, **options), len(PAUSES_S) + 1
