"""The chart without a cluster: every shape is rendered, checked against Kubernetes' schemas, and its parts fit."""

import copy
import json
import re
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

import custom_resources
from rendered_chart import (  # noqa: E402
    CHART,
    NAMESPACE,
    ROOT,
    SHAPES,
    Manifest,
    Pod,
    find,
    flags_of,
    jobs_in,
    objects_of,
    pod,
    pods_of,
    render,
    selects,
    values_of,
)

from likeness_reward.metrics import ServerMetrics  # noqa: E402
from likeness_reward.server import LAST_MESSAGES_S, SERVICE_NAME  # noqa: E402

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


def selectors_of(manifest: Manifest) -> list[dict[str, str]]:
    """Returns the selectors for pods of this release that an object holds."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Service":
        return [spec["selector"]]
    if kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        return [spec["selector"]["matchLabels"]]
    if kind == "NetworkPolicy":
        return [spec["podSelector"]["matchLabels"]]
    return []


@shapes
def test_selectors_meet_pods(shape: str) -> None:
    pods = list(pods_of(objects_of(shape)))
    for each in objects_of(shape):
        for selector in selectors_of(each):
            assert any(selects(selector, pod.labels) for pod in pods), (each["kind"], each["metadata"]["name"])
        if each["kind"] == "ServiceMonitor":
            wanted = each["spec"]["selector"]["matchLabels"]
            services = [s for s in objects_of(shape) if s["kind"] == "Service"]
            chosen = [s for s in services if selects(wanted, s["metadata"]["labels"])]
            assert len(chosen) == 1, "every pod must be scraped once"
            names = {port["name"] for port in chosen[0]["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in each["spec"]["endpoints"]} <= names


@shapes
def test_components_do_not_share_pods(shape: str) -> None:
    for pod_of_one in pods_of(objects_of(shape)):
        services = [
            s for s in objects_of(shape) if s["kind"] == "Service" and selects(s["spec"]["selector"], pod_of_one.labels)
        ]
        assert all(
            s["metadata"]["labels"]["app.kubernetes.io/component"] == pod_of_one.labels["app.kubernetes.io/component"]
            for s in services
        )


@shapes
def test_services_and_policies_name_ports_that_pods_have(shape: str) -> None:
    pods = list(pods_of(objects_of(shape)))
    for each in objects_of(shape):
        if each["kind"] == "Service" and "likeness-run" not in each["spec"]["selector"]:
            (behind,) = (pod for pod in pods if selects(each["spec"]["selector"], pod.labels))
            for port in each["spec"]["ports"]:
                assert behind.ports[port["targetPort"]] == port["port"]
        if each["kind"] == "NetworkPolicy":
            (behind, *_) = (pod for pod in pods if selects(each["spec"]["podSelector"]["matchLabels"], pod.labels))
            ports = [port["port"] for rule in each["spec"]["ingress"] for port in rule.get("ports", [])]
            assert set(ports) <= behind.ports.keys()


@shapes
def test_probes_ask_ports_of_their_container(shape: str) -> None:
    for each in pods_of(objects_of(shape)):
        for container in each.containers:
            listening = {port["containerPort"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["grpc"]["port"] in listening, (each.owner, container["name"], probe)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "trainer-only"])
def test_the_reward_pod_is_probed_where_it_answers(shape: str) -> None:
    container = pod(objects_of(shape), "Deployment/likeness-reward").container("reward")
    flags = flags_of(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "grpc": int(flags["port"]),
        "health": int(flags["health-port"]),
        "metrics": int(flags["metrics-port"]),
    }
    probes = [container[name]["grpc"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["port"] for probe in probes} == {int(flags["health-port"])}, "the other port may want TLS and a token"
    # Liveness asks for the process: one whose Triton is away must not be restarted.
    assert [probe.get("service") for probe in probes] == [None, None, SERVICE_NAME]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "trainer-only"])
def test_a_reward_pod_has_time_to_drain(shape: str) -> None:
    spec = pod(objects_of(shape), "Deployment/likeness-reward").spec
    (container,) = spec["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(flags_of(container)["drain-timeout-s"])
    assert spec["terminationGracePeriodSeconds"] >= before + drain + LAST_MESSAGES_S + 5


def test_the_triton_sidecar_outlives_the_service_and_shares_its_memory() -> None:
    reward = pod(objects_of("triton-sidecar"), "Deployment/likeness-reward")
    assert [each["name"] for each in reward.spec["initContainers"]] == ["export-pack", "triton"]
    triton, service = reward.container("triton"), reward.container("reward")
    assert triton["restartPolicy"] == "Always", "a plain container would get SIGTERM together with the service"
    assert all({"name": "shared-memory", "mountPath": "/dev/shm"} in each["volumeMounts"] for each in (triton, service))
    assert flags_of(service)["triton-url"] == f"localhost:{flags_of(triton)['grpc-port']}"
    assert flags_of(service)["triton-shared-memory"] == "on"
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in service["resources"]["limits"]


def test_a_triton_of_its_own_is_reached_by_name() -> None:
    objects = objects_of("triton")
    host, _, port = flags_of(pod(objects, "Deployment/likeness-reward").container("reward"))["triton-url"].partition(
        ":"
    )
    service = find(objects, "Service", host)
    assert int(port) in [each["port"] for each in service["spec"]["ports"]]
    assert find(objects, "NetworkPolicy", "likeness-triton")["spec"]["ingress"][0]["from"] == [
        {
            "podSelector": {
                "matchLabels": find(objects, "Deployment", "likeness-reward")["spec"]["selector"]["matchLabels"]
            }
        }
    ]


@shapes
def test_mounts_have_volumes_and_volumes_are_mounted(shape: str) -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in objects_of(shape)}
    for each in pods_of(objects_of(shape)):
        mounted = {mount["name"] for container in each.containers for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in each.spec["volumes"]}, each.owner
        for volume in each.spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names


def secret_files(pod_of_one: Pod, container: Manifest) -> dict[str, tuple[str, str]]:
    """Returns Secret and key of the files that a container sees, by path."""
    volumes = {volume["name"]: volume.get("secret") for volume in pod_of_one.spec["volumes"]}
    return {
        str(PurePosixPath(mount["mountPath"]) / item["path"]): (volumes[mount["name"]]["secretName"], item["key"])
        for mount in container["volumeMounts"]
        if volumes[mount["name"]]
        for item in volumes[mount["name"]]["items"]
    }


def test_secrets_are_mounted_where_server_and_trainer_read_them() -> None:
    objects = objects_of("secured")
    reward = pod(objects, "Deployment/likeness-reward")
    files, flags = secret_files(reward, reward.container("reward")), flags_of(reward.container("reward"))
    assert {name: files[flags[name]] for name in ("token-file", "tls-cert", "tls-key", "client-ca")} == {
        "token-file": ("likeness-token", "bearer"),
        "tls-cert": ("likeness-reward-tls", "tls.crt"),
        "tls-key": ("likeness-reward-tls", "tls.key"),
        "client-ca": ("likeness-clients-ca", "ca.crt"),
    }
    run = pod(objects, "Job/likeness-anna")
    files = secret_files(run, run.container("trainer"))
    settings = dict(
        word.removeprefix("--set=").split("=", 1)
        for word in run.container("trainer")["args"]
        if word.startswith("--set=")
    )
    assert {key: files[settings[f"reward.{key}"]] for key in ("token_file", "tls_ca", "tls_cert", "tls_key")} == {
        "token_file": ("likeness-token", "bearer"),
        "tls_ca": ("likeness-reward-tls", "ca.crt"),
        "tls_cert": ("likeness-trainer-tls", "tls.crt"),
        "tls_key": ("likeness-trainer-tls", "tls.key"),
    }
    assert ("likeness-reward-tls", "tls.key") not in files.values(), "the server's key is not the trainer's business"


@shapes
def test_pods_have_no_more_rights_than_they_need(shape: str) -> None:
    for each in pods_of(objects_of(shape)):
        assert each.spec["automountServiceAccountToken"] is False
        # For a Service likeness-reward Kubernetes would set LIKENESS_REWARD_PORT to tcp://...
        assert each.spec["enableServiceLinks"] is False
        assert each.spec["securityContext"]["runAsNonRoot"] is True
        assert each.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not each.spec.keys() & {"hostNetwork", "hostIPC", "hostPID"}
        for container in each.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
            assert "memory" in container["resources"]["limits"], container["name"]
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"] or container[
                "name"
            ] == "fetch-pack"


@shapes
def test_every_pod_is_behind_a_policy_that_denies_by_default(shape: str) -> None:
    policies = [each["spec"] for each in objects_of(shape) if each["kind"] == "NetworkPolicy"]
    for each in pods_of(objects_of(shape)):
        (policy,) = (p for p in policies if selects(p["podSelector"]["matchLabels"], each.labels))
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule.get("from") for rule in policy["ingress"])
        assert all(rule.get("to") or rule.get("ports") for rule in policy["egress"])


def test_only_trainers_call_and_only_monitoring_reads_metrics() -> None:
    objects = objects_of("runs")
    callers, watchers = find(objects, "NetworkPolicy", "likeness-reward")["spec"]["ingress"]
    assert [port["port"] for port in callers["ports"]] == ["grpc"]
    (peer,) = callers["from"]
    assert peer.keys() == {"podSelector"}, "a podSelector alone means: of this namespace"
    admitted = {each.owner for each in pods_of(objects) if selects(peer["podSelector"]["matchLabels"], each.labels)}
    assert admitted == {"Job/likeness-anna", "Job/likeness-ben"}
    assert [port["port"] for port in watchers["ports"]] == ["metrics"]
    assert watchers["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


@pytest.mark.parametrize(
    ("shape", "kind"), [("secured", "HorizontalPodAutoscaler"), ("triton-sidecar", "ScaledObject")]
)
def test_autoscaling_follows_a_metric_that_the_server_has(shape: str, kind: str) -> None:
    known = {metric.name for metric in ServerMetrics().registry.collect()}
    spec = find(objects_of(shape), kind, "likeness-reward")["spec"]
    used = (
        spec["metrics"][0]["pods"]["metric"]["name"]
        if kind.startswith("Horizontal")
        else spec["triggers"][0]["metadata"]["query"]
    )
    assert "likeness_reward_queue_depth" in known
    assert "likeness_reward_queue_depth" in used
    deployment = find(objects_of(shape), "Deployment", spec["scaleTargetRef"]["name"])
    assert "replicas" not in deployment["spec"], "an upgrade would undo the autoscaler"


def test_a_run_of_two_nodes_meets_at_its_first_pod() -> None:
    objects = objects_of("runs")
    job, service = find(objects, "Job", "likeness-anna")["spec"], find(objects, "Service", "likeness-anna")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert job["template"]["spec"]["subdomain"] == "likeness-anna"
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    container = pod(objects, "Job/likeness-anna").container("trainer")
    endpoint = f"likeness-anna-0.likeness-anna.{NAMESPACE}.svc:{service['ports'][0]['port']}"
    assert flags_of(container)["rdzv-endpoint"] == endpoint
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(flags_of(container)["nproc-per-node"]) == 8
    assert selects(service["selector"], pod(objects, "Job/likeness-anna").labels)
    assert not selects(service["selector"], pod(objects, "Job/likeness-ben").labels)


def test_a_run_is_retried_unless_its_settings_are_wrong() -> None:
    for shape, owner in (("runs", "Job"), ("trainer-only", "JobSet"), ("trainjob", "TrainingRuntime")):
        (job,) = jobs_in(find(objects_of(shape), owner, "likeness-anna"))
        disrupted, wrong = job["podFailurePolicy"]["rules"]
        assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailJob", [2])
        assert job["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy asks for it"
        assert job["podReplacementPolicy"] == "Failed", "two pods must never write one run"


def test_a_run_overrides_the_defaults_also_with_nothing() -> None:
    values = {
        "trainer": {
            "defaults": {"suspend": True, "backoffLimit": 3, "gpusPerNode": 2, "set": {"steps": 9}},
            "runs": {
                "anna": {},
                "ben": {"suspend": False, "backoffLimit": 0, "gpusPerNode": 1, "set": {"seed": 1}},
            },
        }
    }
    objects = render(values)
    anna, ben = (find(objects, "Job", f"likeness-{name}") for name in ("anna", "ben"))
    assert (anna["spec"]["suspend"], anna["spec"]["backoffLimit"]) == (True, 3)
    assert (ben["spec"]["suspend"], ben["spec"]["backoffLimit"]) == (False, 0)
    words = pod(objects, "Job/likeness-ben").container("trainer")["args"]
    assert {"--set=steps=9", "--set=seed=1"} <= set(words)


def test_an_upgrade_of_the_chart_alone_changes_no_pod() -> None:
    for each in pods_of(objects_of("runs")):
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & each.labels.keys()


def test_a_job_set_runs_by_its_own_names() -> None:
    job_set = find(objects_of("trainer-only"), "JobSet", "likeness-anna")
    assert job_set["spec"]["network"]["subdomain"] == "likeness-anna"
    container = pod(objects_of("trainer-only"), "JobSet/likeness-anna").container("trainer")
    assert flags_of(container)["rdzv-endpoint"].startswith(f"likeness-anna-node-0-0.likeness-anna.{NAMESPACE}.svc:")


def test_a_train_job_names_its_runtime() -> None:
    objects = objects_of("trainjob")
    train_job = find(objects, "TrainJob", "likeness-anna")["spec"]
    runtime = find(objects, train_job["runtimeRef"]["kind"], train_job["runtimeRef"]["name"])["spec"]
    assert runtime["mlPolicy"] == {"numNodes": 2, "torch": {"numProcPerNode": 8}}
    (replicated,) = runtime["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # The names by which Kubeflow finds what it may change.
    assert (replicated["name"], replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"]) == (
        "node",
        "node",
    )


def test_runs_stay_when_the_release_goes() -> None:
    claims = {each["metadata"]["name"]: each for each in objects_of("runs") if each["kind"] == "PersistentVolumeClaim"}
    assert claims["likeness-runs"]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert set(claims) == {"likeness-runs", "likeness-cache"}
    assert not [each for each in objects_of("trainer-only") if each["kind"] == "PersistentVolumeClaim"]


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
