"""The server process: wiring, readiness, and an orderly end."""

import asyncio
import logging
import os
import signal
from importlib.metadata import version
from pathlib import Path

import cv2
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward.backend import follow_backend, open_backend
from likeness_reward.embedded import FaceScorer
from likeness_reward.errors import CannotListen, FingerprintMismatch
from likeness_reward.inference.call import CallThreads
from likeness_reward.interceptor import CallInterceptor
from likeness_reward.logs import configure_logging
from likeness_reward.metrics import MetricsEndpoint, ServerMetrics
from likeness_reward.servicer import Admission, RewardServicer
from likeness_reward.settings import ServerSettings
from likeness_reward.tracing import flush_traces, tracing_interceptors

SERVICE_NAME = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
LAST_MESSAGES_S = 1.0
logger = logging.getLogger(__name__)


class RewardServer:
    """A RewardService, its health and, when asked for, its reflection on one port; metrics and health on others."""

    def __init__(self, scorer: FaceScorer, settings: ServerSettings) -> None:
        """Raises InvalidCredentials or MissingExtra."""
        self._scorer = scorer
        self._settings = settings
        self.metrics = ServerMetrics()
        scorer.observe_stages(self.metrics.observe_stage)
        self._executor = CallThreads(settings.workers, self.metrics.queue_depth.set)
        self._admission = Admission(settings.max_calls, self.metrics)
        self._health = health.aio.HealthServicer()
        self._keys = settings.keys.credentials() if settings.keys is not None else None
        self._server = grpc.aio.server(
            interceptors=[*tracing_interceptors(), CallInterceptor(settings.tokens(), self.metrics)],
            options=channel_options(settings),
        )
        self._health_server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._metrics_endpoint: MetricsEndpoint | None = None
        self.health_port: int | None = None
        """Port of health alone, once started; None without."""

    @property
    def metrics_port(self) -> int | None:
        """Port of /metrics, once started; None without."""
        return self._metrics_endpoint.port if self._metrics_endpoint is not None else None

    async def start(self) -> int:
        """Listens and serves; returns the port. Raises InferenceFailed, FingerprintMismatch or CannotListen."""
        check_fingerprint(self._scorer, self._settings.expect_fingerprint)
        await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.check_networks)
        servicer = RewardServicer(self._scorer, self._settings, self._executor, self._admission, self.metrics)
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        if self._settings.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        host, metrics_port, health_port = self._settings.host, self._settings.metrics_port, self._settings.health_port
        port = listen(self._server, host, self._settings.port, self._keys)
        if health_port is not None:
            self.health_port = listen(self._health_server, host, health_port, None)
            await self._health_server.start()
        self.metrics.describe(**describe(self._scorer, self._settings))
        if metrics_port is not None:
            self._metrics_endpoint = MetricsEndpoint(self.metrics, host, metrics_port)
        await self._server.start()
        await self.set_ready(True)
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tells health whether calls can be answered. Has no effect once the server stops."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE_NAME, status.SERVING if ready else status.NOT_SERVING)
        self.metrics.ready.set(ready)

    async def stop(self) -> None:
        """Tells NOT_SERVING, refuses new calls, lets running ones finish, then closes."""
        await self._health.enter_graceful_shutdown()
        self.metrics.ready.set(0)
        if not await self._admission.drain(self._settings.drain_timeout_s):
            logger.warning("calls were still running after %g s", self._settings.drain_timeout_s)
        await self._server.stop(LAST_MESSAGES_S)
        await self._health_server.stop(None)
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._metrics_endpoint is not None:
            await asyncio.to_thread(self._metrics_endpoint.close)
        await asyncio.to_thread(flush_traces)


async def serve(settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT; prints one line and writes settings.ready_file once ready."""
    configure_logging(settings.log_format)
    cv2.setNumThreads(1)  # the workers are the threads; OpenCV's own would contend with them
    scorer = open_backend(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = RewardServer(scorer, settings)
    port = await server.start()
    endpoint = f"{settings.host}:{port}"
    print(ready_line(endpoint, scorer, server), flush=True)
    if settings.ready_file is not None:
        write_atomically(settings.ready_file, endpoint)
    following = asyncio.create_task(follow_backend(scorer, settings, server.set_ready))
    await stop.wait()
    following.cancel()
    print("draining", flush=True)
    await server.stop()


def ready_line(endpoint: str, scorer: FaceScorer, server: RewardServer) -> str:
    """Returns the line that says where the server listens and with which models."""
    line = f"serving on {endpoint}, pack {scorer.pack.name}, fingerprint {scorer.model_fingerprint[:12]}"
    for what, port in (("metrics", server.metrics_port), ("health", server.health_port)):
        line += f", {what} on port {port}" if port is not None else ""
    return line


def channel_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Returns gRPC's options of the main port."""
    options = [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),
    ]
    if settings.max_connection_age_s is not None:  # without a grace period: calls in progress have their own deadlines
        options.append(("grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)))
    return options


def listen(server: grpc.aio.Server, host: str, port: int, keys: grpc.ServerCredentials | None) -> int:
    """Binds a port and returns it. Raises CannotListen."""
    address = f"{host}:{port}"
    try:
        if keys is not None:
            return int(server.add_secure_port(address, keys))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {address}: {error}", address=address) from error


def check_fingerprint(scorer: FaceScorer, expected: str | None) -> None:
    """Raises FingerprintMismatch unless the models' fingerprint begins as expected."""
    found = scorer.model_fingerprint
    if expected is not None and not found.startswith(expected):
        message = f"the models of pack {scorer.pack.name} are {found}, expected was {expected}"
        raise FingerprintMismatch(message, found=found, expected=expected)


def describe(scorer: FaceScorer, settings: ServerSettings) -> dict[str, str]:
    """Returns the labels of likeness_reward_info."""
    return {
        "version": version("likeness-reward"),
        "pack": scorer.pack.name,
        "fingerprint": scorer.model_fingerprint,
        "backend": settings.backend,
        "provider": scorer.provider,
    }


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
