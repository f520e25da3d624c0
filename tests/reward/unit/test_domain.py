"""Templates on disk, errors and options on the wire."""

from pathlib import Path

import grpc
import numpy as np
import pytest
from pydantic import ValidationError

from likeness.reward.v1 import identity_pb2, reward_pb2
from likeness_reward import wire
from likeness_reward.domain import IdentityTemplate, ScoreOptions
from likeness_reward.errors import (
    InvalidImage,
    InvalidRequest,
    InvalidTemplate,
    LikenessError,
    ServerBusy,
    error_from_status,
    status_from_error,
)
from likeness_reward.many import RetryPolicy


def test_a_saved_template_comes_back_exactly(tmp_path: Path) -> None:
    embedding = np.random.default_rng(0).normal(size=128).astype(np.float32)
    IdentityTemplate(embedding, "abc", 3).save(tmp_path / "anna.json")
    loaded = IdentityTemplate.load(tmp_path / "anna.json")
    np.testing.assert_array_equal(loaded.embedding, embedding)
    assert (loaded.model_fingerprint, loaded.image_count) == ("abc", 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot read identity template"),
        ("{}", "no format"),
        ('{"format": "likeness-identity-template/1"}', "damaged: KeyError"),
        ('{"format": "likeness-identity-template/1", "model_fingerprint": "", "image_count": 1, "embedding": [NaN]}',
         "no list of finite numbers"),
    ],
)  # fmt: skip
def test_a_damaged_template_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "anna.json").write_text(text)
    with pytest.raises(InvalidTemplate, match=reason) as caught:
        IdentityTemplate.load(tmp_path / "anna.json")
    assert "anna.json" in caught.value.message


@pytest.mark.parametrize("kind", sorted(LikenessError.by_reason.values(), key=lambda kind: kind.reason))
def test_every_error_crosses_the_wire_with_class_code_message_and_metadata(kind: type[LikenessError]) -> None:
    returned = error_from_status(status_from_error(kind("what happened", frame_index=3)))
    assert type(returned) is kind
    assert (returned.code, returned.message, returned.metadata) == (kind.code, "what happened", {"frame_index": "3"})


def test_an_error_of_a_later_version_keeps_its_code() -> None:
    status = status_from_error(InvalidImage("new"))
    status.details[0].value = status.details[0].value.replace(b"INVALID_IMAGE", b"UNHEARD_OF_01")
    assert (type(error_from_status(status)), error_from_status(status).code) == (
        LikenessError,
        grpc.StatusCode.INVALID_ARGUMENT,
    )


def test_only_what_may_pass_by_itself_is_worth_a_retry() -> None:
    retryable = {kind.reason for kind in LikenessError.by_reason.values() if kind("").retryable}
    assert retryable == {
        "INFERENCE_SERVER_UNAVAILABLE",
        "SERVER_BUSY",
        "SERVER_DRAINING",
        "SERVER_UNAVAILABLE",
    }
    assert ServerBusy("").retryable


def test_options_cross_the_wire_unchanged() -> None:
    options = ScoreOptions(
        aggregation="min",
        no_face_value=-0.5,
        min_face_pixels=7,
        face_choice="most_similar",
        identity_weight=0.5,
        coverage_weight=0.25,
        include_frames=False,
    )
    assert wire.options_from_message(wire.options_to_message(options)) == options


def test_an_empty_options_message_means_the_defaults() -> None:
    assert wire.options_from_message(reward_pb2.ScoreOptions()) == ScoreOptions(include_frames=False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"no_face_value": 1.5}, "options.no_face_value is 1.5"),
        ({"no_face_value": float("nan")}, "options.no_face_value is nan"),
        ({"min_face_pixels": 0}, "options.min_face_pixels is 0"),
        ({"aggregation": 9}, "options.aggregation 9 is unknown"),
        ({"component_weights": [{"name": "beauty", "weight": 1}]}, "no component 'beauty'; there are identity"),
        ({"component_weights": [{"name": "identity", "weight": float("inf")}]}, "options.identity_weight is inf"),
    ],
)
def test_options_out_of_range_are_named(fields: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        wire.options_from_message(reward_pb2.ScoreOptions(**fields))


def test_a_template_message_must_hold_whole_numbers() -> None:
    with pytest.raises(InvalidTemplate, match="3 bytes"):
        wire.identity_from_message(identity_pb2.IdentityTemplate(embedding=b"abc"))


def test_score_options_are_frozen_and_know_their_keys() -> None:
    with pytest.raises(ValidationError):
        ScoreOptions(no_face_valeu=0.0)  # type: ignore[call-arg]


def test_waits_double_up_to_the_longest_and_jitter_takes_at_most_a_quarter() -> None:
    policy = RetryPolicy(first_wait_s=1, longest_wait_s=5)
    for attempt, longest in ((1, 1), (2, 2), (3, 4), (4, 5), (60, 5)):
        assert 0.75 * longest <= policy.wait_s(attempt) <= longest
