"""What goes wrong between the command line and the cluster, in words, each with an exit code of its own."""

from __future__ import annotations

from likeness_trainer.errors import TrainerError


class ClusterError(TrainerError):
    """Base of what a cluster answers, or does not answer."""


class RunFailedError(ClusterError):
    """The run ended without success, or its job was deleted."""

    exit_code = 1


class MissingExtraError(ClusterError):
    """The Kubernetes client is not installed."""

    exit_code = 2


class ManifestRejectedError(ClusterError):
    """The API server finds an object invalid (400, 422)."""

    exit_code = 2


class PodsCannotStartError(ClusterError):
    """Pods did not start in the time allowed; the job stays in the cluster."""

    exit_code = 4


class NoSuchObjectError(ClusterError):
    """The job, the namespace or a kind of object does not exist (404)."""

    exit_code = 66


class NoSuchKindError(NoSuchObjectError):
    """The API server does not serve this kind of object: its CustomResourceDefinition is not installed (404)."""


class ClusterUnreachableError(ClusterError):
    """No kubeconfig, no answer, or an answer that says that the server cannot work now."""

    exit_code = 69


class AlreadyExistsError(ClusterError):
    """The name is taken, or another program owns a field (409)."""

    exit_code = 73


class QuotaExceededError(ClusterError):
    """The namespace's quota does not allow the object."""

    exit_code = 75


class PermissionDeniedError(ClusterError):
    """The credentials are not accepted (401), or may not do this (403)."""

    exit_code = 77


EXIT_CODES = """exit codes:
  0    the run ended well; with --detach or --dry-run: it was accepted
  1    the run failed, or its job was deleted
  2    a setting is wrong, the cluster finds an object invalid, or the Kubernetes client is not installed
  4    the pods did not start within --start-timeout; the job stays in the cluster
  66   there is no such job, namespace or kind of object
  69   the cluster does not answer
  73   the name is taken
  75   the namespace's quota is used up
  77   the credentials are refused, or lack a right
  130  Ctrl-C: detached, the run goes on
"""
