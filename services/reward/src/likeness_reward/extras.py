"""Tells a missing extra by name instead of by a ModuleNotFoundError deep inside."""

from importlib.util import find_spec

from likeness_reward.errors import MissingExtra

EMBEDDED_MODULES = ("onnx", "onnxruntime")
SERVER_MODULES = (
    *EMBEDDED_MODULES,
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


def require_embedded_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [embedded] extra is installed."""
    _require(EMBEDDED_MODULES, purpose, "embedded")


def require_server_extra(purpose: str) -> None:
    """Raises MissingExtra, naming the command that installs it, unless the [server] extra is installed."""
    _require(SERVER_MODULES, purpose, "server")


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
    _require(VISUAL_MODULES, purpose, "visual")


def has_gradients_extra() -> bool:
    """Returns whether the [gradients] extra is installed."""
    return all(find_spec(module) is not None for module in GRADIENT_MODULES)


def _require(modules: tuple[str, ...], purpose: str, extra: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"{purpose} needs {', '.join(missing)}: pip install 'likeness-reward[{extra}]'", modules=",".join(missing)
        )
