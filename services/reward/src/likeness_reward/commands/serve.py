"""likeness-reward serve."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from likeness_reward.extras import require_server_extra

NETWORKS, ACCESS, OPERATION = "Networks", "Who may call", "Running it"


def serve(
    pack: Annotated[Path | None, typer.Option(help="Folder of ONNX files. Environment: LIKENESS_REWARD_PACK.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default 50051.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads inside one run of a network. Default 1.", rich_help_panel=NETWORKS)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs of networks at the same time. Default 1.", rich_help_panel=NETWORKS)
    ] = None,
    detector_size: Annotated[
        str | None,
        typer.Option(
            help="Detector input WIDTHxHEIGHT. Default: the pack's pack.json, else 640x640.", rich_help_panel=NETWORKS
        ),
    ] = None,
    letterbox: Annotated[
        Literal["fit", "full"] | None,
        typer.Option(
            help="Leave out what a frame leaves empty of the detector's canvas (fit), or not (full), as InsightFace. "
            "Default: the pack's pack.json, else fit.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    provider: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where the networks run; no silent fallback. Default cpu.", rich_help_panel=NETWORKS),
    ] = None,
    backend: Annotated[
        Literal["embedded", "triton"] | None,
        typer.Option(
            help="Run the networks in this process, or in Triton (see `pack export-triton`). Default embedded.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    triton_url: Annotated[
        str | None, typer.Option(help="HOST:PORT of Triton's gRPC.", rich_help_panel=NETWORKS)
    ] = None,
    triton_shared_memory: Annotated[
        Literal["auto", "on", "off"] | None,
        typer.Option(
            help="Hand images to Triton in shared memory: auto, on one host. Default auto.", rich_help_panel=NETWORKS
        ),
    ] = None,
    expect_fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="HEX",
            help="Refuse to start unless the models' fingerprint begins like this.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that calls must carry.", rich_help_panel=ACCESS)
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM): speak TLS.", rich_help_panel=ACCESS)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of --tls-cert (PEM).", rich_help_panel=ACCESS)
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Roots (PEM) of the certificates that clients must show: mutual TLS.", rich_help_panel=ACCESS
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Port for gRPC health without TLS and token, for probes; 0 takes a free one.",
            rich_help_panel=OPERATION,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port for Prometheus, GET /metrics; 0 takes a free one.", rich_help_panel=OPERATION),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Log lines on stderr, as text or as JSON. Default text.", rich_help_panel=OPERATION),
    ] = None,
    drain_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds that running calls get to finish after SIGTERM. Default 30.", rich_help_panel=OPERATION
        ),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write HOST:PORT here once ready.", rich_help_panel=OPERATION)
    ] = None,
    reflection: Annotated[
        bool | None, typer.Option(help="Let tools like grpcurl list the service.", rich_help_panel=OPERATION)
    ] = None,
) -> None:
    """Serve a pack over gRPC until SIGTERM; then finish the running calls and exit 0.

    Every setting is also read from the environment as LIKENESS_REWARD_<NAME>, for example LIKENESS_REWARD_TOKEN or
    LIKENESS_REWARD_MAX_VIDEOS_IN_FLIGHT. Prints one line when ready. With the otel extra and
    OTEL_EXPORTER_OTLP_ENDPOINT set, every call becomes a trace span.

        likeness-reward serve --pack ~/.insightface/models/buffalo_l --port 50051
    """
    chosen: dict[str, Any] = {
        name: value for name, value in locals().items() if value is not None
    }  # each is a setting of that name
    require_server_extra("serve")
    from pydantic import ValidationError

    from likeness_reward import server
    from likeness_reward.settings import ServerSettings

    try:
        settings = ServerSettings(**chosen)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        what = f"{name} is {first['input']!r}: " if name else ""  # no name: the settings do not fit each other
        raise typer.BadParameter(what + first["msg"]) from error
    asyncio.run(server.serve(settings))
