"""The pod of a run: how the trainer is started on each node, and what it sees there."""

from __future__ import annotations

from likeness_trainer.launch.description import REPLICATED_JOB, Claim, Launch, Manifest

CONTAINER = "trainer"
RENDEZVOUS_PORT = 29500
TORCHRUN_RESTARTS = 3
TORCHRUN_SECONDS = 30
"""Time that torchrun itself needs after its processes have ended."""
RECIPE_FOLDER = "/etc/likeness/recipe"
TOKEN_FOLDER = "/etc/likeness/token"
CA_FOLDER = "/etc/likeness/ca"
CLIENT_FOLDER = "/etc/likeness/client"

START_SCRIPT = """\
# A new pod goes on with the run of the pod that it replaces.
if [ -e "$RUN_DIR/config.yaml" ]; then set -- "$@" --resume; fi
# Pod 0 keeps the store at which the processes meet, even before its own name resolves.
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then export PET_RDZV_CONF=is_host=true; else export PET_RDZV_CONF=is_host=false; fi
exec "$@"
"""


def train_command(launch: Launch) -> list[str]:
    """Returns the command of every pod: the trainer itself, or torchrun when several processes work together.

    torchrun numbers the nodes by the order of their names, so that pod 0 holds rank 0.
    """
    train = ["train", f"{RECIPE_FOLDER}/recipe.yaml"]
    placement = launch.placement
    if placement.world_size == 1:
        return ["likeness-trainer", *train]
    if placement.nodes == 1:
        meeting = ["--standalone"]
    else:
        prefix = f"{launch.name}-{REPLICATED_JOB}-0" if launch.kind == "jobset" else launch.name
        endpoint = f"{prefix}-0.{launch.name}:{RENDEZVOUS_PORT}"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", launch.name]
    return [
        "torchrun", "--nnodes", str(placement.nodes), "--nproc-per-node", str(placement.processes_per_node), *meeting,
        "--max-restarts", str(TORCHRUN_RESTARTS), "--shutdown-timeout", str(launch.grace_period_s),
        "-m", "likeness_trainer", *train,
    ]  # fmt: skip


def pod(launch: Launch) -> Manifest:
    """Returns the pod's spec. It meets the Pod Security Standard "restricted".

    Service links stay off: a Service likeness-trainer would put LIKENESS_TRAINER_PORT into the environment, and the
    trainer would read it as a setting.
    """
    placement = launch.placement
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
    several = placement.world_size > 1
    optional: Manifest = {
        "subdomain": launch.name if launch.kind == "job" else None,
        "imagePullSecrets": [{"name": name} for name in placement.pull_secrets],
        "nodeSelector": placement.node_selector,
        "tolerations": list(placement.tolerations),
        "runtimeClassName": placement.runtime_class,
        "priorityClassName": placement.priority_class,
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": launch.grace_period_s + (TORCHRUN_SECONDS if several else 0),
        "securityContext": user,
        **{key: value for key, value in optional.items() if value},
        "containers": [_container(launch)],
        "volumes": [volume for volume, _ in _volumes(launch)],
    }


def _container(launch: Launch) -> Manifest:
    placement = launch.placement
    requests = {"cpu": placement.cpu, "memory": placement.memory}
    limits = {"memory": placement.memory, placement.gpu_resource: str(placement.gpus_per_node or "") or None}
    resources = {
        kind: values
        for kind, given in (("requests", requests), ("limits", limits))
        if (values := {name: value for name, value in given.items() if value is not None})
    }
    sources = [{"secretRef": {"name": name}} for name in launch.environment_secrets]
    return {
        "name": CONTAINER,
        "image": placement.image,
        "imagePullPolicy": placement.pull_policy,
        "command": ["sh", "-c", START_SCRIPT, "start"],
        "args": train_command(launch),
        "workingDir": "/",
        "env": _environment(launch),
        **({"envFrom": sources} if sources else {}),
        **({"resources": resources} if resources else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount for _, mount in _volumes(launch)],
    }


def _environment(launch: Launch) -> list[Manifest]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    environment: list[Manifest] = [
        {"name": "RUN_DIR", "value": launch.config.run_dir},
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
    ]
    if launch.placement.nodes > 1:
        # Processes that start again must not read addresses of those before.
        environment.append({"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"})
    return environment


def _volumes(launch: Launch) -> list[tuple[Manifest, Manifest]]:
    """Returns (volume, mount) of everything that a pod reads or writes."""
    memory = {"medium": "Memory", "sizeLimit": launch.placement.shared_memory}
    access = launch.access
    volumes: list[tuple[Manifest, Manifest] | None] = [
        ({"name": "recipe", "configMap": {"name": launch.name}}, {"mountPath": RECIPE_FOLDER, "readOnly": True}),
        ({"name": "temporary", "emptyDir": {}}, {"mountPath": "/tmp"}),
        ({"name": "shared-memory", "emptyDir": memory}, {"mountPath": "/dev/shm"}),
        _claimed("runs", launch.runs) or ({"name": "runs", "emptyDir": {}}, {"mountPath": "/runs"}),
        _claimed("models", launch.models),
        _claimed("data", launch.data),
    ]
    if access.token_secret is not None:
        name, key = access.token_secret
        volumes.append(_secret("reward-token", name, {key: "token"}, TOKEN_FOLDER))
    if access.ca_secret is not None:
        volumes.append(_secret("reward-ca", access.ca_secret, {"ca.crt": "ca.crt"}, CA_FOLDER))
    if access.client_secret is not None:
        keys = {"tls.crt": "tls.crt", "tls.key": "tls.key"}
        volumes.append(_secret("reward-client", access.client_secret, keys, CLIENT_FOLDER))
    return [(volume, {"name": volume["name"], **mount}) for volume, mount in filter(None, volumes)]


def _claimed(what: str, claim: Claim | None) -> tuple[Manifest, Manifest] | None:
    if claim is None:
        return None
    mount: Manifest = {"mountPath": f"/{what}"}
    if claim.sub_path:
        mount["subPath"] = claim.sub_path
    if what != "runs":
        mount["readOnly"] = True
    return {"name": what, "persistentVolumeClaim": {"claimName": claim.name}}, mount


def _secret(volume: str, name: str, keys: dict[str, str], folder: str) -> tuple[Manifest, Manifest]:
    """Returns a volume with keys of a Secret as files that the trainer's group may read."""
    items = [{"key": key, "path": path} for key, path in keys.items()]
    secret = {"secretName": name, "items": items, "defaultMode": 0o440}
    return {"name": volume, "secret": secret}, {"mountPath": folder, "readOnly": True}
