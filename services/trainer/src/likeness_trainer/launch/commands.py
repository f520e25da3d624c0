"""The work of submit, list, status, logs and cancel. The Kubernetes client is imported when a cluster is asked."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from likeness_trainer.launch import errors
from likeness_trainer.launch.description import Launch, Manifest
from likeness_trainer.launch.objects import job_spec, newest

if TYPE_CHECKING:
    from likeness_trainer.launch.cluster import Cluster

APPLIED_BY_HAND = """\
# Submitted, the other objects belong to the Job and go with it. Created by hand they stay: delete all of them.
"""
STEP_LINES = 200
"""Lines of the end of the log among which `status` looks for the last step."""


def submit(arguments: argparse.Namespace) -> None:
    """Makes the objects of a run and follows it; with --dry-run prints them. Raises ConfigError or ClusterError."""
    from likeness_trainer.launch.manifests import manifests, to_yaml
    from likeness_trainer.launch.recipe import doubts

    launch = _launch(arguments)
    objects = manifests(launch)
    for doubt in doubts(launch):
        _say(f"note: {doubt}")
    if arguments.dry_run == "client":
        print(APPLIED_BY_HAND, end="")
        print(to_yaml([_placed(each, arguments.namespace) for each in objects]), end="")
        return
    cluster = _open(arguments)
    if arguments.dry_run == "server":
        cluster.try_out(objects)
        _say(f"{cluster.api.configuration.host} accepts these objects; none was kept")
        print(to_yaml([_placed(each, cluster.namespace) for each in objects]), end="")
        return
    workload = cluster.create(objects)
    made = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in objects)
    _say(f"made in namespace {cluster.namespace}: {made}")
    if arguments.detach:
        _say(_how_to_go_on(cluster, launch.name))
        print(launch.name)
        return
    _follow(cluster, workload, arguments.start_timeout, index=0)


def list_runs(arguments: argparse.Namespace) -> None:
    """Prints the runs of a namespace. Raises ClusterError."""
    from likeness_trainer.launch.states import age, summary

    cluster = _open(arguments)
    runs = [summary(run, None) for run in cluster.runs()]
    if arguments.json:
        print(json.dumps(runs, indent=2))
        return
    if not runs:
        _say(f"no runs in namespace {cluster.namespace}")
        return
    rows = [[run["name"], run["kind"], run["state"], f"{run['nodes']}", f"{run['gpus_per_node']}", age(run["created"])]
            for run in runs]  # fmt: skip
    _print_table(["NAME", "KIND", "STATE", "NODES", "GPUS/NODE", "AGE"], rows)


def status(arguments: argparse.Namespace) -> None:
    """Prints how a run is doing. Raises ClusterError."""
    from likeness_trainer.launch.states import age, details

    cluster = _open(arguments)
    workload = cluster.find(arguments.name)
    pods = cluster.pods(arguments.name)
    told = details(workload, pods, cluster.warnings(), _last_step(cluster, pods))
    if arguments.json:
        print(json.dumps(told, indent=2))
        return
    print(f"{told['name']}: {told['state']}  ({told['kind']}, {told['nodes']} x {told['gpus_per_node']} GPUs, "
          f"{told['image']}, {told['run_dir']}, made {age(told['created'])} ago)")  # fmt: skip
    if told["step"]:
        print(told["step"])
    for text in [told["verdict"], *told["troubles"]]:
        if text:
            print(text)
    if pods:
        rows = [[str(pod["index"]), pod["name"], pod["phase"] or "?", pod["node"] or "-"] for pod in told["pods"]]
        _print_table(["NODE", "POD", "PHASE", "RUNS ON"], rows)


def logs(arguments: argparse.Namespace) -> None:
    """Prints the log of a pod, or follows the run. Raises ClusterError."""
    cluster = _open(arguments)
    workload = cluster.find(arguments.name)
    nodes = job_spec(workload)["completions"]
    if arguments.index >= nodes:
        raise errors.NoSuchObjectError(f"--index is {arguments.index}; run {arguments.name} has pods 0 to {nodes - 1}")
    if arguments.follow:
        _follow(cluster, workload, arguments.start_timeout, arguments.index)
        return
    pod = newest(cluster.pods(arguments.name), arguments.index)
    if pod is None:
        raise errors.NoSuchObjectError(f"run {arguments.name} has no pod {arguments.index} yet; see "
                                       f"`{cluster.command('status', arguments.name)}`")  # fmt: skip
    for line in _log(cluster, pod["metadata"]["name"], arguments.tail):
        print(line)


def cancel(arguments: argparse.Namespace) -> None:
    """Deletes a run; with --wait returns when its pods are gone. Raises ClusterError."""
    from likeness_trainer.launch.states import state_of

    cluster = _open(arguments)
    workload = cluster.find(arguments.name)
    cluster.delete(workload)
    grace_s = job_spec(workload)["template"]["spec"].get("terminationGracePeriodSeconds", 30)
    is_over = state_of(workload, None) in {"ended", "failed"}
    rest = "its folder stays" if is_over else f"its pods have {grace_s} seconds to write a checkpoint; its folder stays"
    _say(f"run {arguments.name} is deleted from namespace {cluster.namespace}; {rest}")
    if not arguments.wait:
        return
    deadline = time.monotonic() + grace_s + 60
    while left := cluster.pods(arguments.name):
        if time.monotonic() > deadline:
            names = ", ".join(str(pod["metadata"]["name"]) for pod in left)
            raise errors.ClusterError(f"these pods are still there, long after their time: {names}")
        time.sleep(1.0)
    _say("all pods are gone")


def _launch(arguments: argparse.Namespace) -> Launch:
    from likeness_trainer.launch.options import access_of, placement_of
    from likeness_trainer.launch.recipe import require_possible, resolve

    access = access_of(arguments)
    name, config = resolve(arguments.recipe, arguments.overrides, arguments.name, arguments.kind,
                           arguments.reward_endpoint, access)  # fmt: skip
    launch = Launch(
        name=name,
        config=config,
        placement=placement_of(arguments),
        version=version("likeness-trainer"),
        kind=arguments.kind,
        runs=arguments.runs_claim,
        models=arguments.models_claim,
        data=arguments.data_claim,
        access=access,
        environment_secrets=tuple(arguments.env_secret),
        backoff_limit=arguments.backoff_limit,
        grace_period_s=arguments.grace_period,
        keep_finished_s=arguments.keep_finished,
    )
    require_possible(launch)
    return launch


def _open(arguments: argparse.Namespace) -> Cluster:
    if importlib.util.find_spec("kubernetes") is None:
        raise errors.MissingExtraError(
            "the Kubernetes client is not installed: `pip install likeness-trainer[kubernetes]`. "
            "Without it, submit --dry-run prints the objects for `kubectl create -f -`"
        )
    from likeness_trainer.launch.access import open_cluster

    return open_cluster(arguments.kubeconfig, arguments.context, arguments.namespace)


def _follow(cluster: Cluster, workload: Manifest, start_timeout_s: float, index: int) -> None:
    """Follows a run to its end; raises RunFailedError when it does not end well. Ctrl-C leaves the run going."""
    from likeness_trainer.launch.display import Display
    from likeness_trainer.launch.follow import Follower

    name = workload["metadata"]["name"]
    try:
        with Display() as display:
            ended = Follower(cluster, workload, display, start_timeout_s, index).run()
    except KeyboardInterrupt:
        _say(f"\ndetached; {_how_to_go_on(cluster, name)}")
        raise
    except (errors.ClusterUnreachableError, errors.PermissionDeniedError) as error:
        raise type(error)(f"{error}\n{_how_to_go_on(cluster, name)}") from error
    if not ended.succeeded:
        raise errors.RunFailedError(ended.text)
    _say(ended.text)


def _how_to_go_on(cluster: Cluster, name: str) -> str:
    return (
        f"run {name} goes on in the cluster\n"
        f"  {cluster.command('logs', name, '--follow')}    attach to it again\n"
        f"  {cluster.command('status', name)}\n"
        f"  {cluster.command('cancel', name)}    end it, with a checkpoint"
    )


def _log(cluster: Cluster, pod: str, tail: int | None) -> list[str]:
    """Returns the lines of a pod's log without their times. Raises ClusterError."""
    from likeness_trainer.launch.logs import SeenLines
    from likeness_trainer.launch.pod import CONTAINER
    from likeness_trainer.launch.refusals import explained

    with explained(f"read the log of pod {pod}", cluster.namespace, cluster.api.configuration.host):
        text = cluster.open_log(pod, CONTAINER, tail=tail).data.decode("utf-8", errors="replace")
    seen = SeenLines()
    return [line for each in text.splitlines() if (line := seen.new(each)) is not None]


def _last_step(cluster: Cluster, pods: list[Manifest]) -> str | None:
    from likeness_trainer.launch.states import last_step

    pod = newest(pods, 0)
    if pod is None:
        return None
    try:
        return last_step(_log(cluster, pod["metadata"]["name"], STEP_LINES))
    except errors.ClusterError:  # no log yet, or not ours to read: the rest of the status is told all the same
        return None


def _placed(manifest: Manifest, namespace: str | None) -> Manifest:
    if namespace is None:
        return manifest
    metadata = {"name": manifest["metadata"]["name"], "namespace": namespace, **manifest["metadata"]}
    return {**manifest, "metadata": metadata}


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(text: str) -> Any:
    print(text, file=sys.stderr, flush=True)
