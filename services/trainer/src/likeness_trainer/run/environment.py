"""What a run ran on: versions, device and threads, for the report and for whoever repeats the run."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ENVIRONMENT_NAME = "environment.json"
PACKAGES = ("likeness-trainer", "likeness-reward", "torch", "diffsynth", "peft", "transformers", "numpy")


def describe_environment(device: torch.device) -> dict[str, str]:
    """Returns name to text: the platform, Python, the device and its memory, threads, and versions of packages."""
    import torch  # the report reads the file's name from here and need not wait for torch

    described = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "device": str(device),
        "cpu cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        described["cuda"] = str(torch.version.cuda)
    return described | {name: version(name) for name in PACKAGES}


def write_environment(run_dir: Path, device: torch.device) -> None:
    """Writes RUN/environment.json; a resumed run tells where it went on."""
    text = json.dumps(describe_environment(device), indent=2)
    (run_dir / ENVIRONMENT_NAME).write_text(text + "\n", encoding="utf-8")
