"""Tells a missing extra by name instead of by a ModuleNotFoundError deep inside."""

from importlib.util import find_spec

from likeness_reward.errors import MissingExtra

SERVER_MODULES = (
    "onnx",
    "onnxruntime",
    "grpc_health",
    "grpc_reflection",
    "pydantic_settings",
    "prometheus_client",
    "pythonjsonlogger",
)
OTEL_MODULES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.instrumentation.grpc",
)

VISUAL_MODULES = ("matplotlib", "av")
GRADIENT_MODULES = ("torch", "onnx2torch")


def require_server_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [server] extra is installed."""
    missing = [module for module in SERVER_MODULES if find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"{purpose} needs {', '.join(missing)}: pip install 'likeness-reward[server]'", modules=",".join(missing)
        )


def require_otel_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [otel] extra is installed."""
    try:
        missing = [module for module in OTEL_MODULES if find_spec(module) is None]
    except ModuleNotFoundError:  # a parent of the module is missing
        missing = ["opentelemetry"]
    if missing:
        raise MissingExtra(f"{purpose} needs {missing[0]}: pip install 'likeness-reward[server,otel]'")


def require_triton_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [triton] extra is installed."""
    require_server_extra(purpose)
    if find_spec("tritonclient") is None:
        raise MissingExtra(f"{purpose} needs tritonclient: pip install 'likeness-reward[server,triton]'")


def require_visual_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [visual] extra is installed."""
    missing = [module for module in VISUAL_MODULES if find_spec(module) is None]
    if missing:
        raise MissingExtra(f"{purpose} needs {', '.join(missing)}: pip install 'likeness-reward[visual]'")


def has_gradients_extra() -> bool:
    """Returns whether the [gradients] extra is installed."""
    return all(find_spec(module) is not None for module in GRADIENT_MODULES)
