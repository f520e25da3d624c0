"""The commands of runs in a cluster: submit, list, status, logs, cancel. Parses only; see `commands` for the work."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any

from likeness_trainer.launch.description import Claim, Manifest, Placement, RewardAccess
from likeness_trainer.launch.errors import EXIT_CODES

Commands = Any
"""What argparse's add_subparsers returns."""

SUBMIT = (
    "Trains a recipe in a Kubernetes cluster: makes a Job (or JobSet) with one pod a node and one process a GPU, a "
    "ConfigMap with the resolved recipe and, for several nodes, a Service; the last two are deleted together with the "
    "first. Then follows the run to its end: rank 0's log goes to standard output, what the cluster does, and why pods "
    "do not start, to standard error. Ctrl-C detaches and leaves the run going. The recipe is resolved here, with "
    "--set and LIKENESS_TRAINER_ variables, and must name files as the pods see them: the claims are /models, /data "
    "and /runs. The cluster is that of the kubeconfig or, without one, the one around this pod."
)


def add_commands(commands: Commands) -> None:
    """Adds the five commands to the parser's."""
    from likeness_trainer.launch import commands as work

    submit = _command(commands, "submit", "train a recipe in a Kubernetes cluster", SUBMIT)
    submit.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see recipes/")
    submit.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides",
                        help="override a setting; may be repeated")  # fmt: skip
    _add_run(submit)
    _add_placement(submit)
    _add_storage(submit)
    _add_following(submit)
    submit.set_defaults(run=work.submit)

    listed = _command(commands, "list", "list the runs in a Kubernetes cluster",
                      "Lists the runs that `submit` made in a namespace, the newest first.")  # fmt: skip
    listed.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listed.set_defaults(run=work.list_runs)

    status = _command(commands, "status", "tell how a run in a Kubernetes cluster is doing",
                      "Tells a run's state, its last step, its pods, and what keeps pods from starting.")  # fmt: skip
    status.add_argument("name", metavar="NAME", help="of the run, see `likeness-trainer list`")
    status.add_argument("--json", action="store_true", help="print JSON instead of text")
    status.set_defaults(run=work.status)

    logs = _command(commands, "logs", "print or follow the log of a run in a Kubernetes cluster",
                    "Prints the log of rank 0, or with --follow re-attaches to the run until its end.")  # fmt: skip
    logs.add_argument("name", metavar="NAME", help="of the run")
    logs.add_argument("--follow", "-f", action="store_true",
                      help="read on until the run ends; the exit code tells how it ended")  # fmt: skip
    logs.add_argument("--index", type=_count_or_zero, default=0, metavar="N", help="pod of node N (default: 0, rank 0)")
    logs.add_argument("--tail", type=_count, metavar="N", help="the last N lines only; not with --follow")
    _add_start_timeout(logs)
    logs.set_defaults(run=work.logs)

    cancel = _command(commands, "cancel", "end a run in a Kubernetes cluster and remove it", (
        "Deletes a run's job and all that belongs to it. Pods get SIGTERM and time to finish their step and write a "
        "checkpoint; the run's folder stays. Submitting the recipe under the same name goes on with it."
    ))  # fmt: skip
    cancel.add_argument("name", metavar="NAME", help="of the run")
    cancel.add_argument("--wait", action="store_true", help="return when the last pod is gone")
    cancel.set_defaults(run=work.cancel)


def placement_of(arguments: argparse.Namespace) -> Placement:
    """Returns where the pods may run, from the options of `submit`."""
    return Placement(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        image=arguments.image,
        pull_policy=arguments.pull_policy,
        pull_secrets=tuple(arguments.pull_secret),
        node_selector=dict(arguments.node_selector),
        tolerations=tuple(arguments.toleration),
        runtime_class=arguments.runtime_class,
        priority_class=arguments.priority_class,
        queue=arguments.queue,
        gpu_resource=arguments.gpu_resource,
        cpu=arguments.cpu,
        memory=arguments.memory,
        shared_memory=arguments.shared_memory,
    )


def access_of(arguments: argparse.Namespace) -> RewardAccess:
    """Returns the Secrets that open the reward service, from the options of `submit`."""
    return RewardAccess(arguments.reward_token_secret, arguments.reward_ca_secret, arguments.reward_client_secret)


def _command(commands: Commands, name: str, help_text: str, description: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=textwrap.fill(description, width=100), epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cluster = command.add_argument_group("cluster")
    cluster.add_argument("--namespace", "-n", metavar="NAME", help="default: that of the context or of this pod")
    cluster.add_argument("--context", metavar="NAME", help="of the kubeconfig; default: its current one")
    cluster.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
    return command


def _add_run(submit: argparse.ArgumentParser) -> None:
    run = submit.add_argument_group("run")
    run.add_argument("--name", metavar="NAME", help="of the run; default: the last part of the recipe's run_dir")
    run.add_argument("--kind", choices=("job", "jobset"), default="job",
                     help="job: pods are replaced one by one. jobset: all start anew together; needs JobSet in the "
                     "cluster (default: %(default)s)")  # fmt: skip
    run.add_argument("--reward-endpoint", metavar="HOST:PORT",
                     help="reward service, for example likeness-reward-headless.studio.svc:50051")  # fmt: skip
    run.add_argument("--reward-token-secret", type=_secret_key, metavar="SECRET[:KEY]",
                     help="Secret with the service's bearer token (KEY: token)")  # fmt: skip
    run.add_argument("--reward-ca-secret", metavar="SECRET", help="Secret whose ca.crt signed its certificate")
    run.add_argument("--reward-client-secret", metavar="SECRET",
                     help="Secret with tls.crt and tls.key of the trainer, for mutual TLS")  # fmt: skip
    run.add_argument("--env-secret", action="append", default=[], metavar="SECRET",
                     help="Secret whose keys become variables, for example WANDB_API_KEY; may be repeated")  # fmt: skip
    run.add_argument("--backoff-limit", type=_count_or_zero, default=6, metavar="N",
                     help="failed pods (jobset: restarts) until the run is given up (default: 6)")  # fmt: skip
    run.add_argument("--grace-period", type=_count, default=600, metavar="SECONDS",
                     help="to finish a step and write a checkpoint after SIGTERM (default: %(default)s)")  # fmt: skip
    run.add_argument("--keep-finished", type=_count_or_zero, default=7 * 24 * 3600, metavar="SECONDS",
                     help="after which a finished run's job is deleted (default: %(default)s, a week)")  # fmt: skip


def _add_placement(submit: argparse.ArgumentParser) -> None:
    placement = submit.add_argument_group("placement")
    placement.add_argument("--nodes", type=_count, default=1, metavar="N", help="pods (default: %(default)s)")
    placement.add_argument("--gpus-per-node", type=_count_or_zero, default=1, metavar="M",
                           help="GPUs of each pod, one process a GPU; 0: the CPU (default: %(default)s)")  # fmt: skip
    placement.add_argument("--gpu-resource", default="nvidia.com/gpu", metavar="NAME",
                           help="name of a GPU in the cluster (default: %(default)s)")  # fmt: skip
    placement.add_argument("--image", required=True, metavar="IMAGE",
                           help="of the trainer, built from services/trainer/Dockerfile")  # fmt: skip
    placement.add_argument("--pull-policy", choices=("IfNotPresent", "Always", "Never"), default="IfNotPresent",
                           help="default: %(default)s")  # fmt: skip
    placement.add_argument("--pull-secret", action="append", default=[], metavar="SECRET",
                           help="credentials of the registry; may be repeated")  # fmt: skip
    placement.add_argument("--cpu", metavar="QUANTITY", help="CPUs of each pod, for example 8")
    placement.add_argument("--memory", metavar="QUANTITY", help="memory of each pod, for example 128Gi")
    placement.add_argument("--shared-memory", default="8Gi", metavar="QUANTITY",
                           help="/dev/shm, which NCCL uses; counts as memory (default: %(default)s)")  # fmt: skip
    placement.add_argument("--node-selector", type=_pair, action="append", default=[], metavar="KEY=VALUE",
                           help="label that nodes must have; may be repeated")  # fmt: skip
    placement.add_argument("--toleration", type=_toleration, action="append", default=[],
                           metavar="KEY[=VALUE][:EFFECT]", help="taint to bear; may be repeated")  # fmt: skip
    placement.add_argument("--runtime-class", metavar="NAME", help="for example nvidia")
    placement.add_argument("--priority-class", metavar="NAME")
    placement.add_argument("--queue", metavar="NAME",
                           help="Kueue LocalQueue: the run is made suspended, the queue starts it")  # fmt: skip


def _add_storage(submit: argparse.ArgumentParser) -> None:
    storage = submit.add_argument_group("storage, PersistentVolumeClaims of the namespace")
    storage.add_argument("--runs-claim", type=_claim, metavar="CLAIM[/PATH]",
                         help="mounted at /runs; without it the run is lost with its pod")  # fmt: skip
    storage.add_argument("--models-claim", type=_claim, metavar="CLAIM[/PATH]", help="mounted at /models, read-only")
    storage.add_argument("--data-claim", type=_claim, metavar="CLAIM[/PATH]", help="mounted at /data, read-only")


def _add_following(submit: argparse.ArgumentParser) -> None:
    following = submit.add_argument_group("following")
    either = following.add_mutually_exclusive_group()
    either.add_argument("--detach", action="store_true", help="print the run's name and return at once")
    either.add_argument("--dry-run", nargs="?", const="client", choices=("client", "server"), metavar="client|server",
                        help="client: print the objects as YAML, ask nobody. server: let the cluster check them, keep "
                        "none, and print them (--dry-run alone: client)")  # fmt: skip
    _add_start_timeout(following)


def _add_start_timeout(group: Any) -> None:
    group.add_argument("--start-timeout", type=_count_or_zero, default=1800, metavar="SECONDS",
                       help="in which all pods must start, or following ends with code 4; 0: any time; time in a queue "
                       "does not count (default: %(default)s)")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _count_or_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _toleration(text: str) -> Manifest:
    found = re.fullmatch(r"([^=:]+)(?:=([^:]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY[=VALUE][:EFFECT] with an EFFECT of NoSchedule, PreferNoSchedule or NoExecute"
        )
    key, value, effect = found.groups()
    matched = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
    return {"key": key, **matched, **({"effect": effect} if effect else {})}


def _claim(text: str) -> Claim:
    name, _, path = text.partition("/")
    if not name or ".." in path.split("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM or CLAIM/PATH")
    return Claim(name, path.strip("/"))


def _secret_key(text: str) -> tuple[str, str]:
    name, _, key = text.partition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not SECRET or SECRET:KEY")
    return name, key or "token"
