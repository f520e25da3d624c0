"""What becomes of gradients that a server lacks, refuses, or sends wrongly."""

import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from likeness.reward.v1 import reward_pb2, reward_service_pb2
from likeness_reward.client import RewardClient
from likeness_reward.domain import CropGradient, ScoreOptions, VideoReward
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.errors import FeatureUnavailable, InvalidGradients, InvalidPack, InvalidRequest
from likeness_reward.gradient_wire import gradients_from_messages, gradients_to_message, with_gradients

WANTED = ScoreOptions(include_crop_gradients=True)
GRADIENT = CropGradient(1, np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 4, 4), np.eye(2, 3))
REWARD = VideoReward(0.5, (), 2, 1, "f" * 64, ())


@pytest.fixture
def curved_pack(written_pack: Path, onnx_writer) -> Path:
    """A pack whose recognizer ends in an operator that has no rule of its own."""
    onnx_writer.recognizer(written_pack / "recognizer.onnx", last="Tanh")
    return written_pack


def test_a_server_without_the_extra_names_the_operator_that_needs_it(serve, curved_pack, monkeypatch) -> None:
    monkeypatch.setattr("likeness_reward.embedded.has_gradients_extra", lambda: False)
    scorer = EmbeddedScorer(curved_pack)
    with RewardClient(serve(scorer).endpoint) as client:
        assert not client.server_info().has_crop_gradients
        identity = scorer.embed_identity([np.full((64, 64, 3), 255, np.uint8)])
        reason = r"no derivative of Tanh last; the extra likeness-reward\[gradients\]"
        with pytest.raises(FeatureUnavailable, match=reason) as caught:
            client.score(np.zeros((1, 64, 64, 3), np.uint8), identity, WANTED)
        assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED
        stream = client.open_stream(WANTED, identity=identity, deadline_s=10)
        with stream, pytest.raises(FeatureUnavailable):
            list(stream.results())


def test_the_extra_differentiates_operators_without_a_rule(curved_pack) -> None:
    """The embedding is tanh(mean colour + 0.5), so its similarity rises with the colour of the other person."""
    pytest.importorskip("onnx2torch", reason="the [gradients] extra is not installed: no onnx2torch")
    scorer = EmbeddedScorer(curved_pack)
    identity = scorer.embed_identity([np.full((64, 64, 3), (255, 200, 200), np.uint8)])
    frame = np.full((1, 64, 64, 3), 230, np.uint8)
    (gradient,) = scorer.score(frame, identity, WANTED).crop_gradients
    red, green, blue = gradient.values.sum(axis=(1, 2))
    assert red > 0 > green == pytest.approx(blue)


def test_networks_that_are_no_onnx_file_have_no_gradients(serve, colours) -> None:
    with RewardClient(serve().endpoint) as client, pytest.raises(FeatureUnavailable):
        client.score(colours.frame()[None], colours.identity(), WANTED)


def test_a_weight_of_motion_is_refused_together_with_gradients(serve, written_pack) -> None:
    scorer = EmbeddedScorer(written_pack)
    identity = scorer.embed_identity([np.full((64, 64, 3), 255, np.uint8)])
    options = WANTED.model_copy(update={"motion_weight": 0.1})
    with RewardClient(serve(scorer).endpoint) as client, pytest.raises(InvalidRequest, match="motion of 0, not 0.1"):
        client.score(np.zeros((1, 64, 64, 3), np.uint8), identity, options)


def test_gradients_need_no_torch(written_pack) -> None:
    import subprocess

    code = (
        "import sys, numpy as np, likeness_reward.client; from likeness_reward.embedded import EmbeddedScorer;"
        "from likeness_reward.domain import ScoreOptions;"
        f"s = EmbeddedScorer({str(written_pack)!r}); f = np.full((1, 64, 64, 3), 255, np.uint8);"
        "r = s.score(f, s.embed_identity(list(f)), ScoreOptions(include_crop_gradients=True));"
        "assert len(r.crop_gradients) == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_derivative_of_other_numbers_than_the_score_is_refused(written_pack, onnx_writer) -> None:
    """The file is replaced under a running scorer, before gradients are first asked for."""
    scorer = EmbeddedScorer(written_pack)
    frames = np.full((1, 64, 64, 3), (255, 0, 0), np.uint8)
    identity = scorer.embed_identity(list(frames))
    onnx_writer.recognizer(written_pack / "recognizer.onnx", last="Relu")
    with pytest.raises(InvalidPack, match="a similarity differs by 0.* differentiated and the one that scores"):
        scorer.score(frames, identity, WANTED)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 0.0])
def test_float16_keeps_eleven_bits_whatever_the_scale(scale: float) -> None:
    sent = CropGradient(1, GRADIENT.values * np.float32(scale), GRADIENT.frame_from_crop)
    (received,) = gradients_from_messages([gradients_to_message([sent], "float16")])
    assert np.abs(received.values - sent.values).max() <= 2**-11 * scale


def message(**changes: object) -> reward_pb2.CropGradients:
    """Returns a good message with changes to its only gradient, or to itself."""
    result = gradients_to_message([GRADIENT], "float32")
    for name, value in changes.items():
        if name == "frame_from_crop":
            result.gradients[0].frame_from_crop[:] = value
        else:
            setattr(result if name in ("crop_size", "encoding") else result.gradients[0], name, value)
    return result


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (message(values=b"\0" * 191), "191 bytes"),
        (message(crop_size=5), "has 300"),
        (message(crop_size=0), "has 0"),
        (message(encoding=reward_pb2.GRADIENT_ENCODING_FLOAT16), "float16"),
        (message(values=np.full(48, np.nan, "<f4").tobytes()), "not finite"),
        (message(scale=float("inf")), "not finite"),
        (message(frame_from_crop=[1.0] * 5), "5 numbers"),
        (message(frame_from_crop=[float("nan")] * 6), "not finite"),
        (message(frame_index=2), "the video has 2"),
    ],
)  # fmt: skip
def test_gradients_that_are_wrong_are_refused(broken: reward_pb2.CropGradients, reason: str) -> None:
    assert with_gradients(REWARD, [message()]).crop_gradients[0].frame_index == 1
    with pytest.raises(InvalidGradients, match=reason):
        with_gradients(REWARD, [broken])


@pytest.mark.parametrize("messages", [[], [message(), message()]])
def test_too_few_or_too_many_gradients_are_refused(messages: list[reward_pb2.CropGradients]) -> None:
    with pytest.raises(InvalidGradients, match="1 frames show a face"):
        with_gradients(REWARD, messages)


def test_the_feature_is_listed(serve, written_pack) -> None:
    with RewardClient(serve(EmbeddedScorer(written_pack)).endpoint) as client:
        info = client._stub.GetServerInfo(reward_service_pb2.GetServerInfoRequest(), timeout=10)
    assert list(info.features) == [reward_service_pb2.FEATURE_CROP_GRADIENTS]
