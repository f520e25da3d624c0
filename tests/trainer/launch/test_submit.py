"""`submit` makes what belongs to a run, all of it or nothing, and follows it to its end."""

import time

import pytest
import yaml
from api_server import ApiServer, Refused, container
from launch_support import SUBMIT, Run, wait_for

TWO_NODES = (*SUBMIT, "--nodes", "2", "--gpus-per-node", "2")
FORBIDDEN = 'jobs.batch "anna" is forbidden: User "tester" cannot patch resource "jobs" in API group "batch"'
QUOTA = 'configmaps "anna" is forbidden: exceeded quota: small, requested: count/configmaps=1, used: 9, limited: 9'


def test_a_run_is_made_followed_and_ends_well(server: ApiServer, run: Run) -> None:
    command = run(*TWO_NODES)
    command.until_says("made in namespace studio: Job anna, ConfigMap anna, Service anna")
    pods = [server.add_pod("anna", index) for index in (0, 1)]
    for pod in pods:
        server.start(pod)
    command.until_says("2 of 2 pods have started")
    server.log(pods[0], "step 1/100  reward 0.412")
    server.log(pods[1], "of the other node")
    command.until_says("step 1/100  reward 0.412\n")
    server.log(pods[0], "/runs/anna")
    for pod in pods:
        server.end(pod)
    server.finish("anna")
    assert command.code() == 0
    assert command.out == "step 1/100  reward 0.412\n/runs/anna\n"
    assert "run anna has ended well" in command.err


def test_all_objects_belong_to_the_job_and_go_with_it(server: ApiServer, run: Run) -> None:
    assert run(*TWO_NODES, "--detach").code() == 0
    job = server.objects[("jobs", "anna")]
    for plural in ("configmaps", "services"):
        (owner,) = server.objects[(plural, "anna")]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "anna", job["metadata"]["uid"])
    for plural, _ in list(server.objects):
        labels = server.objects[(plural, "anna")]["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "anna"
        assert labels["app.kubernetes.io/managed-by"] == "likeness-trainer"
    assert run("cancel", "anna").code() == 0
    assert server.objects == {}


def test_the_config_map_holds_the_resolved_recipe(server: ApiServer, run: Run) -> None:
    assert run(*SUBMIT, "--set", "steps=7", "--reward-token-secret", "likeness", "--detach").code() == 0
    recipe = yaml.safe_load(server.objects[("configmaps", "anna")]["data"]["recipe.yaml"])
    assert (recipe["steps"], recipe["run_dir"]) == (7, "/runs/anna")
    assert recipe["reward"]["endpoint"] == "likeness-reward-headless.studio.svc:50051"
    assert recipe["reward"]["token_file"] == "/etc/likeness/token/token"
    pod = server.objects[("jobs", "anna")]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["reward-token"] == "/etc/likeness/token"


def test_every_object_is_applied_as_the_same_manager(server: ApiServer, run: Run) -> None:
    assert run(*TWO_NODES, "--detach").code() == 0
    for plural in ("jobs", "configmaps", "services"):
        (query,) = server.asked("PATCH", plural)
        assert query == {"fieldManager": "likeness-trainer", "fieldValidation": "Strict"}


def test_a_detached_run_prints_its_name_and_how_to_go_on(run: Run) -> None:
    command = run(*SUBMIT, "--detach")
    assert command.code() == 0
    assert command.out == "anna\n"
    assert "likeness-trainer logs anna --follow --namespace studio" in command.err


def test_a_failed_run_gives_code_1_and_what_its_pods_said(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT)
    command.until_says("made in")
    pod = server.add_pod("anna")
    server.start(pod)
    server.log(pod, "error: data.metadata: no file /data/metadata.csv")
    server.end(pod, 2, "Error", "error: data.metadata: no file /data/metadata.csv\n")
    server.finish("anna", "Failed", reason="PodFailurePolicy", message="Container trainer failed with exit code 2")
    assert command.code() == 1
    assert "run anna has failed (PodFailurePolicy" in str(command.error)
    assert "exit code 2 (a setting, file or row is wrong): error: data.metadata: no file" in str(command.error)


def test_the_log_of_a_replaced_pod_goes_on_with_that_of_the_next(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT)
    command.until_says("made in")
    first = server.add_pod("anna", suffix="first")
    server.start(first)
    server.log(first, "step 1/2")
    command.until_says("step 1/2")
    server.end(first, 137, "OOMKilled")
    command.until_says("pod anna-0-first: out of memory")
    second = server.add_pod("anna", suffix="second")
    server.objects[("pods", second)]["metadata"]["creationTimestamp"] = "2999-01-01T00:00:00Z"
    server.start(second)
    server.log(second, "step 2/2")
    server.end(second)
    server.finish("anna")
    assert command.code() == 0
    assert command.out == "step 1/2\nstep 2/2\n"


def test_pods_that_no_node_takes_are_explained_and_end_following_in_time(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, "--start-timeout", "1")
    command.until_says("made in")
    why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    server.add_pod("anna", phase="Pending", conditions=[
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}])  # fmt: skip
    command.until_says("no node has as many free GPUs as --gpus-per-node")
    assert command.code() == 4
    assert "have not all started in 1 seconds" in str(command.error)
    assert "`likeness-trainer cancel anna --namespace studio`" in str(command.error)
    assert ("jobs", "anna") in server.objects


def test_an_image_that_cannot_be_pulled_is_named(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT)
    command.until_says("made in")
    waiting = {"reason": "ErrImagePull", "message": "failed to resolve reference: not found"}
    pod = server.add_pod("anna", phase="Pending", containerStatuses=[container(waiting=waiting)])
    command.until_says("the image trainer:1 cannot be pulled (ErrImagePull: failed")
    command.until_says("There is no such image or tag: --image")
    server.start(pod)
    server.end(pod)
    server.finish("anna")
    assert command.code() == 0


def test_a_quota_that_keeps_pods_from_being_made_is_told(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, "--start-timeout", "1")
    command.until_says("made in")
    server.warn("Job", "anna", "FailedCreate", 'pods "anna-0-x" is forbidden: exceeded quota: gpus, requested: 1')
    server.warn("Job", "bert", "FailedCreate", "of another run")
    command.until_says("no pod can be made, the namespace's quota is used up")
    assert command.code() == 4
    assert "of another run" not in command.err + str(command.error)


def test_a_suspended_run_waits_for_its_queue_without_a_limit(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, "--queue", "gpus", "--start-timeout", "1")
    command.until_says("the run is suspended: a queue, or somebody, must let it start")
    assert server.objects[("jobs", "anna")]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    job = server.objects[("jobs", "anna")]
    time.sleep(2.0)
    assert command.error is None
    server.put("jobs", {**job, "spec": {**job["spec"], "suspend": False}})
    assert command.code() == 4


def test_a_run_that_is_deleted_by_another_is_a_failure(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT)
    command.until_says("made in")
    wait_for(lambda: server.asked("GET", "jobs", watch="true"))
    server.remove("jobs", "anna")
    assert command.code() == 1
    assert "was deleted" in str(command.error)


@pytest.mark.parametrize(
    ("plural", "refused", "code", "words"),
    [
        ("jobs", Refused(403, "Forbidden", FORBIDDEN), 77, "you may not"),
        ("jobs", Refused(403, "Forbidden", 'violates PodSecurity "restricted:latest"'), 77, "a policy of the cluster"),
        ("configmaps", Refused(403, "Forbidden", QUOTA), 75, "the quota is used up"),
        ("services", Refused(403, "Forbidden", 'services "anna" is forbidden: User'), 77, "configmaps and services"),
        ("jobs", Refused(409, "Conflict", 'conflict with "helm": .spec.completions'), 73, "another program owns"),
        ("jobs", Refused(422, "Invalid", "spec.template: Required value"), 2, "finds it invalid: spec.template"),
        ("services", Refused(500, "InternalError", "etcdserver: leader changed"), 69, "the cluster answers 500"),
        ("services", ConnectionResetError(), 69, "no answer from http://127.0.0.1"),
    ],
)
def test_a_refusal_is_told_in_words_and_leaves_nothing(
    server: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch, plural: str, refused: Exception, code: int, words: str
) -> None:
    monkeypatch.setattr("likeness_trainer.launch.cluster.PAUSES_S", (0.01, 0.01))
    server.refuse("PATCH", plural, refused)
    command = run(*TWO_NODES)
    assert command.code() == code
    assert words in str(command.error)
    assert server.objects == {}


def test_what_cannot_be_taken_back_is_named(server: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("likeness_trainer.launch.cluster.PAUSES_S", (0.01,))
    server.refuse("PATCH", "configmaps", Refused(403, "Forbidden", QUOTA))
    server.refuse("DELETE", "jobs", Refused(403, "Forbidden", "cannot delete jobs"))
    command = run(*SUBMIT)
    assert command.code() == 1
    assert "exceeded quota" in str(command.error)
    assert "remove it with `likeness-trainer cancel anna --namespace studio`" in str(command.error)


def test_a_name_is_taken_once(server: ApiServer, run: Run) -> None:
    assert run(*SUBMIT, "--detach").code() == 0
    before = server.objects[("jobs", "anna")]
    second = run(*SUBMIT, "--set", "steps=7")
    assert second.code() == 73
    assert "there is a run anna in namespace studio already" in str(second.error)
    assert server.objects[("jobs", "anna")] is before


def test_a_job_of_somebody_else_is_left_alone(server: ApiServer, run: Run) -> None:
    server.put("jobs", {"kind": "Job", "metadata": {"name": "anna"}, "spec": {"completions": 1}})
    command = run(*SUBMIT)
    assert command.code() == 73
    assert "that likeness-trainer did not make" in str(command.error)
    assert run("cancel", "anna").code() == 66
    assert ("jobs", "anna") in server.objects


def test_one_of_two_submitters_at_the_same_time_is_refused(server: ApiServer, run: Run) -> None:
    """Neither sees the other's job at first; the server's answer to the second says that it is not new."""
    assert run(*SUBMIT, "--detach").code() == 0
    not_yet = Refused(404, "NotFound", 'jobs "anna" not found', name="anna", kind="jobs")
    server.refuse("GET", "jobs", not_yet, times=1)
    assert run(*SUBMIT, "--detach").code() == 73
    assert ("jobs", "anna") in server.objects


def test_an_answer_that_is_lost_is_asked_for_again(server: ApiServer, run: Run) -> None:
    server.lose_answers("PATCH", "jobs", times=1)
    assert run(*SUBMIT, "--detach").code() == 0
    assert len(server.asked("PATCH", "jobs")) == 2
    assert {plural for plural, _ in server.objects} == {"jobs", "configmaps"}


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server: ApiServer, run: Run) -> None:
    server.refuse("PATCH", "jobs", Refused(503, "ServiceUnavailable", "the server is starting"), times=2)
    assert run(*SUBMIT, "--detach").code() == 0
    assert len(server.asked("PATCH", "jobs")) == 3


def test_a_namespace_that_does_not_exist_is_named(run: Run) -> None:
    command = run(*SUBMIT, "--namespace", "atelier")
    assert command.code() == 66
    assert "kubectl create namespace atelier" in str(command.error)


def test_a_jobset_needs_its_definition(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, "--kind", "jobset")
    assert command.code() == 66
    assert "CustomResourceDefinition" in str(command.error)
    assert server.objects == {}


def test_a_jobset_is_made_and_owns_its_recipe(server: ApiServer, run: Run) -> None:
    server.jobset = True
    command = run(*TWO_NODES, "--kind", "jobset")
    command.until_says("made in namespace studio: JobSet anna, ConfigMap anna\n")
    (owner,) = server.objects[("configmaps", "anna")]["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "anna",
                     "uid": server.objects[("jobsets", "anna")]["metadata"]["uid"]}  # fmt: skip
    wait_for(lambda: server.asked("GET", "jobsets", watch="true"))
    server.finish("anna", "Completed", "jobsets")
    assert command.code() == 0


def test_a_run_that_every_pod_would_refuse_is_refused_here(server: ApiServer, run: Run) -> None:
    command = run(*SUBMIT, "--nodes", "3")
    assert command.code() == 2
    assert "algorithm.groups_per_step is 4, which 3 processes cannot share equally" in str(command.error)
    assert server.requests == []
