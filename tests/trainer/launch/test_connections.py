"""Following goes on whatever happens to the connection: nothing is missed, nothing is told twice."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, Refused, container
from kubernetes import client
from launch_support import SUBMIT, Run, wait_for

from likeness_trainer.launch.access import open_cluster
from likeness_trainer.launch.cluster import Cluster
from likeness_trainer.launch.errors import ClusterUnreachableError, PermissionDeniedError
from likeness_trainer.launch.logs import SeenLines, nanoseconds
from likeness_trainer.launch.watch import Patience, Watched


class Pods:
    """A watch on all pods in a thread; `names` is what it saw last."""

    def __init__(self, cluster: Cluster, give_up_after_s: float = 600.0) -> None:
        self.stop = threading.Event()
        self.seen: list[set[str]] = []
        self.error: Exception | None = None
        patience = Patience(self.stop, give_up_after_s, first_pause_s=0.01)
        self.watched = Watched(cluster, "pods", client.CoreV1Api(cluster.api).list_namespaced_pod, patience, self.stop)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for pods in self.watched.snapshots():
                self.seen.append({pod["metadata"]["name"] for pod in pods})
        except Exception as error:
            self.error = error

    @property
    def names(self) -> set[str] | None:
        return self.seen[-1] if self.seen else None


@pytest.fixture
def cluster(kubeconfig: Path) -> Cluster:
    return open_cluster(str(kubeconfig), None, None)


@pytest.fixture
def pods(server: ApiServer, cluster: Cluster) -> Iterator[Pods]:
    """A watch that has begun, with one pod in the namespace."""
    add(server, "first")
    watching = Pods(cluster)
    wait_for(lambda: server.asked("GET", "pods", watch="true"))
    yield watching
    watching.stop.set()
    watching.watched.stop()


def add(server: ApiServer, name: str) -> None:
    server.put("pods", {"metadata": {"name": name}, "status": {"phase": "Pending"}})


def lists(server: ApiServer) -> int:
    return len([query for query in server.asked("GET", "pods") if "watch" not in query])


def test_changes_come_as_they_happen(server: ApiServer, pods: Pods) -> None:
    add(server, "second")
    wait_for(lambda: pods.names == {"first", "second"})
    server.remove("pods", "first")
    wait_for(lambda: pods.names == {"second"})
    assert lists(server) == 1


def test_a_cut_watch_goes_on_where_it_was_without_a_new_list(server: ApiServer, pods: Pods) -> None:
    add(server, "second")
    wait_for(lambda: pods.names == {"first", "second"})
    server.cut_connections()
    add(server, "third")
    server.remove("pods", "first")
    wait_for(lambda: pods.names == {"second", "third"})
    assert lists(server) == 1
    resumed = server.asked("GET", "pods", watch="true")[1]
    assert resumed["resourceVersion"] == server.objects[("pods", "second")]["metadata"]["resourceVersion"]


def test_a_version_that_is_gone_is_listed_again(server: ApiServer, pods: Pods) -> None:
    """A pod that went while nothing could be seen is not kept."""
    server.remove("pods", "first")
    wait_for(lambda: pods.names == set())
    with server.changed:
        server.cut += 1
        add(server, "second")
        server.history.clear()
        server.forget_history()
    wait_for(lambda: pods.names == {"second"})
    assert lists(server) == 2


def test_a_version_that_is_gone_may_also_be_refused_at_once(server: ApiServer, pods: Pods) -> None:
    """Some servers answer 410 instead of an ERROR event."""
    server.refuse("GET", "pods", Refused(410, "Expired", "too old resource version"), times=1)
    server.cut_connections()
    add(server, "second")
    wait_for(lambda: pods.names == {"first", "second"})
    assert lists(server) == 2


def test_an_error_event_without_a_reason_leads_to_a_new_list(server: ApiServer, pods: Pods) -> None:
    with server.changed:
        server.history.append((10**6, "pods", "ERROR", {"metadata": {"name": "x"}, "code": 500}))
        server.changed.notify_all()
    wait_for(lambda: lists(server) == 2)
    assert pods.error is None


def test_a_server_that_fails_for_a_moment_is_asked_again(server: ApiServer, pods: Pods) -> None:
    server.refuse("GET", "pods", Refused(503, "ServiceUnavailable", "starting"), times=2)
    server.cut_connections()
    add(server, "second")
    wait_for(lambda: pods.names == {"first", "second"})


def test_a_refusal_ends_the_watch(server: ApiServer, pods: Pods) -> None:
    server.refuse("GET", "pods", Refused(403, "Forbidden", "pods is forbidden"))
    server.cut_connections()
    wait_for(lambda: pods.error)
    assert isinstance(pods.error, PermissionDeniedError)


def test_a_server_that_stays_away_is_given_up(server: ApiServer, cluster: Cluster) -> None:
    server.refuse("GET", "pods", Refused(503, "ServiceUnavailable", "starting"))
    pods = Pods(cluster, give_up_after_s=0.2)
    wait_for(lambda: pods.error)
    assert isinstance(pods.error, ClusterUnreachableError)
    assert "for 0.2 seconds" in str(pods.error)


def test_each_line_of_a_log_comes_once_over_cut_connections(server: ApiServer, run: Run) -> None:
    """The log is cut after 3, 5, 4 and 7 lines; three lines have one time, and the cut falls between them."""
    command = run(*SUBMIT)
    command.until_says("made in")
    pod = server.add_pod("anna")
    second = "2026-03-01T10:00:00"
    times = [f"{second}.1Z", f"{second}.5Z", *[f"{second}.50000001Z"] * 3, f"{second}.6Z", "2026-03-01T10:00:01+00:00"]
    for number, at in enumerate(times):
        server.log(pod, f"line {number}", at)
    server.log_limits = [3, 5, 4, 7]
    server.start(pod)
    command.until_says("line 6")
    wait_for(lambda: len(server.asked("GET", "pods/anna", follow="true")) >= 5)
    server.log(pod, "line 7", "2026-03-01T10:00:01.000000001Z")
    command.until_says("line 7")
    server.end(pod)
    server.finish("anna")
    assert command.code() == 0
    assert command.out.splitlines() == [f"line {number}" for number in range(8)]
    assert {query.get("sinceTime") for query in server.asked("GET", "pods/anna", follow="true")} == {
        None, "2026-03-01T10:00:00Z", "2026-03-01T10:00:01Z"}  # fmt: skip


def test_everything_at_once(server: ApiServer, run: Run) -> None:
    """Connections are cut and histories forgotten all the time while a run of two pods goes its way."""
    command = run(*SUBMIT, "--nodes", "2")
    command.until_says("made in")
    names = [server.add_pod("anna", index) for index in (0, 1)]
    for name in names:
        server.start(name)
    for step in range(1, 41):
        server.log(names[0], f"step {step}/40")
        if step % 4 == 0:
            server.cut_connections()
        if step % 10 == 0:
            server.forget_history()
    for name in names:
        server.end(name)
    server.finish("anna")
    assert command.code() == 0
    assert command.out.splitlines() == [f"step {step}/40" for step in range(1, 41)]


def test_a_container_without_a_log_yet_is_asked_again(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT)
    command.until_says("made in")
    pod = server.add_pod("anna")
    server.refuse("GET", "pods/log", Refused(400, "BadRequest", "is waiting to start"), times=2)
    server.start(pod)
    server.log(pod, "at last")
    command.until_says("at last")
    server.end(pod)
    server.finish("anna")
    assert command.code() == 0


def test_without_the_right_to_read_events_the_run_is_followed_all_the_same(server: ApiServer, run: Run) -> None:
    server.refuse("GET", "events", Refused(403, "Forbidden", "events is forbidden"))
    command = run(*SUBMIT)
    command.until_says("events may not be read here")
    server.add_pod("anna", phase="Pending", containerStatuses=[container(waiting={"reason": "ErrImagePull"})])
    command.until_says("cannot be pulled")
    server.finish("anna")
    assert command.code() == 0


def test_without_the_right_to_read_logs_the_run_goes_on_and_says_so(server: ApiServer, run: Run) -> None:
    server.refuse("GET", "pods/log", Refused(403, "Forbidden", "pods/log is forbidden"))
    command = run(*SUBMIT)
    command.until_says("made in")
    server.start(server.add_pod("anna"))
    assert command.code() == 77
    assert "run anna goes on in the cluster" in str(command.error)


def test_lines_of_another_order_than_their_times_are_kept() -> None:
    """Standard output and error are stamped apart; only what is read again is left out."""
    seen = SeenLines()
    assert seen.new("2026-03-01T10:00:00.2Z a") == "a"
    assert seen.new("2026-03-01T10:00:00.1Z b") == "b"
    seen.reopen()
    again = [seen.new(f"2026-03-01T10:00:00.{text}") for text in ("2Z a", "1Z b", "3Z c", "25Z d")]
    assert again == [None, None, "c", "d"]


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01T00:00:01.000000007Z", 1_000_000_007),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1969-12-31T22:30:00-01:30", 0),
        ("unable", None),
    ],
)
def test_times_are_read_to_the_nanosecond(stamp: str, expected: int | None) -> None:
    assert nanoseconds(stamp) == expected
