"""StreamVideoScores: order, overlap, per-video errors, backpressure."""

import contextlib
import threading
import time
import zlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from likeness.reward.v1 import reward_service_pb2, reward_service_pb2_grpc
from likeness_reward import errors
from likeness_reward.client import RewardClient
from likeness_reward.domain import ScoreOptions, VideoReward
from likeness_reward.errors import LikenessError
from likeness_reward.many import VideoToScore
from likeness_reward.messages import FRAMES_PER_MESSAGE, video_frames
from likeness_reward.video_stream import QUEUED_MESSAGES, VideoScoreStream
from likeness_reward.wire import identity_to_message


def send(stream: VideoScoreStream, name: str, frames: np.ndarray, **start: object) -> None:
    """Sends a whole video."""
    stream.start_video(name, frames.shape[2], frames.shape[1], len(frames), **start)
    stream.send_frames(name, 0, frames)
    stream.end_video(name)


@contextlib.contextmanager
def stream_on(server, colours) -> Iterator[VideoScoreStream]:
    """A stream of a client of its own."""
    with (
        RewardClient(server.endpoint) as client,
        client.open_stream(identity=colours.identity(), deadline_s=30) as stream,
    ):
        yield stream


def video(colours, *greens: int) -> np.ndarray:
    return np.stack([colours.frame(green=green) for green in greens])


def test_each_video_gets_its_reward_against_its_own_identity(client: RewardClient, colours) -> None:
    with client.open_stream(identity=colours.identity(0), deadline_s=20) as stream:
        send(stream, "stream's", video(colours, 0, 100))
        send(stream, "own", video(colours, 0, 100), identity=colours.identity(100))
        stream.close()
        rewards = dict(stream.results())
    assert rewards["stream's"].similarities == pytest.approx([1.0, colours.similarity(0, 100)], abs=1e-5)
    assert rewards["own"].similarities == pytest.approx([colours.similarity(0, 100), 1.0], abs=1e-5)


def test_a_stream_gives_what_a_unary_call_gives(client: RewardClient, colours) -> None:
    frames = video(colours, *range(0, 250, 20))
    with client.open_stream(identity=colours.identity(60), deadline_s=20) as stream:
        send(stream, "video", frames)
        stream.close()
        ((_, streamed),) = stream.results()
    unary = client.score(frames, colours.identity(60))
    assert (streamed.value, streamed.components, streamed.similarities) == (
        unary.value,
        unary.components,
        unary.similarities,
    )


def test_a_faulty_video_fails_alone(client: RewardClient, colours) -> None:
    with client.open_stream(identity=colours.identity(), deadline_s=20) as stream:
        send(stream, "good", video(colours, 0, 0))
        stream.start_video("wrong size", 64, 64, 2)
        stream.send_frames("wrong size", 0, np.zeros((2, 32, 64, 3), np.uint8))
        stream.end_video("wrong size")
        stream.start_video("short", 64, 64, 3)
        stream.send_frames("short", 0, video(colours, 0, 0))
        stream.end_video("short")
        stream.start_video("gap", 64, 64, 3)
        stream.send_frames("gap", 1, video(colours, 0))
        stream.end_video("gap")
        stream.start_video("too many", 64, 64, 1)
        stream.send_frames("too many", 0, video(colours, 0, 0))
        stream.end_video("too many")
        send(stream, "nan", np.stack([colours.frame(), colours.frame(blue=255)]))
        send(stream, "good too", video(colours, 100))
        stream.close()
        outcomes = dict(stream.results())
    assert outcomes["good"].value == pytest.approx(1.0)
    assert outcomes["good too"].value == pytest.approx(colours.similarity(0, 100), abs=1e-5)
    for name, kind, reason in (
        ("wrong size", errors.InvalidVideo, "6144 bytes; 64x64 RGB24 has 12288"),
        ("short", errors.InvalidVideo, "ended after 2 of 3 frames"),
        ("gap", errors.InvalidVideo, "first_frame_index is 1; the next frame is 0"),
        ("too many", errors.InvalidVideo, "2 frames; the video announced 1"),
        ("nan", errors.InferenceFailed, "not finite"),
    ):
        assert type(outcomes[name]) is kind
        assert reason in outcomes[name].message


def test_frames_are_scored_while_later_ones_are_still_to_come(serve, colours) -> None:
    recognizer = colours.Recognizer()
    server = serve(colours.scorer(recognizer=recognizer))
    scored = threading.Semaphore(0)
    recognizer.before_run = scored.release
    with stream_on(server, colours) as stream:
        stream.start_video("video", 64, 64, 3)
        for index in range(3):
            stream.send_frames("video", index, video(colours, 0))
            assert scored.acquire(timeout=10), f"frame {index} was not scored before frame {index + 1} was sent"
        stream.end_video("video")
        stream.close()
        assert [name for name, _ in stream.results()] == ["video"]


def test_results_come_in_order_of_completion(client: RewardClient, colours) -> None:
    with client.open_stream(identity=colours.identity(), deadline_s=20) as stream:
        stream.start_video("started first", 64, 64, 2)
        stream.send_frames("started first", 0, video(colours, 0))
        send(stream, "completed first", video(colours, 0))
        results = stream.results()
        assert next(results)[0] == "completed first"
        stream.send_frames("started first", 1, video(colours, 0))
        stream.end_video("started first")
        stream.close()
        assert [name for name, _ in results] == ["started first"]


def test_a_cancelled_video_has_no_result_and_its_name_is_free_again(client: RewardClient, colours) -> None:
    with client.open_stream(identity=colours.identity(), deadline_s=20) as stream:
        stream.start_video("video", 64, 64, 5)
        stream.send_frames("video", 0, video(colours, 0))
        stream.end_video("video", cancelled=True)
        send(stream, "video", video(colours, 100))
        stream.close()
        ((name, reward),) = stream.results()
    assert (name, reward.frame_count) == ("video", 1)


def test_wrong_models_end_the_stream_at_once(client: RewardClient) -> None:
    with client.open_stream(deadline_s=20, expected_fingerprint="0" * 64) as stream:
        with pytest.raises(errors.FingerprintMismatch, match="ffffffffffff, 000000000000 were expected"):
            list(stream.results())
        with pytest.raises(errors.FingerprintMismatch):
            stream.start_video("video", 64, 64, 1)


def test_a_video_without_any_identity_fails_alone(client: RewardClient, colours) -> None:
    with client.open_stream(deadline_s=20) as stream:
        send(stream, "nobody", video(colours, 0))
        stream.close()
        ((_, error),) = stream.results()
    assert isinstance(error, errors.InvalidTemplate)


def test_starting_a_video_waits_while_as_many_as_allowed_are_in_flight(serve, colours) -> None:
    held = threading.Event()
    recognizer = colours.Recognizer()
    server = serve(colours.scorer(recognizer=recognizer), max_videos_in_flight=2)
    recognizer.before_run = lambda: held.wait(20)
    started: list[str] = []
    with stream_on(server, colours) as stream:

        def send_three() -> None:
            for name in "abc":
                send(stream, name, video(colours, 0))
                started.append(name)
            stream.close()

        sender = threading.Thread(target=send_three)
        sender.start()
        time.sleep(0.3)
        assert started == ["a", "b"]
        held.set()
        assert sorted(name for name, _ in stream.results()) == ["a", "b", "c"]
        sender.join()


def test_a_server_that_does_not_keep_up_stops_the_sender(serve, colours) -> None:
    held = threading.Event()
    recognizer = colours.Recognizer()
    server = serve(colours.scorer(recognizer=recognizer), max_frames_waiting=2)
    recognizer.before_run = lambda: held.wait(20)
    frames = np.stack([colours.frame(width=1024, height=1024)] * FRAMES_PER_MESSAGE)  # 9 MiB, beyond any window
    sent: list[int] = []
    with stream_on(server, colours) as stream:

        def send_all() -> None:
            stream.start_video("video", 1024, 1024, 60)
            for start in range(0, 60, FRAMES_PER_MESSAGE):
                stream.send_frames("video", start, frames)
                sent.append(start)
            stream.end_video("video")
            stream.close()

        sender = threading.Thread(target=send_all)
        sender.start()
        time.sleep(1.0)
        assert len(sent) <= QUEUED_MESSAGES + 8, f"{len(sent)} of 20 messages of 9 MiB are queued somewhere"
        held.set()
        ((_, reward),) = stream.results()
        sender.join()
    assert isinstance(reward, VideoReward)
    assert reward.embedded_frame_count == 60


def test_cancelling_frees_both_threads(client: RewardClient, colours) -> None:
    stream = client.open_stream(identity=colours.identity(), deadline_s=60)
    stream.start_video("video", 64, 64, 5)
    ended: list[LikenessError] = []

    def read() -> None:
        try:
            list(stream.results())
        except LikenessError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    stream.cancel()
    reader.join(10)
    assert not reader.is_alive()
    assert [error.code for error in ended] == [grpc.StatusCode.CANCELLED]
    with pytest.raises(LikenessError):
        stream.send_frames("video", 0, video(colours, 0))


def messages(*steps: dict) -> list[reward_service_pb2.StreamVideoScoresRequest]:
    return [reward_service_pb2.StreamVideoScoresRequest(**step) for step in steps]


SPEC = {"encoding": 1, "width": 64, "height": 64, "frame_count": 1}


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([{"video_start": {"video_id": "a", "spec": SPEC}}], "config must be the first message"),
        ([{"config": {}}, {"config": {}}], "config must be the first message"),
        ([{"config": {}}, {}], "a message of the stream is empty"),
        ([{"config": {}}, {"frames": {"video_id": "a"}}], "frames of video 'a', which is not open"),
        ([{"config": {}}, {"video_end": {"video_id": "a"}}], "the end of video 'a', which is not open"),
        ([{"config": {}}, {"video_start": {"video_id": ""}}], "1 to 64 characters"),
        ([{"config": {}}, {"video_start": {"video_id": "a" * 65}}], "1 to 64 characters"),
        ([{"config": {}}] + 2 * [{"video_start": {"video_id": "a", "spec": SPEC}}], "'a' is already in use"),
    ],
)
def test_a_breach_of_the_order_ends_the_stream(serve, colours, steps: list[dict], reason: str) -> None:
    requests = messages(*steps)
    if "config" in steps[0]:
        requests[0].config.identity.CopyFrom(identity_to_message(colours.identity()))
    with grpc.insecure_channel(serve().endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        list(reward_service_pb2_grpc.RewardServiceStub(channel).StreamVideoScores(iter(requests), timeout=10))
    assert reason in caught.value.details()
    assert errors.error_from_call(caught.value, "").reason == "STREAM_ORDER_BROKEN"


def test_a_client_that_starts_more_videos_than_allowed_is_stopped(serve, colours) -> None:
    config = {"config": {"identity": identity_to_message(colours.identity())}}
    starts = [{"video_start": {"video_id": name, "spec": SPEC}} for name in "abc"]
    with grpc.insecure_channel(serve(max_videos_in_flight=2).endpoint) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="video 'c': 2 videos are already in flight") as caught:
            list(stub.StreamVideoScores(iter(messages(config, *starts)), timeout=10))
    assert errors.error_from_call(caught.value, "").reason == "LIMIT_EXCEEDED"


def test_ending_the_stream_inside_a_video_is_a_breach(serve, colours) -> None:
    config = {"config": {"identity": identity_to_message(colours.identity())}}
    requests = messages(config, {"video_start": {"video_id": "a", "spec": SPEC}})
    with (
        grpc.insecure_channel(serve().endpoint) as channel,
        pytest.raises(grpc.RpcError, match="while video 'a' was open"),
    ):
        list(reward_service_pb2_grpc.RewardServiceStub(channel).StreamVideoScores(iter(requests), timeout=10))


def test_frames_damaged_on_the_way_are_noticed(serve, colours) -> None:
    config = {"config": {"identity": identity_to_message(colours.identity())}}
    frames = {"video_id": "a", "frames": [colours.frame().tobytes()], "crc32": 1}
    steps = [{"video_start": {"video_id": "a", "spec": SPEC}}, {"frames": frames}, {"video_end": {"video_id": "a"}}]
    with grpc.insecure_channel(serve().endpoint) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        _, response = stub.StreamVideoScores(iter(messages(config, *steps)), timeout=10)
    assert "CRC-32" in response.result.error.message


@pytest.mark.parametrize("name", ["a", "video \u00e9" * 9])
def test_frames_joined_by_hand_are_the_message_of_the_contract(name: str) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 40, 70, 3), np.uint8)  # 8400 bytes: a length of two digits
    found = [reward_service_pb2.StreamVideoScoresRequest.FromString(raw) for raw in video_frames(name, 300, frames)]
    assert [(each.frames.video_id, each.frames.first_frame_index) for each in found] == [(name, 300), (name, 303)]
    assert [list(each.frames.frames) for each in found] == [
        [frame.tobytes() for frame in part] for part in (frames[:3], frames[3:])
    ]
    assert [each.frames.crc32 for each in found] == [zlib.crc32(part.tobytes()) for part in (frames[:3], frames[3:])]


def test_many_videos_are_scored_with_few_held(client: RewardClient, colours) -> None:
    alive = 0

    def source():
        nonlocal alive
        for index in range(12):
            alive = index
            yield VideoToScore(f"video {index}", video(colours, index * 20), colours.identity())

    rewards = {}
    for name, reward in client.score_many(source(), ScoreOptions(), concurrency=3):
        rewards[name] = reward.value
        assert alive <= len(rewards) + 3
    assert rewards == {f"video {i}": pytest.approx(colours.similarity(0, i * 20), abs=1e-5) for i in range(12)}


def test_an_error_of_the_source_is_the_callers(client: RewardClient, colours) -> None:
    def source():
        yield VideoToScore("video", video(colours, 0), colours.identity())
        raise ZeroDivisionError("in the caller's code")

    with pytest.raises(ZeroDivisionError):
        list(client.score_many(source()))
