"""A small Kubernetes API server over real HTTP: the endpoints that runs in a cluster use, and the ways they fail.

It stores objects, versions every change, applies server-side, watches, collects garbage by owner and serves logs. There
is no scheduler and no kubelet: tests play them.
"""

import copy
import itertools
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

Manifest = dict[str, Any]

TOKEN = "token-of-a-test"
KINDS = {"jobs": "Job", "jobsets": "JobSet", "pods": "Pod", "events": "Event", "configmaps": "ConfigMap",
         "services": "Service"}  # fmt: skip
PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
        {"name": "batch", "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
         "preferredVersion": {"groupVersion": "batch/v1", "version": "v1"}}]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [
        {"name": name, "singularName": "", "namespaced": True, "kind": KINDS[name], "verbs": ["create", "get", "list"]}
        for name in ("configmaps", "services", "pods", "events")]},
    "/apis/batch/v1": {"kind": "APIResourceList", "groupVersion": "batch/v1", "resources": [
        {"name": "jobs", "singularName": "", "namespaced": True, "kind": "Job", "verbs": ["create", "get", "list"]}]},
}  # fmt: skip


class Refused(Exception):
    """An answer that is a Status object, as API servers give them."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
                       "message": message, "details": details}  # fmt: skip


class ApiServer:
    """The server, and what tests do to it from outside."""

    def __init__(self, namespaces: tuple[str, ...] = ("studio",), jobset: bool = False,
                 tls: ssl.SSLContext | None = None) -> None:  # fmt: skip
        self.namespaces, self.jobset = namespaces, jobset
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.logs: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.refusals: list[Callable[[str, str, dict[str, str]], Exception | None]] = []
        self.changed = threading.Condition()
        self.used: set[tuple[str, str, str]] = set()
        """Group, resource and verb of every request so far."""
        self.role: list[Manifest] | None = None
        """Rules of a Role that all requests must fit, or None: everything is allowed."""
        self.lost: dict[tuple[str, str], int] = {}
        self.history: list[tuple[int, str, str, Manifest]] = []
        self.oldest = 0
        self.cut = 0
        """Grows when connections are to be cut."""
        self.log_limits: list[int] = []
        """Lines after which the next log connections are cut."""
        self.after_get: Callable[[], object] = lambda: None
        """What another one does right after an object was read."""
        self._versions = itertools.count(100)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"api": self}))
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.cut_connections()
        self._http.shutdown()
        self._http.server_close()

    # What the cluster does.

    def put(self, plural: str, manifest: Manifest) -> Manifest:
        """Stores an object, tells the watchers, and returns it as stored."""
        with self.changed:
            key = (plural, manifest["metadata"]["name"])
            kind = "MODIFIED" if key in self.objects else "ADDED"
            stored = copy.deepcopy(manifest)
            metadata = stored["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", now())
            metadata["resourceVersion"] = str(version := next(self._versions))
            self.objects[key] = stored
            self.history.append((version, plural, kind, copy.deepcopy(stored)))
            self.changed.notify_all()
            return copy.deepcopy(stored)

    def remove(self, plural: str, name: str) -> None:
        """Removes an object and, as the garbage collector does, all that it owns."""
        with self.changed:
            gone = self.objects.pop((plural, name))
            gone["metadata"]["resourceVersion"] = str(version := next(self._versions))
            self.history.append((version, plural, "DELETED", gone))
            self.changed.notify_all()
            uid = gone["metadata"]["uid"]
            owned = [key for key, each in self.objects.items()
                     if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", []))]  # fmt: skip
            for key in owned:
                self.remove(*key)

    def add_pod(self, job: str, index: int = 0, suffix: str = "aaaaa", **status: Any) -> str:
        """Makes a pod as the Job controller does, and returns its name."""
        owner = self.objects[("jobs", job)]
        name = f"{job}-{index}-{suffix}"
        number = {"batch.kubernetes.io/job-completion-index": str(index)}
        metadata = {"name": name, "labels": {**owner["spec"]["template"]["metadata"]["labels"], **number},
                    "annotations": number, "ownerReferences": [{"kind": "Job", "name": job, "apiVersion": "batch/v1",
                                                                "uid": owner["metadata"]["uid"]}]}  # fmt: skip
        self.put("pods", {"metadata": metadata, "spec": {"nodeName": f"gpu-{index}"},
                          "status": status or {"phase": "Pending"}})  # fmt: skip
        self.logs.setdefault(name, [])
        return name

    def set_status(self, plural: str, name: str, **status: Any) -> None:
        self.put(plural, {**self.objects[(plural, name)], "status": status})

    def start(self, pod: str) -> None:
        self.set_status("pods", pod, phase="Running", containerStatuses=[container(running={})])

    def end(self, pod: str, exit_code: int = 0, reason: str = "Completed", message: str = "") -> None:
        ended = container(terminated={"exitCode": exit_code, "reason": reason, "message": message})
        self.set_status("pods", pod, phase="Failed" if exit_code else "Succeeded", containerStatuses=[ended])

    def finish(self, name: str, condition: str = "Complete", plural: str = "jobs", **told: str) -> None:
        self.set_status(plural, name, conditions=[{"type": condition, "status": "True", **told}])

    def warn(self, kind: str, about: str, reason: str, message: str) -> None:
        self.put("events", {"metadata": {"name": f"{about}.{uuid.uuid4().hex[:8]}"}, "type": "Warning",
                            "involvedObject": {"kind": kind, "name": about}, "reason": reason, "message": message,
                            "lastTimestamp": now()})  # fmt: skip

    def log(self, pod: str, text: str, at: str | None = None) -> None:
        """Writes a line of a pod's log."""
        with self.changed:
            self.logs[pod].append(f"{at or now(nanoseconds=True)} {text}")
            self.changed.notify_all()

    # What goes wrong.

    def refuse(self, method: str, plural: str, refused: Exception, times: int = 10**9) -> None:
        """Lets the next requests of a method for a kind fail: with a Status or, given an OSError, without an answer."""
        left = itertools.count(times, -1)
        self.refusals.append(lambda asked, kind, _: refused if (asked, kind) == (method, plural) and next(left) > 0
                             else None)  # fmt: skip

    def lose_answers(self, method: str, plural: str, times: int) -> None:
        """Does what the next requests ask for, and closes the connection instead of answering."""
        self.lost[(method, plural)] = times

    def forget_history(self) -> None:
        """As etcd's compaction does: versions up to now cannot be watched from any more."""
        with self.changed:
            self.oldest = next(self._versions)

    def cut_connections(self) -> None:
        """Closes every open watch and log in the middle."""
        with self.changed:
            self.cut += 1
            self.changed.notify_all()

    def asked(self, method: str, plural: str, **query: str) -> list[dict[str, str]]:
        """Returns the queries of the requests so far of a method for a kind, those with these values."""
        return [each for asked, path, each in self.requests
                if asked == method and f"/{plural}" in path and query.items() <= each.items()]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Writes nothing to standard error."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.api.requests.append((method, url.path, query))
        try:
            self._route(method, url.path, query, json.loads(body) if body else {})
        except Refused as refused:
            self._send(refused.code, refused.status)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            self.connection.close()

    def _route(self, method: str, path: str, query: dict[str, str], body: Manifest) -> None:
        if path in DISCOVERY:
            return self._send(200, DISCOVERY[path])
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", TOKEN):
            raise Refused(401, "Unauthorized", "Unauthorized")
        found = PATH.fullmatch(path)
        if found is None or (found["plural"] == "jobsets" and not self.api.jobset):
            return self._send_text(404, "404 page not found\n")
        plural, name = found["plural"], found["name"]
        self._authorize(method, found, query)
        for refusal in self.api.refusals:
            if (refused := refusal(method, plural + (found["log"] or ""), query)) is not None:
                raise refused
        if found["log"]:
            return self._serve_log(name, query)
        if method == "PATCH":
            return self._apply(found["namespace"], plural, name, query, body)
        if method == "DELETE":
            return self._delete(plural, name, body)
        if name:
            self._send(200, self._stored(plural, name))
            return self.api.after_get()
        return self._watch(plural, query) if query.get("watch") else self._list(plural, query)

    def _authorize(self, method: str, found: re.Match[str], query: dict[str, str]) -> None:
        """As RBAC does; an apply needs `create` too, because it may create."""
        read = "get" if found["name"] else "watch" if query.get("watch") else "list"
        resource, group = found["plural"] + (found["log"] or ""), found["group"] or ""
        for verb in {"GET": (read,), "PATCH": ("patch", "create"), "DELETE": ("delete",)}[method]:
            self.api.used.add((group, resource, verb))
            if self.api.role is not None and not any(
                group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
                for rule in self.api.role
            ):
                raise Refused(403, "Forbidden", f'cannot {verb} resource "{resource}" in API group "{group}"')

    def _stored(self, plural: str, name: str) -> Manifest:
        try:
            return self.api.objects[(plural, name)]
        except KeyError:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural) from None

    def _apply(self, namespace: str, plural: str, name: str, query: dict[str, str], body: Manifest) -> None:
        if namespace not in self.api.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if self.headers["Content-Type"] != "application/apply-patch+yaml" or not query.get("fieldManager"):
            raise Refused(400, "BadRequest", "only server-side apply with a fieldManager is served")
        if plural != "jobsets":
            try:
                kubernetes_validate.validate(body, "1.32", strict=query.get("fieldValidation") == "Strict")
            except kubernetes_validate.ValidationError as error:
                raise Refused(400, "BadRequest", error.message) from error
        with self.api.changed:
            before = self.api.objects.get((plural, name))
            if before is not None and before["spec"] != body.get("spec", before["spec"]):
                raise Refused(422, "Invalid", f'{KINDS[plural]} "{name}" is invalid: spec.template: field is immutable')
            merged = {**(before or {}), **body, "metadata": {**(before or {}).get("metadata", {}), **body["metadata"]}}
            stored = merged if query.get("dryRun") else self.api.put(plural, merged)
        if self.api.lost.get(("PATCH", plural), 0) > 0:
            self.api.lost[("PATCH", plural)] -= 1
            raise ConnectionResetError
        self._send(200 if before else 201, {**stored, "metadata": {"uid": "of a dry run", **stored["metadata"]}})

    def _delete(self, plural: str, name: str, options: Manifest) -> None:
        stored = self._stored(plural, name)
        wanted = options.get("preconditions", {}).get("uid")
        if wanted not in {None, stored["metadata"]["uid"]}:
            raise Refused(409, "Conflict", "the UID in the precondition does not match", name=name, kind=plural)
        if options.get("propagationPolicy") != "Background":
            raise Refused(400, "BadRequest", "this double collects garbage in the background only")
        self.api.remove(plural, name)
        self._send(200, {"kind": "Status", "status": "Success"})

    def _selected(self, plural: str, query: dict[str, str]) -> Callable[[Manifest], bool]:
        labels = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
        fields = dict(pair.split("=") for pair in query.get("fieldSelector", "").split(",") if pair)

        def selected(each: Manifest) -> bool:
            values = {"metadata.name": each["metadata"]["name"], "type": each.get("type")}
            return labels.items() <= each["metadata"].get("labels", {}).items() and fields.items() <= values.items()

        return selected

    def _list(self, plural: str, query: dict[str, str]) -> None:
        with self.api.changed:
            selected = self._selected(plural, query)
            items = [each for (kind, _), each in self.api.objects.items() if kind == plural and selected(each)]
            version = str(next(self.api._versions))
        self._send(200, {"kind": f"{KINDS[plural]}List", "metadata": {"resourceVersion": version}, "items": items})

    def _watch(self, plural: str, query: dict[str, str]) -> None:
        api, selected = self.api, self._selected(plural, query)
        version, ends_at = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
        with self._chunks() as send, api.changed:
            cut = api.cut
            while time.monotonic() < ends_at:
                if version < api.oldest:
                    gone = Refused(410, "Expired", f"too old resource version: {version} ({api.oldest})")
                    return send({"type": "ERROR", "object": gone.status})
                for at, kind, what, each in list(api.history):
                    if at > version and kind == plural:
                        version = at
                        if selected(each):
                            send({"type": what, "object": each})
                api.changed.wait(max(0.0, min(ends_at - time.monotonic(), 0.5)))
                if api.cut != cut:
                    raise ConnectionAbortedError

    def _serve_log(self, pod: str, query: dict[str, str]) -> None:
        stored = self._stored("pods", pod)
        if not any({"running", "terminated"} & set(each["state"])
                   for each in stored["status"].get("containerStatuses", [])):  # fmt: skip
            raise Refused(400, "BadRequest", f'container "trainer" in pod "{pod}" is waiting to start')
        since, api = query.get("sinceTime", "")[:19], self.api
        lines = [line for line in api.logs[pod] if line[:19] >= since]
        read = len(api.logs[pod])
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        limit = api.log_limits.pop(0) if api.log_limits and query.get("follow") else 10**9
        with self._chunks() as send, api.changed:
            cut = api.cut
            while True:
                for line in lines:
                    if limit == 0 or api.cut != cut:
                        raise ConnectionAbortedError
                    limit -= 1
                    send(line if query.get("timestamps") else line.partition(" ")[2])
                lines, read = api.logs[pod][read:], len(api.logs[pod])
                current = api.objects.get(("pods", pod))
                if lines:
                    continue
                if limit == 0 or api.cut != cut:
                    raise ConnectionAbortedError
                if not query.get("follow") or current is None or current["status"]["phase"] in {"Succeeded", "Failed"}:
                    return
                api.changed.wait(0.5)

    @contextmanager
    def _chunks(self) -> Iterator[Callable[[Any], None]]:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def send(piece: Any) -> None:
            data = (piece if isinstance(piece, str) else json.dumps(piece)).encode() + b"\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        yield send
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, code: int, answer: Manifest) -> None:
        self._send_text(code, json.dumps(answer), "application/json")

    def _send_text(self, code: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def container(**state: Any) -> Manifest:
    """Returns the status of the trainer's container in a state: running, waiting or terminated."""
    return {"name": "trainer", "image": "trainer:1", "state": state}


def now(nanoseconds: bool = False) -> str:
    """Returns the time as API servers write it, or as nodes write it in front of a line."""
    at = datetime.now(UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f000Z" if nanoseconds else "%Y-%m-%dT%H:%M:%SZ")
