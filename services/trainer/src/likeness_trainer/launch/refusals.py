"""What an API server's refusal means, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException

from likeness_trainer.launch import errors

TRANSIENT = frozenset({429, 500, 502, 503, 504})
"""Answers after which the same request may succeed."""
RIGHTS = (
    "create, delete, get, list, patch and watch jobs; create and patch configmaps and services; get, list and watch "
    "pods; list and watch events; get pods/log (docs/submit.md has it)"
)


@contextmanager
def explained(doing: str, namespace: str, host: str) -> Iterator[None]:
    """Raises what the client raises inside as a ClusterError that says what could not be done, and why."""
    try:
        yield
    except ApiException as error:
        raise refusal(error, doing, namespace) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise errors.ClusterUnreachableError(f"cannot {doing}: no answer from {host}: {_innermost(error)}") from error


def refusal(error: ApiException, doing: str, namespace: str) -> errors.ClusterError:
    """Returns what a refusal means, as an error whose class gives the exit code."""
    message, details = _status(error)
    told = f"cannot {doing} in namespace {namespace}: "
    if error.status == 401:
        return errors.PermissionDeniedError(f"{told}the credentials are not accepted; log in anew. {message}".rstrip())
    if error.status == 403:
        return _forbidden(told, message, namespace)
    if error.status == 404:
        return _not_found(told, message, details, namespace)
    if error.status == 409:
        return errors.AlreadyExistsError(
            f"{told}the name is taken, or another program owns some of its fields: {message}. Choose another --name"
        )
    if error.status in {400, 422}:
        return errors.ManifestRejectedError(f"{told}the cluster finds it invalid: {message}")
    if not error.status:  # the client found the certificate wrong before any answer
        return errors.ClusterUnreachableError(f"{told}no secure connection: {error.reason}")
    return errors.ClusterUnreachableError(
        f"{told}the cluster answers {error.status} {error.reason}: {message}".rstrip(": ")
    )


def _forbidden(told: str, message: str, namespace: str) -> errors.ClusterError:
    if "exceeded quota" in message:
        return errors.QuotaExceededError(
            f"{told}the quota is used up: {message}. See `kubectl describe quota --namespace {namespace}`"
        )
    if "violates PodSecurity" in message or "denied the request" in message or "admission webhook" in message:
        return errors.PermissionDeniedError(f"{told}a policy of the cluster refuses it: {message}")
    return errors.PermissionDeniedError(
        f"{told}you may not: {message}. Ask for a role in {namespace} that may {RIGHTS}"
    )


def _not_found(told: str, message: str, details: dict[str, Any], namespace: str) -> errors.NoSuchObjectError:
    if details.get("kind") == "namespaces":
        return errors.NoSuchObjectError(
            f"{told}there is no namespace {namespace}. Choose one with --namespace, or make it: "
            f"`kubectl create namespace {namespace}`"
        )
    if not details.get("name"):
        return errors.NoSuchKindError(
            f"{told}the cluster does not know this kind of object: {message}. A JobSet needs its "
            "CustomResourceDefinition and controller (https://jobset.sigs.k8s.io); --kind job needs neither"
        )
    return errors.NoSuchObjectError(f"{told}there is no {details.get('kind', 'object')} {details['name']}")


def _status(error: ApiException) -> tuple[str, dict[str, Any]]:
    """Returns message and details of the Status object that an API server answers with, or the raw body."""
    try:
        status = json.loads(error.body or "")
        return str(status.get("message") or "").rstrip("."), dict(status.get("details") or {})
    except (ValueError, AttributeError):
        return (error.body or "").strip()[:300], {}


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)
