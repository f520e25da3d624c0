"""The fields of JobSet and Kubeflow Trainer objects, as their published Go types and admission rules name them.

Jobs and pods inside them are left to the schemas of Kubernetes. ScaledObject and the monitors are not described here.
"""

from typing import Any

import jsonschema

Schema = dict[str, Any]

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
OBJECT = {"type": "object"}
JOB_FAILURES = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": list(required)}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


RULE = fields(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "maxLength": 128},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=listed({"enum": JOB_FAILURES}),
    onJobFailureMessagePatterns=listed(TEXT),
    targetReplicatedJobs=listed(TEXT),
)
JOB_SET = fields(
    replicatedJobs=listed(
        fields(
            ("name", "template"),
            name=TEXT,
            groupName=TEXT,
            template=fields(("spec",), metadata=OBJECT, spec=OBJECT),
            replicas=COUNT,
            dependsOn=listed(OBJECT),
        )
    ),
    network=fields(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=fields(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=listed(TEXT)),
    failurePolicy=fields(
        maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules=listed(RULE)
    ),
    suspend=FLAG,
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
)
TRAINING_RUNTIME = fields(
    mlPolicy=fields(numNodes=COUNT, torch=fields(numProcPerNode={"type": ["integer", "string"]})),
    podGroupPolicy=OBJECT,
    template=fields(("spec",), metadata=OBJECT, spec=JOB_SET),
)
TRAIN_JOB = fields(
    ("runtimeRef",),
    runtimeRef=fields(("name",), name=TEXT, apiGroup=TEXT, kind=TEXT),
    trainer=fields(
        image=TEXT, command=listed(TEXT), args=listed(TEXT), env=listed(OBJECT), numNodes=COUNT,
        resourcesPerNode=OBJECT, numProcPerNode=COUNT,
    ),
    suspend=FLAG,
    managedBy=TEXT,
)  # fmt: skip
SPECS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): TRAINING_RUNTIME,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
}


def check(manifest: dict[str, Any]) -> bool:
    """Returns whether an object is one of those described here; raises ValidationError for a field that is not."""
    schema = SPECS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        return False
    jsonschema.validate(manifest["spec"], schema)
    return True
