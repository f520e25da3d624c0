"""A run in a cluster, followed from its first pod to its end: why pods do not start, rank 0's log, how it ended."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from kubernetes import client

from likeness_trainer.launch import errors
from likeness_trainer.launch.cluster import Cluster
from likeness_trainer.launch.description import Manifest, pod_selector
from likeness_trainer.launch.display import Display
from likeness_trainer.launch.failures import Verdict, troubles, verdict
from likeness_trainer.launch.logs import FollowedLog
from likeness_trainer.launch.objects import has_started, index_of, is_suspended, job_spec, newest
from likeness_trainer.launch.watch import Patience, Watched

LOG_REST_S = 15.0
"""Time that the rest of the log gets when the run has ended."""


class Follower:
    """Watches the workload, its pods and the warnings about them, each in a thread, and reads the log of one pod."""

    def __init__(
        self, cluster: Cluster, workload: Manifest, display: Display, start_timeout_s: float, index: int = 0
    ) -> None:
        self._cluster = cluster
        self._workload = workload
        self._name: str = workload["metadata"]["name"]
        self._display = display
        self._start_timeout_s = start_timeout_s
        self._index = index
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._watches: list[Watched] = []
        self._pods: list[Manifest] = []
        self._events: list[Manifest] = []
        self._said: set[str] = set()
        self._logs: dict[str, threading.Thread] = {}
        self._all_started = False
        self._waiting_since = time.monotonic()

    def run(self) -> Verdict:
        """Returns how the run ended.

        Raises:
            PodsCannotStartError: not all pods have started within the time allowed.
            RunFailedError: the job was deleted.
            ClusterError: the server refuses to tell more, or does not answer for long.
        """
        self._watch("workload", self._cluster.workloads(self._workload["kind"]),
                    field_selector=f"metadata.name={self._name}")  # fmt: skip
        core = client.CoreV1Api(self._cluster.api)
        self._watch("pods", core.list_namespaced_pod, label_selector=pod_selector(self._name))
        self._watch("events", core.list_namespaced_event, field_selector="type=Warning")
        try:
            while True:
                self._take_news()
                ended = verdict(self._workload, self._pods)
                if ended is not None:
                    return self._last_words(ended)
                self._require_start()
        finally:
            self._stop.set()
            for watched in self._watches:
                watched.stop()

    def _watch(self, what: str, call: Any, **selectors: str) -> None:
        watched = Watched(self._cluster, what, call, Patience(self._stop), self._stop, **selectors)
        self._watches.append(watched)

        def pump() -> None:
            try:
                for objects in watched.snapshots():
                    self._news.put((what, objects))
            except Exception as error:  # the edge of a thread: raised again in the main one
                self._news.put(("error", (what, error)))

        threading.Thread(target=pump, name=f"watch {what}", daemon=True).start()

    def _take_news(self) -> None:
        """Waits for one piece of news, for a second at most, and tells what it means."""
        try:
            what, value = self._news.get(timeout=1.0)
        except queue.Empty:
            return
        if what == "line":
            self._display.line(value)
        elif what == "workload":
            self._take_workload(value)
        elif what == "pods":
            self._take_pods(value)
        elif what == "events":
            self._events = value
            self._tell_troubles()
        elif what == "error":
            self._take_error(*value)

    def _take_workload(self, found: list[Manifest]) -> None:
        uid = self._workload["metadata"]["uid"]
        current = next((each for each in found if each["metadata"]["uid"] == uid), None)
        if current is None:
            raise errors.RunFailedError(f"run {self._name} was deleted while it was followed")
        # Items of a list lack their kind.
        self._workload = {**current, "kind": self._workload["kind"], "apiVersion": self._workload["apiVersion"]}
        if is_suspended(self._workload):
            self._tell("the run is suspended: a queue, or somebody, must let it start")
        elif current["metadata"].get("deletionTimestamp"):
            self._tell("the run is being deleted: its pods get time to write a checkpoint")

    def _take_pods(self, pods: list[Manifest]) -> None:
        self._pods = pods
        nodes = job_spec(self._workload)["completions"]
        started = len({index_of(pod) for pod in pods if has_started(pod)})
        if started >= nodes:
            self._all_started = True
        if pods:
            self._tell(f"{started} of {nodes} pod{'s' * (nodes > 1)} {'has' if nodes == 1 else 'have'} started")
        self._tell_troubles()
        pod = newest(pods, self._index)
        if pod is not None and has_started(pod):
            self._read_log(pod)

    def _take_error(self, what: str, error: Exception) -> None:
        if what == "events" and isinstance(error, errors.PermissionDeniedError):
            self._tell("events may not be read here: some causes, such as a used-up quota, cannot be told")
            return
        raise error

    def _tell_troubles(self) -> None:
        for text in troubles(self._workload, self._pods, self._events):
            self._tell(text)

    def _tell(self, text: str) -> None:
        """Says a thing once."""
        if text not in self._said:
            self._said.add(text)
            self._display.say(text)

    def _read_log(self, pod: Manifest) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if uid in self._logs:
            return
        self._tell(f"log of pod {name} on node {pod.get('spec', {}).get('nodeName', '?')}:")
        log = FollowedLog(self._cluster, name, Patience(self._stop), self._stop)

        def pump() -> None:
            try:
                for line in log.lines():
                    self._news.put(("line", line))
            except Exception as error:  # the edge of a thread: raised again in the main one
                self._news.put(("error", ("log", error)))

        self._logs[uid] = threading.Thread(target=pump, name=f"log {name}", daemon=True)
        self._logs[uid].start()

    def _require_start(self) -> None:
        if self._all_started or is_suspended(self._workload):
            self._waiting_since = time.monotonic()
        elif self._start_timeout_s and time.monotonic() - self._waiting_since > self._start_timeout_s:
            found = dict.fromkeys(troubles(self._workload, self._pods, self._events))
            causes = "\n  ".join(found) or "no cause was told"
            raise errors.PodsCannotStartError(
                f"the pods of run {self._name} have not all started in {self._start_timeout_s:g} seconds:\n  {causes}\n"
                f"The job stays. Wait on with `{self._cluster.command('logs', self._name, '--follow')}`, or remove it "
                f"with `{self._cluster.command('cancel', self._name)}`"
            )

    def _last_words(self, ended: Verdict) -> Verdict:
        """Returns the verdict with what the pods tell by now, after the rest of the log."""
        deadline = time.monotonic() + LOG_REST_S
        pods = self._cluster.pods(self._name)
        self._take_pods(pods)
        while time.monotonic() < deadline and any(log.is_alive() for log in self._logs.values()):
            self._take_rest(0.1)
        while self._take_rest(0.0):
            pass
        return verdict(self._workload, pods) or ended

    def _take_rest(self, timeout_s: float) -> bool:
        try:
            what, value = self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait()
        except queue.Empty:
            return False
        if what == "line":
            self._display.line(value)
        return True
