"""What the chart's containers are told, run on this machine: its folders in place of mounts, free ports, probes."""

import contextlib
import os
import sys
import time
import urllib.request
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_triton import free_ports
from rendered_chart import Manifest, Pod, pod, render, values_of

import likeness_toyworld as toyworld

START_S = 60
REWARD_POD = "Deployment/likeness-reward"


class Here:
    """Folders of this machine in place of a pod's mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts: dict[str, Path] = {}

    def mount(self, each: Pod, secrets: dict[str, dict[str, bytes]]) -> None:
        """Lays out a pod's Secrets, each key under the path that the pod gives it, and empty folders for the rest."""
        volumes = {volume["name"]: volume for volume in each.spec["volumes"]}
        for container in each.containers:
            for mount in container["volumeMounts"]:
                target = self.folder / mount["mountPath"].strip("/")
                target.mkdir(parents=True, exist_ok=True)
                self.mounts[mount["mountPath"]] = target
                secret = volumes[mount["name"]].get("secret")
                for item in secret["items"] if secret else ():
                    (target / item["path"]).write_bytes(secrets[secret["secretName"]][item["key"]])

    def word(self, text: str) -> str:
        """Returns a word of a command line with this machine's paths."""
        for path in sorted(self.mounts, key=len, reverse=True):
            for before in ("", "="):
                if before + path in text and (before or text.startswith(path)):
                    return text.replace(before + path, before + str(self.mounts[path]), 1)
        return text


def environment_of(container: Manifest) -> dict[str, str]:
    """Returns what a container's process sees beside the image's variables."""
    image = {"LIKENESS_REWARD_PACK": "/packs/default"}  # of services/reward/Dockerfile
    given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIKENESS_")}
    return inherited | image | given


def await_probe(port: int, service: str, process: Popen[str]) -> None:
    """Returns once a gRPC probe succeeds."""
    give_up_at = time.monotonic() + START_S
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        while time.monotonic() < give_up_at:
            if process.poll() is not None:
                raise AssertionError(process.stdout.read() if process.stdout else "ended")
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest(service=service)
                if health_pb2_grpc.HealthStub(channel).Check(request, timeout=1).status == 1:
                    return
            time.sleep(0.05)
    raise AssertionError(f"nothing SERVING on port {port} within {START_S} s")


def probe(container: Manifest, name: str) -> tuple[int, str]:
    """Returns port and service of a gRPC probe."""
    return container[name]["grpc"]["port"], container[name]["grpc"].get("service", "")


def reward_values(shape: str, **more: Any) -> Manifest:
    """Returns the values of a shape with free ports."""
    values = values_of(shape)
    grpc_port, health, metrics = free_ports(3)
    reward = values.setdefault("reward", {})
    reward.update({"ports": {"grpc": grpc_port, "health": health, "metrics": metrics}, **more})
    return values


def serve(start: Any, here: Here, values: Manifest, secrets: dict[str, dict[str, bytes]]) -> tuple[Any, Manifest]:
    """Starts the reward container of these values on the toy pack; returns process and container once it is ready."""
    each = pod(render(values), REWARD_POD)
    here.mount(each, secrets)
    here.mounts["/packs/default"] = Path(toyworld.face_pack_path())
    container = each.container("reward")
    command = [sys.executable, "-m", "likeness_reward", *map(here.word, container["args"])]
    process = start(command, environment_of(container))
    await_probe(*probe(container, "readinessProbe"), process)
    for name in ("startupProbe", "livenessProbe"):
        await_probe(*probe(container, name), process)
    return process, container


def metrics_of(values: Manifest) -> str:
    """Returns what Prometheus would read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{values['reward']['ports']['metrics']}/metrics") as answer:
        return str(answer.read().decode())


def toy_fingerprint() -> str:
    """Returns the fingerprint of the toy pack."""
    from likeness_reward.pack.pack import load_pack

    return load_pack(Path(toyworld.face_pack_path())).fingerprint
