"""The unary calls, errors, health and limits over real gRPC."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc, video_pb2
from likeness_reward import errors
from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate, ScoreOptions, Verdict, VideoMotion
from likeness_reward.errors import LikenessError
from likeness_reward.images import encode_png
from likeness_reward.many import VideoToScore


def test_the_server_names_its_models_limits_and_components(client: RewardClient, colours) -> None:
    info = client.server_info()
    assert (info.pack_name, info.embedding_length, info.detector_size) == ("colours", 4, (64, 64))
    assert info.model_fingerprint == colours.fingerprint
    assert info.component_names == ("identity", "coverage", "motion")
    assert info.limits.max_message_bytes == 64 * 2**20


def test_an_identity_is_the_mean_of_its_photos_and_leaves_out_those_without_a_face(
    client: RewardClient, colours
) -> None:
    photos = [encode_png(colours.frame(green=0)), colours.frame(red=0), colours.frame(green=255)]
    identity, observations = client.embed_identity_with_observations(photos)
    np.testing.assert_allclose(identity.embedding, [0.5, 0.5, 0, 0], atol=1e-6)
    assert (identity.image_count, identity.model_fingerprint) == (2, colours.fingerprint)
    assert [seen.verdict for seen in observations] == [Verdict.EMBEDDED, Verdict.NO_FACE, Verdict.EMBEDDED]
    np.testing.assert_allclose(observations[0].face.box, colours.box)
    np.testing.assert_allclose(observations[0].face.landmarks, colours.landmarks, rtol=1e-6)


def test_a_video_is_scored_frame_by_frame(client: RewardClient, colours) -> None:
    frames = np.stack(
        [colours.frame(green=0), colours.frame(green=100), colours.frame(red=0), colours.frame(green=255)]
    )
    reward = client.score(frames, colours.identity(green=100))
    expected = [colours.similarity(0, 100), 1.0, None, colours.similarity(255, 100)]
    assert reward.similarities == [None if value is None else pytest.approx(value, abs=1e-5) for value in expected]
    assert reward.value == pytest.approx((expected[0] + 1.0 + 0.0 + expected[3]) / 4, abs=1e-5)
    assert (reward.frame_count, reward.embedded_frame_count, reward.coverage) == (4, 3, 0.75)
    assert reward.component("coverage") == 0.75


def test_a_video_beyond_one_message_goes_over_a_stream(client: RewardClient, colours) -> None:
    frames = np.stack([colours.frame(green=0, width=1024, height=1024)] * 4)
    assert frames.nbytes > 8 * 2**20
    assert client.score(frames, colours.identity()).similarities == [pytest.approx(1.0)] * 4


def test_every_error_of_the_family_reaches_the_caller_as_itself(serve, colours) -> None:
    class Raising:
        """A scorer whose work raises what the test wants."""

        def __init__(self) -> None:
            self.error: LikenessError = LikenessError("")
            self.pack = colours.scorer().pack
            self.model_fingerprint, self.provider = colours.fingerprint, "none"

        def check_networks(self) -> None: ...

        def observe_stages(self, observe) -> None: ...

        def embed_identity_with_observations(self, *_):
            raise self.error

    scorer = Raising()
    with RewardClient(serve(scorer).endpoint) as client:
        for kind in LikenessError.by_reason.values():
            scorer.error = kind(f"what {kind.reason} is about", index=7)
            with pytest.raises(kind) as caught:
                client.embed_identity([b"x"])
            assert caught.value.code == kind.code
            assert caught.value.message == scorer.error.message
            assert caught.value.metadata == {"index": "7"}


def test_an_error_is_a_google_rpc_status_with_error_info(serve) -> None:
    with grpc.insecure_channel(serve().endpoint) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.EmbedIdentity(reward_service_pb2.EmbedIdentityRequest(images=[b"no image"]), timeout=10)
    status = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (caught.value.code(), status.code) == (grpc.StatusCode.INVALID_ARGUMENT, 3)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "INVALID_IMAGE",
        "likeness.reward",
        {"what": "images[0]"},
    )


def test_a_call_without_a_deadline_is_refused(serve, colours) -> None:
    with grpc.insecure_channel(serve().endpoint) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="no deadline"):
            stub.GetServerInfo(reward_service_pb2.GetServerInfoRequest())
        with pytest.raises(grpc.RpcError, match="no deadline"):
            list(stub.StreamVideoScores(iter([])))
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_is_needed_when_the_server_has_one(serve) -> None:
    endpoint = serve(token="open sesame").endpoint
    for token in (None, "open says me"):
        with RewardClient(endpoint, token=token) as client, pytest.raises(errors.Unauthenticated):
            client.server_info()
    with RewardClient(endpoint, token="open sesame") as client:
        assert client.server_info().pack_name == "colours"


def test_reflection_is_there_only_on_demand(serve) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(serve(reflection=True).endpoint) as channel:
        assert "likeness.reward.v1.RewardService" in ProtoReflectionDescriptorDatabase(channel).get_services()
    with grpc.insecure_channel(serve().endpoint) as channel, pytest.raises(grpc.RpcError, match="(?i)not found"):
        ProtoReflectionDescriptorDatabase(channel).get_services()


@pytest.mark.parametrize(
    ("spoil", "kind", "reason"),
    [
        (lambda identity: identity.embedding[:3], errors.InvalidTemplate, "has 3 numbers; .* colours makes 4"),
        (lambda identity: identity.embedding * np.nan, errors.InvalidTemplate, "not finite"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(client: RewardClient, colours, spoil, kind, reason: str) -> None:
    identity = colours.identity()
    spoilt = IdentityTemplate(spoil(identity), identity.model_fingerprint, 1)
    with pytest.raises(kind, match=reason):
        client.score(colours.frame()[None], spoilt)


def test_a_template_of_other_models_is_refused(client: RewardClient, colours) -> None:
    foreign = IdentityTemplate(colours.identity().embedding, "0" * 64, 1)
    with pytest.raises(errors.FingerprintMismatch, match="000000000000, these are ffffffffffff"):
        client.score(colours.frame()[None], foreign)


def test_limits_are_told_and_kept(serve, colours) -> None:
    limits = {"max_frames_per_video": 2, "max_pixels_per_frame": 4096, "max_images": 1, "max_pixels_per_image": 5000}
    with RewardClient(serve(**limits).endpoint) as client:
        told = client.server_info().limits
        assert {name: getattr(told, name) for name in limits} == limits
        identity = colours.identity()
        with pytest.raises(errors.LimitExceeded, match="frame_count is 3; at most 2"):
            client.score(np.stack([colours.frame()] * 3), identity)
        with pytest.raises(errors.LimitExceeded, match="65x64 = 4160 pixels; at most 4096"):
            client.score(colours.frame(width=65)[None], identity)
        with pytest.raises(errors.LimitExceeded, match="2 images; at most 1"):
            client.embed_identity([colours.frame()] * 2)
        with pytest.raises(errors.LimitExceeded, match="images.0. is 80x64 = 5120 pixels"):
            client.embed_identity([colours.frame(width=80)])


def test_a_message_over_the_limit_is_refused_by_size(serve, colours) -> None:
    with (
        RewardClient(serve(max_message_bytes=2**16).endpoint) as client,
        pytest.raises(errors.LimitExceeded, match="larger than max"),
    ):
        client.score(np.stack([colours.frame()] * 8), colours.identity())


def spec(**fields: int) -> video_pb2.VideoSpec:
    return video_pb2.VideoSpec(**({"encoding": 1, "width": 64, "height": 64, "frame_count": 1} | fields))


@pytest.mark.parametrize(
    ("fields", "frames", "kind", "reason"),
    [
        ({"encoding": 0}, [b""], errors.InvalidVideo, "spec.encoding is 0; allowed are FRAME_ENCODING_RGB24"),
        ({"width": 0}, [b""], errors.InvalidVideo, "0x64"),
        ({"width": 5000, "height": 1}, [b""], errors.InvalidVideo, "5000x1"),
        ({"frame_count": 0}, [], errors.InvalidVideo, "frame_count is 0"),
        ({"frame_count": 2}, [bytes(12288)], errors.InvalidVideo, "1 frames; spec.frame_count is 2"),
        ({}, [bytes(12287)], errors.InvalidVideo, "frame 0 has 12287 bytes; 64x64 RGB24 has 12288"),
        ({"width": 48, "height": 48}, [bytes(12288)], errors.InvalidVideo, "12288 bytes; 48x48 RGB24 has 6912"),
        ({"encoding": 2}, [b"\x89PNG\r\n\x1a\n"], errors.InvalidImage, "frame 0"),
        ({"encoding": 2}, [encode_png(np.zeros((32, 64, 3), np.uint8))], errors.InvalidImage, "64x32; .*64x64"),
        ({"encoding": 2}, [encode_png(np.zeros((90, 64, 3), np.uint8))], errors.LimitExceeded, "64x90"),
    ],
)
def test_frames_that_do_not_fit_are_explained(serve, colours, fields, frames, kind, reason: str) -> None:
    from likeness_reward.wire import identity_to_message

    request = reward_service_pb2.ScoreVideoRequest(
        identity=identity_to_message(colours.identity()), spec=spec(**fields), frames=frames
    )
    with grpc.insecure_channel(serve().endpoint) as channel:
        with pytest.raises(grpc.RpcError, match=reason) as caught:
            reward_service_pb2_grpc.RewardServiceStub(channel).ScoreVideo(request, timeout=10)
        assert errors.error_from_call(caught.value, "").reason == kind.reason


def test_png_frames_score_as_raw_frames_do(serve, colours) -> None:
    from likeness_reward.wire import identity_to_message, reward_from_message

    frame = colours.frame(green=100)
    with grpc.insecure_channel(serve().endpoint) as channel:
        response = reward_service_pb2_grpc.RewardServiceStub(channel).ScoreVideo(
            reward_service_pb2.ScoreVideoRequest(
                identity=identity_to_message(colours.identity(100)), spec=spec(encoding=2), frames=[encode_png(frame)]
            ),
            timeout=10,
        )
    assert reward_from_message(response.reward).value == pytest.approx(1.0)


def test_a_feature_that_is_not_there_is_named(serve, colours) -> None:
    request = reward_service_pb2.ScoreVideoRequest(options={"include_crop_gradients": True}, spec=spec())
    with grpc.insecure_channel(serve().endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        reward_service_pb2_grpc.RewardServiceStub(channel).ScoreVideo(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "FEATURE_CROP_GRADIENTS" in caught.value.details()


def test_many_callers_get_what_one_caller_gets(serve, colours) -> None:
    frames = np.stack([colours.frame(green=green) for green in (0, 60, 120)])
    with RewardClient(serve(workers=2, max_calls=64).endpoint) as client:
        alone = client.score(frames, colours.identity(60))
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(lambda _: client.score(frames, colours.identity(60)), range(64)))
    assert {reward.value for reward in together} == {alone.value}
    assert all(reward.similarities == alone.similarities for reward in together)


def test_one_call_too_many_is_refused_and_may_be_tried_again(serve, colours) -> None:
    held, entered = threading.Event(), threading.Event()
    recognizer = colours.Recognizer()
    server = serve(colours.scorer(recognizer=recognizer), max_calls=1)

    def wait() -> None:
        entered.set()
        assert held.wait(20)

    recognizer.before_run = wait
    with RewardClient(server.endpoint) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.score, colours.frame()[None], colours.identity())
        assert entered.wait(20)
        with pytest.raises(errors.ServerBusy, match="at most 1"):
            client.score(colours.frame()[None], colours.identity())
        held.set()
        assert first.result(20).value == pytest.approx(1.0)
        assert client.score(colours.frame()[None], colours.identity()).value == pytest.approx(1.0)


def test_a_passed_deadline_ends_the_call(serve, colours) -> None:
    held = threading.Event()
    recognizer = colours.Recognizer()
    server = serve(colours.scorer(recognizer=recognizer))
    recognizer.before_run = lambda: held.wait(20)
    with RewardClient(server.endpoint, timeout_s=0.3) as client, pytest.raises(errors.DeadlineExceeded):
        client.score(colours.frame()[None], colours.identity())
    held.set()


def test_options_reach_the_server(client: RewardClient, colours) -> None:
    frames = np.stack([colours.frame(green=0), colours.frame(red=0)])
    options = ScoreOptions(no_face_value=-1.0, aggregation="min", coverage_weight=2.0, include_frames=False)
    reward = client.score(frames, colours.identity(), options)
    assert reward.value == pytest.approx(-1.0 + 2.0 * 0.5)
    assert reward.frames == ()
    assert client.score(frames, colours.identity(), ScoreOptions(min_face_pixels=33)).embedded_frame_count == 0


def test_a_bad_field_and_a_busy_server_say_so_in_the_standard_details(serve, colours) -> None:
    from google.rpc.error_details_pb2 import BadRequest, RetryInfo

    def details_of(error: LikenessError, kind: type) -> list:
        found = []
        for detail in errors.status_from_error(error).details:
            message = kind()
            found += [message] if detail.Unpack(message) else []
        return found

    with (
        RewardClient(serve(max_frames_per_video=2).endpoint) as client,
        pytest.raises(errors.LimitExceeded) as caught,
    ):
        client.score(np.stack([colours.frame()] * 3), colours.identity())
    (bad_request,) = details_of(caught.value, BadRequest)
    assert bad_request.field_violations[0].field == "spec.frame_count"
    assert not details_of(caught.value, RetryInfo)
    (retry,) = details_of(errors.ServerBusy("later"), RetryInfo)
    assert retry.retry_delay.seconds == 1
    assert errors.error_from_status(errors.status_from_error(errors.ServerBusy("later"))).retry_after_s == 1.0


def test_a_connection_of_the_greatest_age_takes_no_new_call_and_finishes_its_streams(serve, colours, caplog) -> None:
    frames, identity = np.stack([colours.frame()] * 2), colours.identity()
    caplog.set_level("INFO", logger="likeness_reward.interceptor")

    def peers(method: str) -> list[str]:
        return [record.peer for record in caplog.records if getattr(record, "method", "") == method]

    server = serve(max_connection_age_s=1)
    with (
        RewardClient(server.endpoint, timeout_s=20) as client,
        client.open_stream(identity=identity, deadline_s=60) as stream,
    ):
        stream.start_video("older than the connection", 64, 64, 2)
        stream.send_frames("older than the connection", 0, frames[:1])
        give_up_at = time.monotonic() + 20
        while len(set(peers("ScoreVideo"))) < 3:  # two connections later
            assert client.score(frames, identity).value == pytest.approx(1.0)
            assert time.monotonic() < give_up_at, "all calls came over the same connection"
            time.sleep(0.05)
        stream.send_frames("older than the connection", 1, frames[1:])
        stream.end_video("older than the connection")
        stream.close()
        ((_, reward),) = stream.results()
        assert reward.embedded_frame_count == 2
    assert peers("StreamVideoScores") == peers("ScoreVideo")[:1]


def test_a_server_with_other_models_than_expected_does_not_start(serve, colours) -> None:
    assert serve(expect_fingerprint=colours.fingerprint[:8]).endpoint
    with pytest.raises(errors.FingerprintMismatch, match=f"are {colours.fingerprint}, expected was 12345678"):
        serve(expect_fingerprint="12345678")


def test_motion_is_told_and_measured_by_a_reference_in_every_way_of_scoring(client: RewardClient, colours) -> None:
    halves = [colours.frame(), colours.frame()]
    halves[1][:, 40:, 1] = 200  # the right edge turns yellow; the middle, and with it the face's embedding, does not
    moving, still = np.stack(halves), np.stack(halves[:1] * 2)
    identity, options = colours.identity(), ScoreOptions(motion_weight=1.0)
    reference = client.score(moving, identity).motion
    assert reference.scene > 0.1
    assert client.score(still, identity).motion.scene == 0.0
    rewards = [
        client.score(still, identity, options, reference_motion=reference),
        client._score_over_stream(still, identity, options, reference),
        *(reward for _, reward in client.score_many([VideoToScore("v", still, identity, reference)], options)),
    ]
    local = colours.scorer().score(still, identity, options, reference_motion=reference)
    assert local.component("motion") < 0.05
    for reward in rewards:
        assert reward.component("motion") == pytest.approx(local.component("motion"), rel=1e-5)
        assert reward.value == pytest.approx(local.value, rel=1e-6)
    assert client.score(moving, identity, options, reference_motion=reference).component("motion") == pytest.approx(1.0)


def test_a_motion_weight_without_a_reference_and_a_reference_out_of_range_are_refused(
    client: RewardClient, colours
) -> None:
    frames, identity = colours.frame()[None], colours.identity()
    weighted = ScoreOptions(motion_weight=1.0)
    with pytest.raises(errors.InvalidRequest, match="no reference_motion"):
        client.score(frames, identity, weighted)
    ((_, outcome),) = client.score_many([VideoToScore("v", frames, identity)], weighted)
    assert isinstance(outcome, errors.InvalidRequest)
    for scene, face in ((float("nan"), None), (-0.1, None), (0.5, 1.5)):
        with pytest.raises(errors.InvalidRequest, match="reference_motion.* must be within 0 to 1"):
            client.score(frames, identity, reference_motion=VideoMotion(scene, face))
