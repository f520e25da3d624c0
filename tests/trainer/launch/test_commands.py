"""`list`, `status`, `logs` and `cancel`, and what Ctrl-C does."""

import importlib.util
import json
import re
import signal
import ssl
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import kubernetes_validate
import pytest
import trustme
import yaml
from api_server import TOKEN, ApiServer, Refused, container
from launch_support import ROOT, SUBMIT, Run, wait_for, write_kubeconfig

from likeness_trainer.launch.access import open_cluster
from likeness_trainer.launch.display import Display
from likeness_trainer.launch.errors import ClusterUnreachableError
from likeness_trainer.launch.states import age, last_step, state_of

ROLE = next(
    document
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "submit.md").read_text(), re.DOTALL)
    if (document := yaml.safe_load(block)).get("kind") == "Role"
)
"""The Role that the documentation gives."""


@pytest.fixture
def anna(server: ApiServer, run: Run) -> str:
    """A run of two nodes whose pods run; returns the name of pod 0."""
    assert run(*SUBMIT, "--nodes", "2", "--gpus-per-node", "2", "--detach").code() == 0
    names = [server.add_pod("anna", index) for index in (0, 1)]
    for name in names:
        server.start(name)
    job = server.objects[("jobs", "anna")]
    server.put("jobs", {**job, "status": {"active": 2, "ready": 2}})
    return names[0]


def test_a_namespace_without_runs_says_so(run: Run) -> None:
    command = run("list")
    assert command.code() == 0
    assert (command.out, command.err) == ("", "no runs in namespace studio\n")


def test_runs_are_listed_and_other_jobs_are_not(server: ApiServer, run: Run, anna: str) -> None:
    server.put("jobs", {"kind": "Job", "metadata": {"name": "backup", "labels": {}}, "spec": {"completions": 1}})
    command = run("list")
    assert command.code() == 0
    header, *rows = command.out.splitlines()
    assert header.split() == ["NAME", "KIND", "STATE", "NODES", "GPUS/NODE", "AGE"]
    assert [row.split()[:5] for row in rows] == [["anna", "Job", "running", "2", "2"]]


def test_jobsets_are_listed_beside_jobs(server: ApiServer, run: Run, anna: str) -> None:
    server.jobset = True
    assert run(*SUBMIT, "--name", "bert", "--kind", "jobset", "--detach").code() == 0
    command = run("list", "--json")
    assert command.code() == 0
    listed = {each["name"]: (each["kind"], each["state"]) for each in json.loads(command.out)}
    assert listed == {"anna": ("Job", "running"), "bert": ("JobSet", "starting")}


def test_status_tells_state_step_and_pods(server: ApiServer, run: Run, anna: str) -> None:
    for step in (1, 2):
        server.log(anna, f"step {step}/100  reward 0.4{step}")
    server.log(anna, "something else")
    command = run("status", "anna")
    assert command.code() == 0
    first, step, header, *pods = command.out.splitlines()
    assert first.startswith(
        "anna: running  (Job, 2 x 2 GPUs, registry.example/likeness-trainer:0.1.0, /runs/anna, made"
    )
    assert step == "step 2/100  reward 0.42"
    assert header.split() == ["NODE", "POD", "PHASE", "RUNS", "ON"]
    assert [row.split() for row in pods] == [
        ["0", "anna-0-aaaaa", "Running", "gpu-0"], ["1", "anna-1-aaaaa", "Running", "gpu-1"]]  # fmt: skip


def test_status_tells_why_pods_do_not_start(server: ApiServer, run: Run) -> None:
    assert run(*SUBMIT, "--detach").code() == 0
    server.add_pod("anna", phase="Pending", containerStatuses=[container(waiting={"reason": "ErrImagePull"})])
    server.warn("Pod", "anna-0-aaaaa", "FailedMount", "no such claim")
    command = run("status", "anna")
    assert command.code() == 0
    assert "anna: starting" in command.out
    assert "pod anna-0-aaaaa: the image trainer:1 cannot be pulled" in command.out
    assert "pod anna-0-aaaaa: a volume cannot be mounted (no such claim)" in command.out


def test_status_of_a_failed_run_tells_the_cause_once(server: ApiServer, run: Run) -> None:
    assert run(*SUBMIT, "--detach").code() == 0
    pod = server.add_pod("anna")
    server.end(pod, 75, "Error", "error: no reward server")
    server.finish("anna", "Failed", reason="BackoffLimitExceeded", message="limit reached")
    command = run("status", "anna", "--json")
    assert command.code() == 0
    told = json.loads(command.out)
    assert told["state"] == "failed"
    assert "the reward server stayed away" in told["verdict"]
    assert told["troubles"] == []


def test_logs_prints_lines_without_their_times(server: ApiServer, run: Run, anna: str) -> None:
    for number in range(5):
        server.log(anna, f"line {number}")
    server.log("anna-1-aaaaa", "of node 1")
    for options, expected in (
        ((), [f"line {number}" for number in range(5)]),
        (("--tail", "2"), ["line 3", "line 4"]),
        (("--index", "1"), ["of node 1"]),
    ):
        command = run("logs", "anna", *options)
        assert command.code() == 0
        assert command.out.splitlines() == expected


def test_logs_follows_a_run_again_to_its_end(server: ApiServer, run: Run, anna: str) -> None:
    server.log(anna, "step 1/2")
    command = run("logs", "anna", "--follow")
    command.until_says("step 1/2")
    server.log(anna, "step 2/2")
    server.end(anna)
    server.finish("anna", "Failed", reason="DeadlineExceeded", message="took too long")
    assert command.code() == 1
    assert command.out == "step 1/2\nstep 2/2\n"


def test_logs_of_a_run_that_has_ended_can_be_followed(server: ApiServer, run: Run, anna: str) -> None:
    server.log(anna, "step 2/2")
    server.end(anna)
    server.finish("anna")
    command = run("logs", "anna", "--follow")
    assert command.code() == 0
    assert command.out == "step 2/2\n"


def test_a_pod_that_does_not_exist_is_named(server: ApiServer, run: Run, anna: str) -> None:
    command = run("logs", "anna", "--index", "2")
    assert command.code() == 66
    assert "--index is 2; run anna has pods 0 to 1" in str(command.error)


@pytest.mark.parametrize("arguments", [("status",), ("logs",), ("logs", "--follow"), ("cancel",)])
def test_a_run_that_does_not_exist_is_named(run: Run, arguments: tuple[str, ...]) -> None:
    command = run(arguments[0], "bert", *arguments[1:])
    assert command.code() == 66
    assert "there is no run bert in namespace studio" in str(command.error)


def test_cancel_waits_for_the_last_pod(server: ApiServer, run: Run, anna: str) -> None:
    pod = server.objects[("pods", anna)]
    pod["metadata"]["ownerReferences"] = []  # it takes its time
    command = run("cancel", "anna", "--wait")
    command.until_says("its pods have 630 seconds to write a checkpoint")
    assert ("configmaps", "anna") not in server.objects
    server.remove("pods", anna)
    command.until_says("all pods are gone")
    assert command.code() == 0
    assert server.objects == {}


def test_cancel_removes_a_run_that_has_ended(server: ApiServer, run: Run, anna: str) -> None:
    server.finish("anna")
    command = run("cancel", "anna")
    assert command.code() == 0
    assert command.err == "run anna is deleted from namespace studio; its folder stays\n"
    assert server.objects == {}


def test_cancel_removes_no_run_that_took_the_name_meanwhile(server: ApiServer, run: Run, anna: str) -> None:
    job = server.objects[("jobs", "anna")]
    server.after_get = lambda: server.put("jobs", {**job, "metadata": {**job["metadata"], "uid": "another"}})
    command = run("cancel", "anna")
    assert command.code() == 73
    assert server.objects[("jobs", "anna")]["metadata"]["uid"] == "another"


def test_credentials_that_are_not_accepted_are_told(server: ApiServer, run: Run, kubeconfig: Path) -> None:
    kubeconfig.write_text(kubeconfig.read_text().replace(TOKEN, "expired"))
    command = run("list")
    assert command.code() == 77
    assert "the credentials are not accepted; log in anew" in str(command.error)


def test_a_server_that_is_not_there_is_told(run: Run, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("likeness_trainer.launch.cluster.PAUSES_S", (0.01,))
    write_kubeconfig(kubeconfig, "http://127.0.0.1:9")
    command = run("list")
    assert command.code() == 69
    assert "no answer from http://127.0.0.1:9" in str(command.error)


def test_without_the_client_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kubernetes" else found(name))
    command = run("list")
    assert command.code() == 2
    assert "pip install likeness-trainer[kubernetes]" in str(command.error)


def test_a_dry_run_needs_no_client(kubeconfig: Path) -> None:
    """In a process in which `import kubernetes` fails."""
    program = "import sys; sys.modules['kubernetes'] = None; from likeness_trainer.cli import main; main()"
    told = subprocess.run([sys.executable, "-c", program, *SUBMIT, "--dry-run"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "kind: Job" in told.stdout


def test_ctrl_c_detaches_and_leaves_the_run(server: ApiServer, kubeconfig: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "likeness_trainer", *SUBMIT], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        wait_for(lambda: ("configmaps", "anna") in server.objects or process.poll() is not None)
        pod = server.add_pod("anna")
        server.start(pod)
        server.log(pod, "step 1/100")
        assert process.stdout is not None
        assert process.stdout.readline() == "step 1/100\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "detached; run anna goes on in the cluster" in err
    assert "likeness-trainer logs anna --follow --namespace studio" in err
    assert "Traceback" not in err
    assert ("jobs", "anna") in server.objects


def test_ctrl_c_while_objects_are_made_leaves_nothing(
    server: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("likeness_trainer.launch.cluster.owned_by", interrupted)
    command = run(*SUBMIT)
    with pytest.raises(KeyboardInterrupt):
        command.code()
    assert server.objects == {}


def test_a_context_gives_cluster_and_namespace(kubeconfig: Path) -> None:
    assert open_cluster(str(kubeconfig), None, None).namespace == "studio"
    assert open_cluster(str(kubeconfig), "other", None).namespace == "elsewhere"
    assert open_cluster(str(kubeconfig), "other", "atelier").namespace == "atelier"
    with pytest.raises(ClusterUnreachableError, match="no context 'third'; it has double, other"):
        open_cluster(str(kubeconfig), "third", None)


def test_without_a_kubeconfig_the_pod_around_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS, with the token, certificate and namespace that every pod finds in its service account's folder."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = ApiServer(tls=context)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("studio\n")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    try:
        cluster = open_cluster(None, None, None, tmp_path)
        assert cluster.namespace == "studio"
        assert cluster.runs() == []
        with pytest.raises(ClusterUnreachableError, match="Give one with --kubeconfig"):
            open_cluster(None, None, None, tmp_path / "elsewhere")
    finally:
        server.close()


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("likeness_trainer.launch.cluster.PAUSES_S", (0.01,))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = ApiServer(tls=context)
    try:
        cluster = open_cluster(str(write_kubeconfig(tmp_path / "kubeconfig", server.url)), None, None)
        with pytest.raises(ClusterUnreachableError, match="certificate verify failed"):
            cluster.runs()
    finally:
        server.close()


def test_the_role_of_the_documentation_allows_every_command_and_no_more(server: ApiServer, run: Run) -> None:
    kubernetes_validate.validate(ROLE, "1.32", strict=True)
    server.role, server.jobset = ROLE["rules"], True
    for name, kind, plural in (("anna", "job", "jobs"), ("bert", "jobset", "jobsets")):
        command = run(*SUBMIT, "--name", name, "--kind", kind, "--nodes", "2")
        command.until_says("made in")
        if kind == "job":
            pod = server.add_pod(name)
            server.start(pod)
            server.log(pod, "step 1/1")
            command.until_says("step 1/1")
            server.end(pod)
        wait_for(lambda: server.asked("GET", "events", watch="true"))
        server.finish(name, "Complete" if kind == "job" else "Completed", plural)
        assert command.code() == 0
        assert "events may not be read" not in command.err
        assert run("status", name).code() == 0
        assert run("cancel", name, "--wait").code() == 0
    assert run("list").code() == 0
    allowed = {(group, resource, verb) for rule in ROLE["rules"] for group in rule["apiGroups"]
               for resource in rule["resources"] for verb in rule["verbs"]}  # fmt: skip
    assert server.used == allowed


def test_a_bar_on_the_terminal_shows_the_steps_while_the_log_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display:
        display.line("step 3/40  reward")
        display.line("no step 4/40")
    captured = capsys.readouterr()
    assert "3/40" in captured.err
    assert "4/40" not in captured.err
    assert captured.out == "step 3/40  reward\nno step 4/40\n"


def test_ages_are_written_as_kubectl_does() -> None:
    now = datetime(2026, 3, 8, 12, 0, 0, tzinfo=UTC)
    created = ("2026-03-08T11:59:15Z", "2026-03-08T11:48:00Z", "2026-03-08T05:00:00Z", "2026-03-05T12:00:00Z", None)
    assert [age(each, now) for each in created] == ["45s", "12m", "7h", "3d", "?"]


def test_the_last_step_of_a_log_is_found() -> None:
    assert last_step(["step 1/9 a", "step 2/9 b", "no step 3/9", "stepping 4/9"]) == "step 2/9 b"
    assert last_step(["nothing"]) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "starting"),
        ({"spec": {"completions": 1, "suspend": True}}, "queued"),
        ({"metadata": {"name": "anna", "deletionTimestamp": "2026-03-01T10:00:00Z"}}, "stopping"),
        ({"status": {"ready": 1}}, "running"),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "failed"),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "ended"),
    ],
)
def test_the_state_of_a_run_is_one_word(changes: dict[str, object], expected: str) -> None:
    job = {"kind": "Job", "metadata": {"name": "anna"}, "spec": {"completions": 1}, **changes}
    assert state_of(job, None) == expected


def test_a_log_that_may_not_be_read_does_not_hide_the_status(server: ApiServer, run: Run, anna: str) -> None:
    server.refuse("GET", "pods/log", Refused(403, "Forbidden", "pods/log is forbidden"))
    server.refuse("GET", "events", Refused(403, "Forbidden", "events is forbidden"))
    command = run("status", "anna")
    assert command.code() == 0
    assert "anna: running" in command.out
