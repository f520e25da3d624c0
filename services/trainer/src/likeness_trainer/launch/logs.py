"""The log of a pod, line by line, each once, whatever happens to the connection."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import urllib3
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.watch.watch import iter_resp_lines

from likeness_trainer.launch.cluster import Call, Cluster
from likeness_trainer.launch.pod import CONTAINER
from likeness_trainer.launch.watch import Patience

TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
STILL_STARTING = 400
"""What a server answers when a container has no log yet."""


class SeenLines:
    """Tells lines that were read before from new ones, by the times that the node wrote in front of them.

    A log is opened again at the whole second of its last line, so that the lines of that second come once more. Lines
    may have the same time to the nanosecond: those are counted.
    """

    def __init__(self) -> None:
        self._last_ns = 0
        self._count = 0
        self._to_skip = 0
        self._again = False

    @property
    def since(self) -> str | None:
        """The second from which to read on, RFC 3339; None before the first line."""
        if not self._last_ns:
            return None
        return datetime.fromtimestamp(self._last_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def reopen(self) -> None:
        """The log is read again, from `since` on."""
        self._again, self._to_skip = True, self._count

    def new(self, line: str) -> str | None:
        """Returns the text of a line without its time, or None when it was read before.

        Lines of standard output and error may come in another order than that of their times: only what is read again
        is compared.
        """
        stamp, _, text = line.partition(" ")
        at_ns = nanoseconds(stamp)
        if at_ns is None:  # not a line of the log: the node itself speaks
            return line
        if self._again and at_ns < self._last_ns:
            return None
        if self._again and at_ns == self._last_ns and self._to_skip:
            self._to_skip -= 1
            return None
        self._again = False
        if at_ns > self._last_ns:
            self._last_ns, self._count = at_ns, 1
        elif at_ns == self._last_ns:
            self._count += 1
        return text


class FollowedLog:
    """The log of the trainer in one pod."""

    def __init__(self, cluster: Cluster, pod: str, patience: Patience, stop: threading.Event) -> None:
        self.pod = pod
        self._cluster = cluster
        self._patience = patience
        self._stop = stop
        self._seen = SeenLines()

    def lines(self) -> Iterator[str]:
        """Yields each line once, from the first on, until the pod has ended or is gone, or the stop event is set.

        Raises ClusterError when the server refuses, or stays silent for too long.
        """
        while not self._stop.is_set():
            try:
                ended = self._has_ended()  # asked before the log is read: what is read then is all there is
                yield from self._read(follow=not ended)
                if ended:
                    return
                self._patience.wait()
            except ApiException as error:
                if error.status == 404:
                    return
                if error.status == STILL_STARTING:
                    self._patience.wait()
                else:
                    self._patience.survive(error, f"read the log of pod {self.pod}", self._cluster)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                self._patience.survive(error, f"read the log of pod {self.pod}", self._cluster)

    def _read(self, follow: bool) -> Iterator[str]:
        opened = self._cluster.open_log(self.pod, CONTAINER, since=self._seen.since, follow=follow)
        self._seen.reopen()
        try:
            for line in iter_resp_lines(opened):
                self._patience.alive()
                if self._stop.is_set():
                    return
                text = self._seen.new(line)
                if text is not None:
                    yield text
        finally:
            opened.close()
            opened.release_conn()

    def _has_ended(self) -> bool:
        read: Call = client.CoreV1Api(self._cluster.api).read_namespaced_pod
        answer = read(self.pod, self._cluster.namespace, _preload_content=False, _request_timeout=(10.0, 30.0))
        return json.loads(answer.data).get("status", {}).get("phase") in {"Succeeded", "Failed"}


def nanoseconds(stamp: str) -> int | None:
    """Returns the time of an RFC 3339 text of up to nine decimals, in nanoseconds since 1970; None for another text."""
    found = TIMESTAMP.fullmatch(stamp)
    if found is None:
        return None
    seconds, fraction, zone = found.groups()
    offset = timedelta(0)
    if zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:])) * (1 if zone[0] == "+" else -1)
    at = datetime.fromisoformat(seconds).replace(tzinfo=UTC) - offset
    return int(at.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))
