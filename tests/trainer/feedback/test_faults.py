"""What goes wrong between a score and its gradient moves no adapter, wholly or by half."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from likeness_reward import gradient_wire
from likeness_trainer.config import OptimizerConfig
from likeness_trainer.errors import RewardRejectedError
from likeness_trainer.learn.feedback_update import FeedbackUpdate, backpropagate_rewards
from likeness_trainer.learn.learner import Learner
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.prompts import PreparedPrompt
from likeness_trainer.reward_link import RewardConfig, RewardLink

ALGORITHM = PolicyGradientConfig(name="reward_feedback")


@pytest.fixture
def prompt(module: Any, conditioning: Any, person_frames: np.ndarray, scorer: Any) -> PreparedPrompt:
    identity = scorer.embed_identity(list(person_frames))
    return PreparedPrompt(1, "a portrait of a person", conditioning.to("cpu"), identity, None, 9, 64, 64)


@pytest.fixture(scope="module")
def scorer() -> Any:
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    from likeness_reward.embedded import EmbeddedScorer

    return EmbeddedScorer(toyworld.face_pack_path())


def connect(endpoint: str, **settings: Any) -> RewardLink:
    link = RewardLink(RewardConfig(endpoint=endpoint, min_face_pixels=16, first_backoff_s=0.01, **settings))
    link.connect()
    return link


def run(module: Any, link: RewardLink, prompts: list[PreparedPrompt]) -> FeedbackUpdate:
    return backpropagate_rewards(module, link, prompts, ALGORITHM, (0, "test"))


def adapters_after(module: Any, update: FeedbackUpdate) -> tuple[dict[str, Any], float]:
    """Returns the metrics of an update and how far it moved the adapters."""
    before = [parameter.detach().clone() for parameter in module.lora_parameters()]
    metrics = Learner(module, OptimizerConfig(), ALGORITHM).update([], 0, None, update)
    moved = max(float((a.detach() - b).abs().max()) for a, b in zip(module.lora_parameters(), before, strict=True))
    return metrics, moved


def test_an_undisturbed_step_moves_the_adapters(module: Any, serve: Callable[..., Any], scorer: Any, prompt) -> None:
    update = run(module, connect(serve(scorer).endpoint), [prompt])
    metrics, moved = adapters_after(module, update)
    assert metrics["skipped"] == 0
    assert moved > 0


def test_a_server_without_the_feature_is_refused_before_training(
    serve: Callable[..., Any], scorer, monkeypatch
) -> None:
    monkeypatch.setitem(scorer.__dict__, "gradient_source", "no such model")
    link = connect(serve(scorer).endpoint)
    with pytest.raises(RewardRejectedError, match="sends no gradients .*, export the pack with --gradients"):
        link.require_gradients(link.connect())


@pytest.mark.parametrize("fault", ["shape", "nan", "missing"])
def test_wrong_gradients_drop_the_prompt(
    module: Any, serve: Callable[..., Any], scorer, prompt, monkeypatch, fault
) -> None:
    original = gradient_wire.gradients_to_message

    def broken(gradients: Any, encoding: Any, video_id: str = "") -> Any:
        message = original(gradients, encoding, video_id)
        if fault == "missing":
            del message.gradients[0]
        else:
            first = message.gradients[0]
            first.values = first.values[:-2] if fault == "shape" else np.full(3 * 112 * 112, np.nan, "<f2").tobytes()
        return message

    link = connect(serve(scorer).endpoint, video_retries=1)
    monkeypatch.setattr(gradient_wire, "gradients_to_message", broken)
    update = run(module, link, [prompt])
    assert (update.dropped, update.rewards, update.gradients) == (1, [], [])
    assert all(parameter.grad is None for parameter in module.lora_parameters())
    metrics, moved = adapters_after(module, update)
    assert metrics == {"skipped": 0}
    assert moved == 0.0


def test_a_connection_lost_between_score_and_gradient_is_made_good(
    module: Any, serve: Callable[..., Any], scorer: Any, prompt, monkeypatch
) -> None:
    """The first stream dies with its gradients sent and its result not: all is sent again and gives the same step."""
    from likeness_reward import video_stream

    link = connect(serve(scorer).endpoint)
    expected = run(module, link, [prompt])
    take, lost = video_stream.VideoScoreStream._take, []

    def losing(self: Any, response: Any) -> None:
        if response.HasField("result") and not lost:
            lost.append(len(self._gradients))
            self._call.cancel()
            return
        take(self, response)

    monkeypatch.setattr(video_stream.VideoScoreStream, "_take", losing)
    found = run(module, link, [prompt])
    assert lost == [1]
    for before, after in zip(expected.gradients, found.gradients, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-8)


def test_a_refusal_in_the_middle_of_a_step_leaves_no_gradient(
    module: Any, serve: Callable[..., Any], scorer: Any, prompt, monkeypatch
) -> None:
    link = connect(serve(scorer).endpoint, video_retries=0)
    alone = run(module, link, [prompt])
    stranger = replace(prompt, identity=replace(prompt.identity, embedding=prompt.identity.embedding[:-1]))
    with pytest.raises(RewardRejectedError):
        run(module, link, [prompt, stranger])
    assert all(parameter.grad is None for parameter in module.lora_parameters())
    assert len(alone.rewards) == 1


def test_a_gradient_that_is_not_finite_skips_the_step(module: Any) -> None:
    gradients = [torch.full_like(parameter, float("nan")) for parameter in module.lora_parameters()]
    metrics, moved = adapters_after(module, FeedbackUpdate(gradients))
    assert metrics["skipped"] == 1
    assert moved == 0.0
