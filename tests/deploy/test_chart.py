"""The chart without a cluster: every shape is rendered, checked against Kubernetes' schemas, and its parts fit."""

import copy
import json
import re
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

import custom_resources  # noqa: E402
from rendered_chart import (  # noqa: E402
    CHART,
    NAMESPACE,
    ROOT,
    SHAPES,
    Manifest,
    find,
    jobs_in,
    objects_of,
    render,
    values_of,
)

from likeness_reward.metrics import ServerMetrics  # noqa: E402

KUBERNETES = ("1.37", "1.36", "1.31", "1.30")
CUSTOM_KINDS = {"ServiceMonitor", "PodMonitor", "ScaledObject", "JobSet", "TrainJob", "TrainingRuntime"}
IMAGE_VOLUME = {"embedded-cuda"}
"""Shapes with a volume from an image, which Kubernetes has since 1.31."""

shapes = pytest.mark.parametrize("shape", SHAPES)


@shapes
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_shape_passes_lint(shape: str, version: str) -> None:
    found = helm_python.lint(
        str(CHART), values_of(shape), strict=True, namespace=NAMESPACE, kube_version=f"{version}.0"
    )
    assert found["errors"] == []


def test_a_volume_from_an_image_is_refused_where_kubernetes_has_none(capfd: pytest.CaptureFixture[str]) -> None:
    told = []
    for version in ("1.30.0", "1.31.0"):  # lint logs what templates refuse
        helm_python.lint(str(CHART), values_of("embedded-cuda"), namespace=NAMESPACE, kube_version=version)
        told.append("volumes from images need Kubernetes 1.31" in capfd.readouterr().err)
    assert told == [True, False]


@shapes
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(shape: str, version: str) -> None:
    if shape in IMAGE_VOLUME and version == "1.30":
        pytest.skip("Kubernetes 1.30 has no volumes from images; the chart refuses them there")
    for each in objects_of(shape):
        if each["kind"] in CUSTOM_KINDS:
            for spec in jobs_in(each):  # what a custom object makes is checked as a Job
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": spec}
                kubernetes_validate.validate(job, version, strict=True)
            continue
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("shape", "kinds"), [("trainer-only", {"JobSet"}), ("trainjob", {"TrainJob", "TrainingRuntime"})]
)
def test_jobset_and_kubeflow_trainer_know_every_field(shape: str, kinds: set[str]) -> None:
    assert {each["kind"] for each in objects_of(shape) if custom_resources.check(each)} == kinds


def test_a_rule_whose_name_jobset_would_refuse_is_seen() -> None:
    """Its names have no hyphens, unlike most names in Kubernetes."""
    broken = copy.deepcopy(find(objects_of("trainer-only"), "JobSet", "likeness-anna"))
    broken["spec"]["failurePolicy"]["rules"][0]["name"] = "wrong-settings"
    with pytest.raises(custom_resources.jsonschema.ValidationError, match="wrong-settings"):
        custom_resources.check(broken)


def test_the_schemas_would_see_a_misspelt_field() -> None:
    broken = copy.deepcopy(find(objects_of("embedded"), "Deployment", "likeness-reward"))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(broken, "1.37", strict=True)


RUN = {"data.metadata": "/data/metadata.csv"}
REFUSED: dict[str, tuple[Manifest, str]] = {
    "an unknown key": ({"reward": {"replica": 3}}, "replica"),
    "an unknown key of a run": ({"trainer": {"runs": {"anna": {"gpus": 8}}}}, "gpus"),
    "minAvailable equal to the replicas": (
        {"reward": {"replicas": 2, "podDisruptionBudget": {"minAvailable": 2}}},
        "minAvailable is 2 of 2 replicas",
    ),
    "minAvailable equal to the fewest pods of autoscaling": (
        {"reward": {"replicas": 9, "podDisruptionBudget": {"minAvailable": 2}, "autoscaling": {"kind": "hpa"}}},
        "minAvailable is 2 of 2 replicas",
    ),
    "all pods must stay": ({"reward": {"podDisruptionBudget": {"minAvailable": "100%"}}}, "minAvailable"),
    "fewest above most": (
        {"reward": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}},
        "must not exceed maxReplicas",
    ),
    "KEDA without Prometheus": ({"reward": {"autoscaling": {"kind": "keda"}}}, "prometheusAddress"),
    "CUDA without GPUs": ({"reward": {"provider": "cuda"}}, "gpus"),
    "GPUs that the CPU provider leaves idle": ({"reward": {"gpus": 1}}, "gpus"),
    "CUDA in the service beside Triton": (
        {"reward": {"backend": "triton-sidecar", "provider": "cuda", "gpus": 1}},
        "backend",
    ),
    "a Triton elsewhere and an embedded backend": ({"reward": {"tritonUrl": "triton:8001"}}, "backend"),
    "no pack": ({"reward": {"pack": {"source": "none"}}}, "source"),
    "a download without its hash": (
        {"reward": {"pack": {"source": "download", "download": {"url": "https://example.com/pack.zip"}}}},
        "sha256",
    ),
    "mutual TLS without TLS": ({"reward": {"tls": {"clientCaSecret": "ca"}}}, "secret"),
    "mutual TLS that the trainers cannot speak": (
        {"reward": {"tls": {"secret": "a", "clientCaSecret": "b"}}, "trainer": {"runs": {"anna": {}}}},
        "trainer.access.clientSecret",
    ),
    "gradients in half precision": ({"triton": {"export": {"gradients": True, "precision": "fp16"}}}, "precision"),
    "TensorRT on the CPU": ({"triton": {"gpus": 0, "export": {"tensorrt": True}}}, "gpus"),
    "a GPU recipe without GPUs": (
        {"trainer": {"runs": {"anna": {"gpusPerNode": 0}}}},
        "trainer.runs.anna: gpusPerNode is 0",
    ),
    "a GPU recipe written out, without GPUs": (
        {"trainer": {"runs": {"anna": {"gpusPerNode": 0, "recipeInline": {"model": {"device": "auto"}}}}}},
        "trainer.runs.anna: gpusPerNode is 0",
    ),
    "GPUs for a run on the CPU": ({"trainer": {"runs": {"anna": {"set": {"model.device": "cpu"}}}}}, "would idle"),
    "a run without a reward service": (
        {"reward": {"enabled": False}, "trainer": {"runs": {"anna": {}}}},
        "trainer.runs need a reward service",
    ),
    "several nodes on a volume of one": (
        {"trainer": {"runs": {"anna": {"nodes": 2}}}, "storage": {"runs": {"accessModes": ["ReadWriteOnce"]}}},
        "ReadWriteMany",
    ),
    "more processes than groups": (
        {"trainer": {"runs": {"anna": {"nodes": 2, "gpusPerNode": 8}}}},
        "groups_per_step is 4, which 16 processes cannot share",
    ),
    "a run folder of one's own": ({"trainer": {"runs": {"anna": {"set": {"run_dir": "/tmp/x"}}}}}, "run_dir is set by"),
    "a run named like a Service of the chart": ({"trainer": {"runs": {"reward": {}}}}, "name is taken"),
    "a run whose name is no name": ({"trainer": {"runs": {"Anna B": {}}}}, "Anna B"),
    "a digest that is none": ({"reward": {"image": {"digest": "sha256:12"}}}, "digest"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nonsense_is_refused_by_name(what: str) -> None:
    values, message = REFUSED[what]
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_the_chart_knows_the_groups_of_the_recipes() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in (ROOT / "recipes").glob("*.yaml")]
    assert {recipe["algorithm"]["groups_per_step"] for recipe in recipes} == {4}
    assert render({"trainer": {"runs": {"anna": {"gpusPerNode": 4}}}})


def test_a_budget_below_the_replicas_is_taken() -> None:
    objects = render({"reward": {"replicas": 3, "podDisruptionBudget": {"minAvailable": 2}}})
    assert find(objects, "PodDisruptionBudget", "likeness-reward")["spec"]["minAvailable"] == 2


def keys_without_comment(lines: list[str]) -> list[str]:
    """Returns the keys of values.yaml that no comment stands above; what is written in one line counts as one value."""
    missing = []
    for before, line in zip(["", *lines], lines, strict=False):
        text = line.strip()
        if not text or text.startswith(("#", "-")):
            continue
        if not before.strip().startswith("#") and text.partition(":")[0] not in ("requests", "limits"):
            missing.append(text)
    return missing


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert keys_without_comment(lines) == []
    assert keys_without_comment(["# why", "one: 1", "two: 2"]) == ["two: 2"]


def compare(schema: Any, values: Any, definitions: Any, where: str = "") -> list[str]:
    """Returns the keys that only the schema or only the values have."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" not in schema or not isinstance(values, dict):
        return []
    assert schema["additionalProperties"] is False, where
    odd = [f"{where}.{key}" for key in schema["properties"].keys() ^ values.keys() if f"{where}.{key}" != ".global"]
    shared = schema["properties"].keys() & values.keys()
    return odd + [
        text
        for key in shared
        for text in compare(schema["properties"][key], values[key], definitions, f"{where}.{key}")
    ]


def test_schema_and_values_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {".reward.resources", ".triton.resources", ".trainer.defaults.resources"}
    assert [text for text in compare(schema, values, schema["$defs"]) if text not in free] == []


def test_the_notes_say_how_to_score_watch_and_fetch() -> None:
    chart = helm_python.Chart.load(str(CHART))
    notes = chart.render(values_of("runs"), name="likeness", namespace=NAMESPACE)["likeness/templates/NOTES.txt"]
    assert "likeness-reward score clip.mp4 --identity photo.jpg --endpoint localhost:50051" in notes
    assert "--selector likeness-run=ben,batch.kubernetes.io/job-completion-index=0" in notes
    assert f"kubectl -n {NAMESPACE} cp likeness-fetch:/runs/anna/lora ./lora" in notes
    (overrides,) = (line for line in notes.splitlines() if "--overrides=" in line)
    fetch = json.loads(overrides.partition("--overrides='")[2].removesuffix("'"))
    assert fetch["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "likeness-runs"


def test_the_operations_guide_names_metrics_that_exist() -> None:
    metrics = ServerMetrics()
    metrics.describe(pack="x")
    known = {sample.name for metric in metrics.registry.collect() for sample in metric.samples} | {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics.registry.collect()
    }
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"likeness_reward_[a-z_]+", text))
    assert len(named) >= 10
    assert named <= known
