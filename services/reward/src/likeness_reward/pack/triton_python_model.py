"""Runs the model.onnx beside it in Triton's python backend; `pack export-triton --runtime python` copies this file.

It stands by itself: Triton's python need not have likeness-reward installed, only numpy and onnxruntime.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL_FILE = "model.onnx"
SEVERITY_ERROR = 3


class TritonPythonModel:
    """One instance of a model: joins the requests that Triton gives it into one run."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the network on the device of this instance; refuses another one."""
        import onnxruntime

        config = json.loads(args["model_config"])
        self.input_names: list[str] = [each["name"] for each in config["input"]]
        self.output_names: list[str] = [output["name"] for output in config["output"]]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = SEVERITY_ERROR
        provider: Any = "CPUExecutionProvider"
        if args["model_instance_kind"] == "GPU":
            provider = ("CUDAExecutionProvider", {"device_id": args["model_instance_device_id"]})
        else:
            options.intra_op_num_threads = int(config["parameters"]["intra_op_thread_count"]["string_value"])
        path = Path(args["model_repository"]) / args["model_version"] / MODEL_FILE
        self.session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
        wanted = provider if isinstance(provider, str) else provider[0]
        in_use = self.session.get_providers()[0]
        if in_use != wanted:
            raise RuntimeError(f"{args['model_name']}: provider {wanted} was asked for, {in_use} is in use")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns one response per request: its rows of the outputs, or the error."""
        import triton_python_backend_utils as backend

        responses: list[Any] = [backend.InferenceResponse(error=cancelled(backend)) for _ in requests]
        waiting = [index for index, request in enumerate(requests) if not request.is_cancelled()]
        if not waiting:
            return responses
        inputs = {
            name: [backend.get_input_tensor_by_name(requests[index], name).as_numpy() for index in waiting]
            for name in self.input_names
        }
        batches = inputs[self.input_names[0]]
        try:
            joined = {name: np.concatenate(parts) for name, parts in inputs.items()}
            outputs = self.session.run(self.output_names, joined)
        except Exception as error:  # onnxruntime's own exceptions share no base: this is its edge
            for index in waiting:
                responses[index] = backend.InferenceResponse(error=backend.TritonError(f"onnxruntime: {error}"))
            return responses
        ends = np.cumsum([len(batch) for batch in batches])
        for index, batch, end in zip(waiting, batches, ends, strict=True):
            rows = slice(int(end) - len(batch), int(end))
            tensors = zip(self.output_names, outputs, strict=True)
            responses[index] = backend.InferenceResponse(
                [backend.Tensor(name, np.ascontiguousarray(output[rows])) for name, output in tensors]
            )
        return responses


def cancelled(backend: Any) -> Any:
    """Returns the error of a request that nobody waits for."""
    return backend.TritonError("the request was cancelled", backend.TritonError.CANCELLED)
