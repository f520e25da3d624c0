"""What a running server tells those who watch it: metrics and log lines."""

import json
import logging
import time
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from likeness_reward import errors
from likeness_reward.client import RewardClient
from likeness_reward.logs import configure_logging

SOON_S = 10.0
METHODS = ("ScoreVideo", "EmbedIdentity")


def samples(server) -> dict[tuple[str, frozenset], float]:
    """Returns the values of /metrics by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server.metrics_port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(server, name: str, **labels: str) -> float:
    """Returns one value; 0 when it was never counted."""
    return samples(server).get((f"likeness_reward_{name}", frozenset(labels.items())), 0.0)


def test_metrics_count_videos_frames_bytes_calls_and_stages(serve, colours) -> None:
    server = serve(metrics_port=0)
    frames = np.stack([colours.frame(), colours.frame(red=0), colours.frame()])
    with RewardClient(server.endpoint) as client:
        client.score(frames, colours.identity())
        with client.open_stream(identity=colours.identity(), deadline_s=20) as stream:
            for name, video in (("good", frames), ("broken", np.stack([colours.frame(blue=255)]))):
                stream.start_video(name, 64, 64, len(video))
                stream.send_frames(name, 0, video)
                stream.end_video(name)
            stream.close()
            assert len(list(stream.results())) == 2
        with pytest.raises(errors.InvalidImage):
            client.embed_identity([b"12345"])
    assert value(server, "videos_total", outcome="ok") == 2
    assert value(server, "videos_total", outcome="INFERENCE_FAILED") == 1
    assert value(server, "frames_total", verdict="embedded") == 4
    assert value(server, "frames_total", verdict="no_face") == 2
    assert value(server, "received_bytes_total") == 7 * 64 * 64 * 3 + 5
    assert value(server, "calls_total", method="ScoreVideo", code="OK") == 1
    assert value(server, "calls_total", method="StreamVideoScores", code="OK") == 1
    assert value(server, "calls_total", method="EmbedIdentity", code="INVALID_ARGUMENT") == 1
    for stage in ("queue", "decode", "detect", "align", "recognize"):
        assert value(server, "stage_seconds_count", stage=stage) >= 2, stage
    for gauge in ("videos_in_flight", "queue_depth", "calls_running"):
        assert value(server, gauge) == 0, gauge
    assert value(server, "ready") == 1
    info = {"pack": "colours", "fingerprint": colours.fingerprint, "backend": "embedded", "provider": "other"}
    assert any(
        name == "likeness_reward_info" and info.items() <= dict(labels).items() for name, labels in samples(server)
    )


def test_the_gauges_show_work_that_waits_and_forget_what_is_cancelled(serve, colours) -> None:
    recognizer = colours.Recognizer()
    recognizer.before_run = lambda: time.sleep(0.3)
    server = serve(colours.scorer(recognizer=recognizer), metrics_port=0)
    with RewardClient(server.endpoint) as client:
        stream = client.open_stream(identity=colours.identity(), deadline_s=20)
        for name in "abc":
            stream.start_video(name, 64, 64, 2)
            stream.send_frames(name, 0, np.stack([colours.frame()] * 2))
            stream.end_video(name)
        give_up_at = time.monotonic() + SOON_S
        while value(server, "queue_depth") < 1 or value(server, "videos_in_flight") < 2:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
        assert value(server, "calls_running") == 1
        stream.cancel()
    while any(value(server, gauge) for gauge in ("queue_depth", "videos_in_flight", "calls_running")):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    assert value(server, "videos_total", outcome="cancelled") >= 1
    assert value(server, "calls_total", method="StreamVideoScores", code="CANCELLED") == 1


def test_a_call_is_one_json_line_with_its_request_id(serve, colours, capsys) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("json")
        server = serve()
        with RewardClient(server.endpoint) as client:
            client.score(np.stack([colours.frame()] * 2), colours.identity())
            with pytest.raises(errors.InvalidImage):
                client.embed_identity([b"x"])
        server.stop()  # a line is written after its call has ended
    finally:
        root.handlers[:], root.level = before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    scored, embedded = (next(line for line in lines if line.get("method") == name) for name in METHODS)
    assert (scored["code"], scored["videos"], scored["frames"], scored["level"]) == ("OK", 1, 2, "INFO")
    assert len(scored["request_id"]) == 36
    assert scored["seconds"] >= 0
    assert scored["peer"].startswith("ipv4:127.0.0.1")
    assert embedded["code"] == "INVALID_ARGUMENT"


def test_the_port_of_the_metrics_must_be_free(serve) -> None:
    taken = serve(metrics_port=0).server.metrics_port
    with pytest.raises(errors.CannotListen, match=f"127.0.0.1:{taken} for metrics"):
        serve(metrics_port=taken)
