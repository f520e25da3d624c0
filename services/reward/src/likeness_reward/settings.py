"""Settings of the server: command line over environment (LIKENESS_REWARD_*) over defaults."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from likeness_reward.credentials import BearerTokens, ServerKeys
from likeness_reward.domain import Limits, parse_size
from likeness_reward.images import MAX_PIXELS
from likeness_reward.logs import LogFormat


def size_from_text(value: object) -> object:
    """Returns (width, height) of a text, and anything else as it is."""
    return parse_size(value) if isinstance(value, str) else value


class ServerSettings(BaseSettings):
    """Everything `likeness-reward serve` can be told. An empty variable of the environment is none: images set some."""

    model_config = SettingsConfigDict(env_prefix="LIKENESS_REWARD_", env_ignore_empty=True, frozen=True, extra="forbid")

    pack: Path | None = None
    """Folder of ONNX files; the triton backend does without, and checks its models against it when given."""
    backend: Literal["embedded", "triton"] = "embedded"
    """Where the networks run: in this process, or in Triton."""
    triton_url: str | None = None
    """HOST:PORT of Triton's gRPC."""
    triton_shared_memory: Literal["auto", "on", "off"] = "auto"
    """Whether images and outputs go through system shared memory; auto uses it when Triton sees this host's."""
    triton_timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """Longest that Triton may take for one inference, seconds; a call's own deadline counts too."""
    triton_start_timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0)
    """How long to wait for Triton's models at the start, seconds."""
    triton_probe_interval_s: float = Field(default=5.0, gt=0.0, le=3600.0)
    """How often Triton is tried when nothing else runs there, seconds; also the longest that a try may take."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    detector_size: Annotated[tuple[int, int] | None, NoDecode, BeforeValidator(size_from_text)] = None
    """Width and height of the detector's canvas, pixels, also as "640x384"; default that of the pack."""
    letterbox: Literal["fit", "full"] | None = None
    """fit leaves out what a frame leaves empty of the canvas, full does not; default that of the pack."""
    provider: Literal["cpu", "cuda"] = "cpu"
    """Execution provider of onnxruntime; the server refuses to start on another one."""
    threads: int = Field(default=1, ge=1, le=256)
    """Threads inside one run of a network."""
    workers: int = Field(default=1, ge=1, le=256)
    """Runs of networks at the same time."""
    token: SecretStr | None = None
    """Bearer token that every call must carry."""
    token_file: Path | None = None
    """File that holds the bearer token; read again when it changes."""
    tls_cert: Path | None = None
    """Certificate chain in PEM format; with it the port speaks TLS. Read again when it changes."""
    tls_key: Path | None = None
    """Private key of tls_cert in PEM format."""
    client_ca: Path | None = None
    """Roots in PEM format of the certificates that clients must show (mutual TLS)."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for gRPC health without TLS and token, for probes; none by default. `port` answers health as well."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus: GET /metrics over HTTP; none by default."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object a line."""
    expect_fingerprint: str | None = Field(default=None, pattern=r"^[0-9a-f]{8,64}$")
    """The models' fingerprint, or its first 8 digits or more; the server refuses to start with other models."""
    reflection: bool = False
    """Whether tools like grpcurl may list the service."""
    ready_file: Path | None = None
    """File that receives HOST:PORT once the server is ready."""
    max_message_bytes: int = Field(default=64 * 2**20, ge=2**16, le=2**31 - 1)
    """Largest message accepted and sent."""
    max_frames_per_video: int = Field(default=1024, ge=1)
    """Most frames in one video."""
    max_pixels_per_frame: int = Field(default=4096 * 2160, ge=4, le=80_000_000)
    """Most pixels in one frame of a video."""
    max_pixels_per_image: int = Field(default=MAX_PIXELS, ge=4, le=80_000_000)
    """Most pixels in one image of EmbedIdentity."""
    max_images: int = Field(default=64, ge=1)
    """Most images in one EmbedIdentity call."""
    max_videos_in_flight: int = Field(default=64, ge=1)
    """Most videos on one stream that are open or await their result."""
    max_frames_waiting: int = Field(default=16, ge=1)
    """Frames of one stream held in memory; while there are as many, the stream is not read."""
    max_calls: int = Field(default=64, ge=1)
    """Scoring calls (streams included) admitted at the same time; one more is refused as SERVER_BUSY."""
    max_connection_age_s: float | None = Field(default=None, ge=1.0, le=7 * 24 * 3600.0)
    """Seconds after which a connection takes no new call, so that its client connects anew and may reach a replica that
    was added meanwhile; running calls and streams end as if nothing had happened. gRPC varies it by a tenth. None: it
    lasts."""
    drain_timeout_s: float = Field(default=30.0, ge=0.0)
    """Seconds that running calls get to finish after SIGTERM."""

    @model_validator(mode="after")
    def _backend_has_its_models(self) -> "ServerSettings":
        if self.backend == "triton" and self.triton_url is None:
            raise ValueError("the triton backend needs triton_url, HOST:PORT")
        if self.backend == "triton" and self.provider != "cpu":
            raise ValueError("provider belongs to the embedded backend; for Triton see `pack export-triton --device`")
        if self.backend == "embedded" and self.triton_url is not None:
            raise ValueError("triton_url belongs to the triton backend")
        if self.backend == "embedded" and self.pack is None:
            raise ValueError("the embedded backend needs a pack, a folder of ONNX files")
        return self

    @model_validator(mode="after")
    def _secrets_fit(self) -> "ServerSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key")
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file: give one of them")
        return self

    @property
    def keys(self) -> ServerKeys | None:
        """The files of a server that speaks TLS; None for one that does not."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerKeys(self.tls_cert, self.tls_key, self.client_ca)

    def tokens(self) -> BearerTokens:
        """Returns what checks the bearer token of calls. Raises InvalidCredentials."""
        return BearerTokens(self.token.get_secret_value() if self.token is not None else None, self.token_file)

    @property
    def limits(self) -> Limits:
        """The limits that GetServerInfo tells."""
        return Limits(
            max_message_bytes=self.max_message_bytes,
            max_frames_per_video=self.max_frames_per_video,
            max_pixels_per_frame=self.max_pixels_per_frame,
            max_videos_in_flight=self.max_videos_in_flight,
            max_images=self.max_images,
            max_pixels_per_image=self.max_pixels_per_image,
        )
