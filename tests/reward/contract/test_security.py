"""TLS, mutual TLS and tokens, from files that change while the server runs."""

import os
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError
from typer.testing import CliRunner

from likeness_reward import errors
from likeness_reward.cli import app
from likeness_reward.client import RewardClient
from likeness_reward.credentials import BearerTokens, ClientKeys, read_token
from likeness_reward.settings import ServerSettings

SERVING = health_pb2.HealthCheckResponse.SERVING


class Keys:
    """A root and what it signs, as PEM files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = trustme.CA()
        self.ca = folder / "ca.pem"
        self.root.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, root: trustme.CA | None = None) -> tuple[Path, Path]:
        """Writes NAME.pem and NAME.key for the loopback addresses; returns the two."""
        issued = (root or self.root).issue_cert("localhost", "127.0.0.1")
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return certificate, key


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def refused(endpoint: str, tls: ClientKeys | None = None, token: str | None = None) -> errors.LikenessError:
    """Returns the error of a first call."""
    with (
        RewardClient(endpoint, timeout_s=3, tls=tls, token=token) as client,
        pytest.raises(errors.LikenessError) as caught,
    ):
        client.server_info()
    return caught.value


def test_a_server_with_a_certificate_speaks_tls_and_nothing_else(serve, keys) -> None:
    certificate, key = keys.issue("server")
    endpoint = serve(tls_cert=certificate, tls_key=key).endpoint
    with RewardClient(endpoint, tls=ClientKeys(ca=keys.ca)) as client:
        assert client.server_info().pack_name == "colours"
    assert isinstance(refused(endpoint), errors.ServerUnavailable)
    other = Keys(keys.folder / "..")
    assert "CERTIFICATE_VERIFY_FAILED" in refused(endpoint, ClientKeys(ca=other.ca)).message


def test_mutual_tls_asks_for_a_certificate_of_its_own_root(serve, keys) -> None:
    certificate, key = keys.issue("server")
    endpoint = serve(tls_cert=certificate, tls_key=key, client_ca=keys.ca).endpoint
    mine = keys.issue("client")
    with RewardClient(endpoint, tls=ClientKeys(keys.ca, *mine)) as client:
        assert client.server_info().pack_name == "colours"
    strangers = keys.issue("stranger", trustme.CA())
    for tls in (ClientKeys(keys.ca), ClientKeys(keys.ca, *strangers)):
        assert isinstance(refused(endpoint, tls), errors.ServerUnavailable)


def test_a_renewed_certificate_is_used_and_half_a_renewal_is_not(serve, keys) -> None:
    certificate, key = keys.issue("server")
    endpoint = serve(tls_cert=certificate, tls_key=key).endpoint
    renewed = Keys(keys.folder / "..")
    new_certificate, new_key = renewed.issue("renewed")
    os.replace(new_certificate, certificate)
    with RewardClient(endpoint, tls=ClientKeys(ca=keys.ca)) as client:
        assert client.server_info().pack_name == "colours", "the old pair must serve while the new one is half there"
    os.replace(new_key, key)
    with RewardClient(endpoint, tls=ClientKeys(ca=renewed.ca)) as client:
        assert client.server_info().pack_name == "colours"


def test_the_token_of_a_file_is_needed_and_its_change_is_followed(serve, tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text("first-word\n")
    endpoint = serve(token_file=file).endpoint
    for token in (None, "second-word", "first-word "):
        assert isinstance(refused(endpoint, token=token), errors.Unauthenticated)
    with RewardClient(endpoint, token="first-word") as client:
        assert client.server_info().pack_name == "colours"
    replacement = tmp_path / "next"
    replacement.write_text("second-word")
    os.replace(replacement, file)
    assert isinstance(refused(endpoint, token="first-word"), errors.Unauthenticated)
    with RewardClient(endpoint, token="second-word") as client:
        assert client.server_info().pack_name == "colours"


def test_a_token_file_that_goes_away_leaves_the_last_token_in_force(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text("word")
    tokens = BearerTokens(None, file)
    for spoil in (file.unlink, lambda: file.write_text("")):
        spoil()
        tokens.check("Bearer word")
        with pytest.raises(errors.Unauthenticated):
            tokens.check("Bearer ")


@pytest.mark.parametrize("content", ["", "  \n", "two words", "tab\there", "ümlaut"])
def test_what_is_no_token_is_refused(tmp_path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(errors.InvalidCredentials, match="token"):
        read_token(file)


def test_files_that_are_missing_damaged_or_do_not_belong_together_are_named(keys, tmp_path) -> None:
    certificate, key = keys.issue("server")
    _, other_key = keys.issue("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")

    def settings(**given: Path) -> ServerSettings:
        return ServerSettings(pack=Path(), **given)

    for cert, private, ca, named in (
        (certificate, other_key, None, "server.pem and .*other.key"),
        (text, key, None, "text.pem"),
        (certificate, key, text, "text.pem"),
        (tmp_path / "absent.pem", key, None, "absent.pem: No such file"),
    ):
        with pytest.raises(errors.InvalidCredentials, match=named):
            settings(tls_cert=cert, tls_key=private, client_ca=ca).keys.credentials()
    for given, said in (
        ({"tls_cert": certificate}, "belong together"),
        ({"client_ca": keys.ca}, "client_ca needs"),
        ({"token": "a", "token_file": text}, "one of them"),
    ):
        with pytest.raises(ValidationError, match=said):
            settings(**given)
    with pytest.raises(errors.InvalidCredentials, match="give both"):
        RewardClient("localhost:1", tls=ClientKeys(certificate=certificate))


def test_probes_need_neither_tls_nor_token_on_the_health_port(serve, keys) -> None:
    certificate, key = keys.issue("server")
    running = serve(tls_cert=certificate, tls_key=key, client_ca=keys.ca, token="word", health_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.health_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        name = "likeness.reward.v1.RewardService"
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == SERVING
        running.call(running.server.set_ready(False))
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status != SERVING
        with pytest.raises(grpc.RpcError, match="(?i)not found"):
            channel.unary_unary("/likeness.reward.v1.RewardService/GetServerInfo")(b"", timeout=5)


def test_the_command_line_reaches_a_server_that_wants_tls_a_certificate_and_a_token(serve, keys, tmp_path) -> None:
    certificate, key = keys.issue("server")
    mine, my_key = keys.issue("client")
    token_file = tmp_path / "token"
    token_file.write_text("word\n")
    endpoint = serve(tls_cert=certificate, tls_key=key, client_ca=keys.ca, token_file=token_file).endpoint
    arguments = ["info", "--endpoint", endpoint, "--timeout", "3", "--json"]
    shown = ["--tls-ca", str(keys.ca), "--tls-cert", str(mine), "--tls-key", str(my_key)]
    told = CliRunner().invoke(app, [*arguments, *shown, "--token-file", str(token_file)])
    assert told.exit_code == 0, told.output
    assert '"pack_name": "colours"' in told.stdout
    assert isinstance(CliRunner().invoke(app, [*arguments, *shown]).exception, errors.Unauthenticated)
    without_tls = CliRunner().invoke(app, [*arguments, "--token-file", str(token_file)])
    assert isinstance(without_tls.exception, errors.ServerUnavailable)
