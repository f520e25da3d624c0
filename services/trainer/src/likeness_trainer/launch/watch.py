"""What is in a namespace now, told again with every change, whatever happens to the connection."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.watch import Watch

from likeness_trainer.launch.cluster import Call, Cluster
from likeness_trainer.launch.description import Manifest
from likeness_trainer.launch.errors import ClusterUnreachableError
from likeness_trainer.launch.refusals import TRANSIENT, refusal

WATCH_S = 60
"""Time after which the server ends a watch, and the next one begins where it ended."""
READ_TIMEOUT_S = WATCH_S + 15.0
"""Silence after which a connection counts as dead."""
LONGEST_PAUSE_S = 10.0
GONE = 410


class Patience:
    """Pauses that grow while nothing comes, and an end to them. Counts from the last sign of life."""

    def __init__(self, stop: threading.Event, give_up_after_s: float = 600.0, first_pause_s: float = 0.2) -> None:
        self._stop = stop
        self._give_up_after_s = give_up_after_s
        self._first_pause_s = self._pause_s = first_pause_s
        self._alive_at = time.monotonic()

    def alive(self) -> None:
        """Something came: the next pause is short again."""
        self._alive_at = time.monotonic()
        self._pause_s = self._first_pause_s

    def wait(self) -> None:
        """Returns after a pause twice as long as the one before, or at once when stopped."""
        self._stop.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def survive(self, error: Exception, doing: str, cluster: Cluster) -> None:
        """Returns after a pause when trying again may help; raises ClusterError when it cannot, or has not for long."""
        if isinstance(error, ApiException) and error.status and error.status not in TRANSIENT:
            raise refusal(error, doing, cluster.namespace) from error
        if time.monotonic() - self._alive_at > self._give_up_after_s:
            raise ClusterUnreachableError(
                f"cannot {doing}: no answer from {cluster.api.configuration.host} for {self._give_up_after_s:g} "
                f"seconds: {error}"
            ) from error
        self.wait()


class Watched:
    """The objects that a list call selects, kept up to date.

    A watch goes on at the last version seen when its connection ends. A server that does not know that version any more
    (410 Gone) is asked for the whole list again.
    """

    def __init__(
        self, cluster: Cluster, what: str, call: Call, patience: Patience, stop: threading.Event, **selectors: str
    ) -> None:
        self.what = what
        self._cluster = cluster
        self._call = call
        self._patience = patience
        self._stop = stop
        self._selectors = selectors
        self._watch: Watch | None = None

    def snapshots(self) -> Iterator[list[Manifest]]:
        """Yields all objects at first, and again after every change, until `stop`.

        Raises ClusterError when the server refuses, or stays silent for too long.
        """
        objects: dict[str, Manifest] = {}
        version: str | None = None
        while not self._stop.is_set():
            try:
                if version is None:
                    objects, version = self._list()
                    self._patience.alive()
                    yield list(objects.values())
                for event in self._events(version):
                    self._patience.alive()
                    version = str(event["raw_object"]["metadata"]["resourceVersion"])
                    if _apply(objects, event):
                        yield list(objects.values())
                self._patience.wait()  # ended by the server, as it should from time to time
            except KeyError:  # the client, from an ERROR event without a reason
                version = None
                self._patience.wait()
            except ApiException as error:
                if error.status != GONE:
                    self._patience.survive(error, f"watch {self.what}", self._cluster)
                    continue
                version = None
                self._patience.wait()
            except (urllib3.exceptions.HTTPError, OSError) as error:
                self._patience.survive(error, f"watch {self.what}", self._cluster)

    def stop(self) -> None:
        """Ends a wait for the next event; `snapshots` ends when the event given at the start is set."""
        if self._watch is not None:
            self._watch.stop()

    def _list(self) -> tuple[dict[str, Manifest], str]:
        answer = self._call(
            namespace=self._cluster.namespace, _preload_content=False, _request_timeout=(10.0, 30.0), **self._selectors
        )
        listed = json.loads(answer.data)
        return {item["metadata"]["uid"]: item for item in listed["items"]}, str(listed["metadata"]["resourceVersion"])

    def _events(self, version: str) -> Iterator[Manifest]:
        """Yields what happened since a version, until the server ends the watch; raises ApiException for its errors."""
        self._watch = Watch(return_type="object")  # plain mappings; `deserialize=False` fails on an ERROR event
        for event in self._watch.stream(
            self._call, namespace=self._cluster.namespace, resource_version=version, timeout_seconds=WATCH_S,
            allow_watch_bookmarks=True, _request_timeout=(10.0, READ_TIMEOUT_S), **self._selectors,
        ):  # fmt: skip
            if event:  # None for a line that a broken connection cut
                yield event


def _apply(objects: dict[str, Manifest], event: Manifest) -> bool:
    """Changes objects, by uid, as an event says; returns whether that changed any."""
    kind, changed = event["type"], event["raw_object"]
    if kind == "DELETED":
        return objects.pop(changed["metadata"]["uid"], None) is not None
    if kind in {"ADDED", "MODIFIED"}:
        objects[changed["metadata"]["uid"]] = changed
        return True
    return False
