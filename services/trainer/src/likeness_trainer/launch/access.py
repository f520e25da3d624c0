"""Which cluster, which namespace, and as whom: a kubeconfig, or the service account of the pod that this runs in."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes import client, config
from kubernetes.config.incluster_config import InClusterConfigLoader

from likeness_trainer.launch.cluster import Cluster
from likeness_trainer.launch.errors import ClusterUnreachableError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def open_cluster(
    kubeconfig: str | None, context: str | None, namespace: str | None, service_account: Path = SERVICE_ACCOUNT
) -> Cluster:
    """Returns a cluster: that of a kubeconfig, or, without one, the one around the pod that this runs in.

    Args:
        kubeconfig: a file; default: KUBECONFIG, else ~/.kube/config.
        context: of the kubeconfig; default: its current one.
        namespace: default: that of the context or of the pod, else "default".
        service_account: folder in which a pod finds token, certificate and namespace.

    Raises:
        ClusterUnreachableError: there is neither, or the kubeconfig cannot be used.
    """
    settings = client.Configuration()
    settings.connection_pool_maxsize = 8  # watches and the log keep a connection each
    # The client's own default is that of the moment at which it was imported.
    files = kubeconfig or os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
    try:
        contexts, active = config.list_kube_config_contexts(config_file=files)
    except config.ConfigException as error:
        if kubeconfig is not None or context is not None or not (service_account / "token").is_file():
            told = str(error).rstrip(".")
            raise ClusterUnreachableError(f"no cluster in {files}: {told}. Give one with --kubeconfig") from error
        return _around_this_pod(settings, namespace, service_account)
    names = [each["name"] for each in contexts]
    if context is not None and context not in names:
        raise ClusterUnreachableError(f"the kubeconfig has no context {context!r}; it has {', '.join(names)}")
    chosen = active if context is None else next(each for each in contexts if each["name"] == context)
    try:
        config.load_kube_config(config_file=files, context=context, client_configuration=settings, persist_config=False)
    except config.ConfigException as error:
        raise ClusterUnreachableError(f"the kubeconfig cannot be used: {error}") from error
    return Cluster(client.ApiClient(settings), namespace or chosen["context"].get("namespace") or "default")


def _around_this_pod(settings: client.Configuration, namespace: str | None, folder: Path) -> Cluster:
    try:
        InClusterConfigLoader(str(folder / "token"), str(folder / "ca.crt")).load_and_set(settings)
        own = (folder / "namespace").read_text(encoding="utf-8").strip()
    except (config.ConfigException, OSError) as error:
        raise ClusterUnreachableError(f"the service account in {folder} cannot be used: {error}") from error
    return Cluster(client.ApiClient(settings), namespace or own or "default")
