"""Asks a reward service on this machine whether it serves: `python -m likeness_reward.health_check`.

For images and compositions, whose probes are commands. It asks the health port, which wants neither TLS nor a token;
its number is LIKENESS_REWARD_HEALTH_PORT, as for the service.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from likeness.reward.v1 import reward_service_pb2

SERVICE_NAME = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
TIMEOUT_S = 4.0


def trouble_at(endpoint: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns why the service whose health is told at HOST:PORT cannot be used; None when it serves."""
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    with grpc.insecure_channel(endpoint) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{endpoint}: {error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{endpoint}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def main() -> None:
    """Exits 0 when the service serves; else 1, with the reason on stderr, and 2 when no port is named."""
    port = os.environ.get("LIKENESS_REWARD_HEALTH_PORT", "")
    if not port.isdecimal():
        print(f"LIKENESS_REWARD_HEALTH_PORT is {port!r}; the number of the health port is expected", file=sys.stderr)
        sys.exit(2)
    trouble = trouble_at(f"localhost:{port}")
    if trouble is not None:
        print(trouble, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
