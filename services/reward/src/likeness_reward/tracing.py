"""OpenTelemetry: a span for every call, when the [otel] extra is installed and an endpoint is configured."""

import os
from importlib.metadata import version

import grpc

from likeness_reward.extras import require_otel_extra

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracing_interceptors() -> list[grpc.aio.ServerInterceptor]:
    """Returns what starts a span for each call and sends it to the OTLP endpoint of the environment; [] without one.

    The other OTEL_* variables count as OpenTelemetry defines them. Raises MissingExtra when an endpoint is set and
    the extra is not installed.
    """
    variable = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return []
    require_otel_extra(f"{variable}, which is set,")
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.grpc import aio_server_interceptor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "likeness-reward")
    resource = Resource.create({"service.name": name, "service.version": version("likeness-reward")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return [aio_server_interceptor(tracer_provider=provider)]


def flush_traces() -> None:
    """Sends the spans that still wait; has no effect without tracing."""
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()
