"""The chart as its tests see it: rendered objects, the pods in them, and what selects what."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "likeness"
SHAPES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "studio"
RELEASE = "likeness"

Manifest = dict[str, Any]


def values_of(shape: str) -> Manifest:
    """Returns the values of a shape in ci/."""
    return yaml.safe_load((CHART / "ci" / f"{shape}-values.yaml").read_text()) or {}


def render(values: Manifest, release: str = RELEASE) -> list[Manifest]:
    """Returns the objects of the chart with these values. Raises HelmError where the chart refuses them."""
    rendered = helm_python.Chart.load(str(CHART)).render(values, name=release, namespace=NAMESPACE)
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@cache
def objects_of(shape: str) -> tuple[Manifest, ...]:
    """Returns the objects of a shape in ci/."""
    return tuple(render(values_of(shape)))


def find(objects: Any, kind: str, name: str) -> Manifest:
    """Returns the one object of a kind and name."""
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Pod:
    """The pod template of an object."""

    owner: str
    labels: dict[str, str]
    spec: Manifest

    @property
    def containers(self) -> list[Manifest]:
        """All containers, those of the initialisation first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> Manifest:
        """Returns the container of a name."""
        (found,) = (each for each in self.containers if each["name"] == name)
        return found

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the ports by name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


def jobs_in(manifest: Manifest) -> list[Manifest]:
    """Returns the specs of the Jobs that an object is or makes."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Job":
        return [spec]
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [each["template"]["spec"] for each in spec.get("replicatedJobs", [])]


def pods_of(objects: Any) -> Iterator[Pod]:
    """Yields the pods that objects make."""
    for each in objects:
        templates = [job["template"] for job in jobs_in(each)]
        if each["kind"] == "Deployment":
            templates.append(each["spec"]["template"])
        for template in templates:
            name = f"{each['kind']}/{each['metadata']['name']}"
            yield Pod(name, template["metadata"]["labels"], template["spec"])


def pod(objects: Any, owner: str) -> Pod:
    """Returns the pod of an owner, as in "Deployment/likeness-reward"."""
    (found,) = (each for each in pods_of(objects) if each.owner == owner)
    return found


def selects(match_labels: dict[str, str], labels: dict[str, str]) -> bool:
    """Returns whether labels have all of a selector's."""
    return match_labels.items() <= labels.items()


def flags_of(container: Manifest) -> dict[str, str]:
    """Returns the values of --name=value by name."""
    words = [word for word in container.get("args", []) if word.startswith("--") and "=" in word]
    return dict(word.removeprefix("--").split("=", 1) for word in words)
