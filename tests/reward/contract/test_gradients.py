"""What becomes of gradients that a server lacks, refuses, or sends wrongly."""

import sys

import grpc
import numpy as np
import pytest

from likeness.reward.v1 import reward_pb2, reward_service_pb2
from likeness_reward.client import RewardClient
from likeness_reward.domain import CropGradient, ScoreOptions, VideoReward
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.errors import FeatureUnavailable, InvalidGradients, InvalidRequest
from likeness_reward.gradient_wire import gradients_from_messages, gradients_to_message, with_gradients

WANTED = ScoreOptions(include_crop_gradients=True)
GRADIENT = CropGradient(1, np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 4, 4), np.eye(2, 3))
REWARD = VideoReward(0.5, (), 2, 1, "f" * 64, ())


def test_a_server_without_the_extra_says_so(serve, written_pack, monkeypatch) -> None:
    monkeypatch.setattr("likeness_reward.embedded.has_gradients_extra", lambda: False)
    scorer = EmbeddedScorer(written_pack)
    with RewardClient(serve(scorer).endpoint) as client:
        assert not client.server_info().has_crop_gradients
        identity = scorer.embed_identity([np.full((64, 64, 3), 255, np.uint8)])
        with pytest.raises(FeatureUnavailable, match=r"likeness-reward\[gradients\]") as caught:
            client.score(np.zeros((1, 64, 64, 3), np.uint8), identity, WANTED)
        assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED
        stream = client.open_stream(WANTED, identity=identity, deadline_s=10)
        with stream, pytest.raises(FeatureUnavailable):
            list(stream.results())


def test_networks_that_are_no_onnx_file_have_no_gradients(serve, colours) -> None:
    with RewardClient(serve().endpoint) as client, pytest.raises(FeatureUnavailable):
        client.score(colours.frame()[None], colours.identity(), WANTED)


def test_a_weight_of_motion_is_refused_together_with_gradients(serve, written_pack) -> None:
    pytest.importorskip("onnx2torch", reason="the [gradients] extra is not installed: no onnx2torch")
    scorer = EmbeddedScorer(written_pack)
    identity = scorer.embed_identity([np.full((64, 64, 3), 255, np.uint8)])
    options = WANTED.model_copy(update={"motion_weight": 0.1})
    with RewardClient(serve(scorer).endpoint) as client, pytest.raises(InvalidRequest, match="motion of 0, not 0.1"):
        client.score(np.zeros((1, 64, 64, 3), np.uint8), identity, options)


def test_scores_alone_never_import_torch(written_pack) -> None:
    import subprocess

    code = (
        "import sys, numpy as np, likeness_reward.client; from likeness_reward.embedded import EmbeddedScorer;"
        f"s = EmbeddedScorer({str(written_pack)!r}); f = np.full((1, 64, 64, 3), 255, np.uint8);"
        "s.score(f, s.embed_identity(list(f))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    pytest.importorskip("onnx2torch", reason="the [gradients] extra is not installed: no onnx2torch")
    with RewardClient(serve(EmbeddedScorer(written_pack)).endpoint) as client:
        info = client._stub.GetServerInfo(reward_service_pb2.GetServerInfoRequest(), timeout=10)
    assert list(info.features) == [reward_service_pb2.FEATURE_CROP_GRADIENTS]
