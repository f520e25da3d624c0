"""Connections of clients: one server, several, or a name that stands for several; plain or TLS."""

import json
import socket
from typing import Any

import grpc

from likeness.reward.v1 import reward_service_pb2
from likeness_reward.credentials import ClientKeys
from likeness_reward.errors import ServerUnavailable
from likeness_reward.messages import encoded

MAX_RECEIVED_BYTES = 64 * 2**20
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config", ROUND_ROBIN),
)


def open_channel(endpoint: str, tls: ClientKeys | None) -> grpc.Channel:
    """Returns a channel for blocking calls. Raises InvalidCredentials or ServerUnavailable."""
    target, options = target_of(endpoint)
    if tls is not None:
        return grpc.secure_channel(target, tls.credentials(), options=options)
    return grpc.insecure_channel(target, options=options)


def open_aio_channel(endpoint: str, tls: ClientKeys | None) -> grpc.aio.Channel:
    """Returns a channel for asyncio. Raises InvalidCredentials or ServerUnavailable."""
    target, options = target_of(endpoint)
    if tls is not None:
        return grpc.aio.secure_channel(target, tls.credentials(), options=options)
    return grpc.aio.insecure_channel(target, options=options)


def score_streams(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """Returns StreamVideoScores on a channel; it takes requests as messages or encoded."""
    service = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"]
    return channel.stream_stream(
        f"/{service.full_name}/StreamVideoScores",
        request_serializer=encoded,
        response_deserializer=reward_service_pb2.StreamVideoScoresResponse.FromString,
    )


def target_of(endpoint: str) -> tuple[str, list[tuple[str, int | str]]]:
    """Returns gRPC's target and options of "host:port" or "host:port,host:port".

    gRPC resolves one name again and again, but no list of names: names in a list are resolved here, once.
    Raises ServerUnavailable when one of them is unknown.
    """
    options = list(CHANNEL_OPTIONS)
    if "," not in endpoint:
        return endpoint, options
    first, *_ = places = [place.strip() for place in endpoint.split(",") if place.strip()]
    options.append(("grpc.default_authority", first))
    return "ipv4:" + ",".join(address for place in places for address in addresses_of(place)), options


def addresses_of(place: str) -> list[str]:
    """Returns the IPv4 addresses of HOST:PORT. Raises ServerUnavailable."""
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ServerUnavailable(f"reward server {place!r}: no such HOST:PORT ({error})", endpoint=place) from error
    return sorted({":".join(map(str, address)) for *_, address in found})
