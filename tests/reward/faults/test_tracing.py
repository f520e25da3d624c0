"""Traces of a server process reach an OTLP collector."""

from concurrent import futures

import grpc
import pytest

from likeness_reward.client import RewardClient

SOON_S = 10.0


class Collector:
    """An OTLP collector: keeps the names of the spans that reach it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self.spans: list[str] = []
        outer = self

        class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request, context):
                for resource in request.resource_spans:
                    names = {item.key: item.value.string_value for item in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        outer.spans += [f"{names['service.name']} {span.name}" for span in scope.spans]
                return trace_service_pb2.ExportTraceServiceResponse()

        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()


def test_calls_become_spans_when_an_endpoint_is_configured(start_server, monkeypatch) -> None:
    pytest.importorskip("opentelemetry.instrumentation.grpc", reason="the [otel] extra is not installed")
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rewards-of-a-test")
    server = start_server()
    with RewardClient(server.endpoint) as client:
        client.server_info()
    server.terminate()
    assert server.process.wait(SOON_S) == 0
    collector.server.stop(None)
    assert "rewards-of-a-test /likeness.reward.v1.RewardService/GetServerInfo" in collector.spans
