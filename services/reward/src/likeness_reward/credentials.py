"""Keys and tokens from files that may change while the server runs: certificates are renewed, secrets rotated."""

import hmac
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from likeness_reward.errors import InvalidCredentials, Unauthenticated

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(*paths: Path) -> Stamp:
    """Returns what changes when one of the files does. Raises InvalidCredentials when one is not there."""
    stamps = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise InvalidCredentials(f"cannot read {path}: {error.strerror}", path=path) from error
        stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(stamps)


def read_file(path: Path) -> bytes:
    """Returns a file's bytes. Raises InvalidCredentials."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidCredentials(f"cannot read {path}: {error.strerror}", path=path) from error


def read_token(path: Path) -> str:
    """Returns the bearer token in a file, without the white space around it. Raises InvalidCredentials."""
    try:
        token = read_file(path).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise InvalidCredentials(f"{path}: a bearer token is plain ASCII", path=path) from error
    if not token or not token.isprintable() or " " in token:
        raise InvalidCredentials(f"{path} holds no bearer token: one word is expected", path=path)
    return token


class BearerTokens:
    """The token that calls must carry: fixed, or that of a file, which is read again when it changes."""

    def __init__(self, token: str | None, path: Path | None) -> None:
        """Reads the file. Raises InvalidCredentials."""
        self._path = path
        self._stamp = stamp_of(path) if path is not None else ()
        self._token = read_token(path) if path is not None else token

    def check(self, authorization: str) -> None:
        """Raises Unauthenticated unless the header is the token's; compared in constant time."""
        token = self._current()
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise Unauthenticated("the call carries no valid bearer token")

    def _current(self) -> str | None:
        """Returns the token of now; a file that is away or damaged for a moment leaves the last good one in force."""
        if self._path is not None:
            try:
                stamp = stamp_of(self._path)
                if stamp != self._stamp:
                    self._token, self._stamp = read_token(self._path), stamp
            except InvalidCredentials:
                return self._token
        return self._token


@dataclass(frozen=True)
class ServerKeys:
    """Files in PEM format of a server that speaks TLS."""

    certificate: Path
    """The server's certificate, then those between it and the root."""
    private_key: Path
    client_ca: Path | None
    """Roots of the certificates that clients must show; None asks for none."""

    def check(self) -> None:
        """Raises InvalidCredentials when a file is missing, is no PEM, or the key is not the certificate's."""
        stamp_of(*self._paths())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key, password=lambda: b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            message = f"{self.certificate} and {self.private_key} are no certificate and its key: {error}"
            raise InvalidCredentials(message, path=self.certificate) from error
        if self.client_ca is not None:
            check_roots(self.client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that follow the files as they are renewed. Raises InvalidCredentials."""
        self.check()
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._fetcher(), require_client_authentication=self.client_ca is not None
        )

    def _paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.private_key, self.client_ca) if path is not None]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        roots = read_file(self.client_ca) if self.client_ca is not None else None
        pair = (read_file(self.private_key), read_file(self.certificate))
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _fetcher(self) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """Returns what gRPC calls before each handshake: the new configuration, or None when nothing changed."""
        last = stamp_of(*self._paths())

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal last
            try:
                stamp = stamp_of(*self._paths())
                if stamp == last:
                    return None
                last = stamp
                return self._configuration()  # gRPC keeps the old pair while the new one is only half there
            except InvalidCredentials:
                return None

        return fetch


@dataclass(frozen=True)
class ClientKeys:
    """Files in PEM format of a client that speaks TLS."""

    ca: Path | None = None
    """Roots that the server's certificate is checked against; None takes those that gRPC brings."""
    certificate: Path | None = None
    """The client's own certificate, for servers that ask for one."""
    private_key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a channel. Raises InvalidCredentials."""
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidCredentials("a client certificate and its private key belong together: give both")
        if self.ca is not None:
            check_roots(self.ca)
        if self.certificate is not None and self.private_key is not None:
            ServerKeys(self.certificate, self.private_key, None).check()
        return grpc.ssl_channel_credentials(
            *(read_file(path) if path is not None else None for path in (self.ca, self.private_key, self.certificate))
        )


def client_keys(tls: bool, ca: Path | None, certificate: Path | None, private_key: Path | None) -> ClientKeys | None:
    """Returns the keys of a connection; None for a plain one: `tls` is False and no file is given."""
    given = any(file is not None for file in (ca, certificate, private_key))
    return ClientKeys(ca, certificate, private_key) if tls or given else None


def check_roots(path: Path) -> None:
    """Raises InvalidCredentials unless a file holds certificates in PEM format."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=read_file(path).decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidCredentials(f"{path} holds no certificates in PEM format: {error}", path=path) from error
