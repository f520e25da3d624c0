"""What Prometheus sees of a server. Each server has a registry of its own."""

import threading
from collections.abc import Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from likeness_reward.domain import FrameScore
from likeness_reward.errors import CannotListen

STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CALL_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class ServerMetrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._info = Info("likeness_reward", "Version, pack and provider in use.", registry=self.registry)
        self.ready = self._gauge("ready", "1 while the server answers SERVING.")
        self.calls_running = self._gauge("calls_running", "Scoring calls (streams included) that run.")
        self.videos_in_flight = self._gauge("videos_in_flight", "Videos begun whose outcome is due.")
        self.queue_depth = self._gauge("queue_depth", "Batches of frames that wait for a worker.")
        self.videos = self._counter("videos", "Videos by outcome: ok, cancelled, or an error's reason.", ("outcome",))
        self.frames = self._counter("frames", "Frames scored, by verdict.", ("verdict",))
        self.calls = self._counter("calls", "Calls that ended, by method and status code.", ("method", "code"))
        self.received_bytes = self._counter("received_bytes", "Bytes of frames and images received.", ())
        self.stage_seconds = self._histogram(
            "stage_seconds", "Seconds of one batch: queue, decode, detect, align, recognize.", "stage", STAGE_SECONDS
        )
        self.call_seconds = self._histogram(
            "call_seconds", "Seconds from a call's begin to its end.", "method", CALL_SECONDS
        )

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"likeness_reward_{name}", what, registry=self.registry)

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"likeness_reward_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, label: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"likeness_reward_{name}", what, (label,), registry=self.registry, buckets=buckets)

    def describe(self, **labels: str) -> None:
        """Sets the labels of likeness_reward_info: version, pack, fingerprint, backend, provider."""
        self._info.info(labels)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Counts the seconds that one batch of frames spent in a stage."""
        self.stage_seconds.labels(stage).observe(seconds)

    def observe_frames(self, scores: Sequence[FrameScore]) -> None:
        """Counts the verdicts of frames."""
        for score in scores:
            self.frames.labels(score.observation.verdict.value).inc()


class MetricsEndpoint:
    """GET /metrics over HTTP."""

    def __init__(self, metrics: ServerMetrics, host: str, port: int) -> None:
        """Listens. Raises CannotListen."""
        try:
            started: tuple[WSGIServer, threading.Thread] = start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise CannotListen(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
        self._server, self._thread = started
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
