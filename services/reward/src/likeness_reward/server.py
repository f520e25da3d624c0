"""The server process: wiring, readiness, and an orderly end."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward.backend import follow_backend, open_backend
from likeness_reward.embedded import FaceScorer
from likeness_reward.errors import CannotListen
from likeness_reward.inference.call import CallThreads
from likeness_reward.interceptor import CallInterceptor
from likeness_reward.servicer import Admission, RewardServicer
from likeness_reward.settings import ServerSettings

SERVICE_NAME = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
LAST_MESSAGES_S = 1.0
logger = logging.getLogger(__name__)


class RewardServer:
    """A RewardService, its health and, when asked for, its reflection on one port."""

    def __init__(self, scorer: FaceScorer, settings: ServerSettings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._executor = CallThreads(settings.workers, thread_name_prefix="inference")
        self._admission = Admission(settings.max_calls)
        self._health = health.aio.HealthServicer()
        token = settings.token.get_secret_value() if settings.token is not None else None
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(token)],
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.so_reuseport", 0),
            ],
        )

    async def start(self) -> int:
        """Listens and serves; returns the port. Raises InferenceFailed or CannotListen."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.check_networks)
        servicer = RewardServicer(self._scorer, self._settings, self._executor, self._admission)
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: {error}", address=address) from error
        await self._server.start()
        await self.set_ready(True)
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tells health whether calls can be answered. Has no effect once the server stops."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE_NAME, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self) -> None:
        """Tells NOT_SERVING, refuses new calls, lets running ones finish, then closes."""
        await self._health.enter_graceful_shutdown()
        if not await self._admission.drain(self._settings.drain_timeout_s):
            logger.warning("calls were still running after %g s", self._settings.drain_timeout_s)
        await self._server.stop(LAST_MESSAGES_S)
        self._executor.shutdown(wait=False, cancel_futures=True)


async def serve(settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT; prints one line and writes settings.ready_file once ready."""
    scorer = open_backend(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = RewardServer(scorer, settings)
    port = await server.start()
    endpoint = f"{settings.host}:{port}"
    pack, fingerprint = scorer.pack.name, scorer.model_fingerprint
    print(f"serving on {endpoint}, pack {pack}, fingerprint {fingerprint[:12]}", flush=True)
    if settings.ready_file is not None:
        write_atomically(settings.ready_file, endpoint)
    following = asyncio.create_task(follow_backend(scorer, settings, server.set_ready))
    await stop.wait()
    following.cancel()
    print("draining", flush=True)
    await server.stop()


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
