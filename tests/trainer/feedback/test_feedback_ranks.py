"""Reward feedback on two processes, with whole and with sharded weights, comes to the gradient of one process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from likeness_trainer.learn.feedback_config import RewardFeedbackConfig
from likeness_trainer.learn.feedback_update import FeedbackUpdate, backpropagate_rewards
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.learn.prompts import PreparedPrompt
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import GroupDroppedError, GroupScoring, RewardConfig, RewardLink

pytestmark = pytest.mark.slow

PLACES = 4
"""Prompts of the step: 0 and 2 on the first rank, 1 and 3 on the second."""
FIRST_OF_SECOND_RANK = 1


@dataclass(frozen=True)
class Disturbance:
    """What goes wrong with the prompt at one place of the step."""

    name: str
    dropped: int | None = None
    not_finite: int | None = None
    kl_weight: float = 1.0


UNDISTURBED = Disturbance("nothing")
DROPPED = Disturbance("a prompt of the second rank is dropped", dropped=FIRST_OF_SECOND_RANK)
WITHOUT_KL = Disturbance("nothing, the divergence off", kl_weight=0.0)
NOT_FINITE = Disturbance("pixels of the second rank are not finite", not_finite=FIRST_OF_SECOND_RANK)


def loaded_model() -> Any:
    """The toy with adapters that do something, the same in every process."""
    import likeness_toyworld as toyworld
    from likeness_trainer.wan.model_config import WanModelConfig
    from likeness_trainer.wan.module import WanModule
    from likeness_trainer.wan.sampler_config import SamplerConfig

    config = WanModelConfig(
        model_paths=toyworld.model_paths(), tokenizer_path=toyworld.tokenizer_path(), lora_rank=4,
        torch_dtype="float32", device="cpu", use_gradient_checkpointing=True,
    )  # fmt: skip
    model = WanModule(config, SamplerConfig(num_inference_steps=8, mid_timestep=6, final_timestep=7), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.lora_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def prompts_of_step(model: Any, link: RewardLink) -> list[PreparedPrompt]:
    """Four people, their pictures to be animated."""
    from likeness_toyworld import painter

    prompts = []
    for place in range(PLACES):
        motion = painter.sample_motion(np.random.default_rng(place))
        frames = painter.paint_clip(painter.sample_identity(place), motion, 5, 64)[0]
        conditioning = model.encode("a portrait of a person", frames[0], 5, 64, 64).to("cpu")
        identity = link.embed_identity(list(frames), f"person {place}")
        prompts.append(PreparedPrompt(place, "a portrait of a person", conditioning, identity, None, 5, 64, 64))
    return prompts


def disturbed_step(model: Any, link: RewardLink, disturbance: Disturbance, ranks: Ranks) -> FeedbackUpdate:
    """One step of reward feedback, with the disturbance in whichever process has its prompt."""
    from likeness_trainer.learn import reward_feedback

    prompts, mine = prompts_of_step(model, link), ranks.even_share(PLACES)
    opened: list[GroupScoring] = []
    open_group, decode, results = link.open_group, reward_feedback.to_uint8_rgb, GroupScoring.results

    def opening(*arguments: Any) -> GroupScoring:
        opened.append(open_group(*arguments))
        return opened[-1]

    def dropping(group: GroupScoring) -> Any:
        rewards = results(group)
        if mine[opened.index(group)] == disturbance.dropped:
            raise GroupDroppedError("video 0 was not scored")
        return rewards

    def spoiling(pixels: torch.Tensor) -> Any:
        if mine[len(opened) - 1] == disturbance.not_finite:
            return decode(pixels * float("nan"))
        return decode(pixels)

    algorithm = PolicyGradientConfig(
        name="reward_feedback", feedback=RewardFeedbackConfig(kl_weight=disturbance.kl_weight)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "open_group", opening)
        patch.setattr(GroupScoring, "results", dropping)
        patch.setattr(reward_feedback, "to_uint8_rgb", spoiling)
        return backpropagate_rewards(model, link, prompts, algorithm, (0, "ranks"), 0.5, ranks)


def steps(model: Any, endpoint: str, disturbances: list[Disturbance], ranks: Ranks) -> dict[str, Any]:
    """What each disturbed step comes to over all ranks: gradients, loss, KL, rewards, dropped prompts, fault."""
    link = RewardLink(RewardConfig(endpoint=endpoint, min_face_pixels=16, gradient_encoding="float32"))
    link.connect()
    outcomes = {}
    for disturbance in disturbances:
        update = disturbed_step(model, link, disturbance, ranks)
        parameters = model.lora_parameters()
        for parameter, gradient in zip(parameters, update.gradients, strict=bool(update.gradients)):
            parameter.grad = gradient
        if update.gradients:
            ranks.sum_gradients(parameters)
        outcomes[disturbance.name] = {
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "sums": ranks.total([update.loss, update.kl]),
            "rewards": [[reward.value for reward in group] for group in update.rewards],
            "dropped": update.dropped,
            "fault": update.fault,
        }
        for parameter in parameters:
            parameter.grad = None
    link.close()
    return outcomes


def _process(rank: int, folder: str, endpoint: str) -> None:
    from likeness_trainer.wan.sharding import shard_experts

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, whole = loaded_model(), Ranks(rank=rank, world_size=2)
    found = {"whole": steps(model, endpoint, [UNDISTURBED, DROPPED], whole)}
    sharded = Ranks(rank=rank, world_size=2, sharded=True)
    shard_experts(model, sharded.mesh(), "cpu")
    found["sharded"] = steps(model, endpoint, [NOT_FINITE, DROPPED, WITHOUT_KL, UNDISTURBED], sharded)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def endpoint() -> Any:
    """A reward server with the toy's pack, in a thread of this process."""
    toyworld = pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    from server_thread import ServerThread

    from likeness_reward.embedded import EmbeddedScorer
    from likeness_reward.settings import ServerSettings

    server = ServerThread(EmbeddedScorer(toyworld.face_pack_path()), ServerSettings(pack=".", port=0))
    yield server.endpoint
    server.stop()


@pytest.fixture(scope="module")
def two_ranks(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(_process, (str(folder), endpoint), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone(endpoint: str) -> dict[str, Any]:
    """What one process finds."""
    return steps(loaded_model(), endpoint, [UNDISTURBED, DROPPED, WITHOUT_KL, NOT_FINITE], Ranks())


@pytest.mark.parametrize(
    ("weights", "disturbance"),
    [("whole", UNDISTURBED), ("whole", DROPPED), ("sharded", UNDISTURBED), ("sharded", DROPPED),
     ("sharded", WITHOUT_KL)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # fmt: skip
def test_two_ranks_come_to_the_gradient_of_one(
    two_ranks: list[dict[str, Any]], alone: dict[str, Any], weights: str, disturbance: Disturbance
) -> None:
    expected = alone[disturbance.name]
    scale = max(float(gradient.abs().max()) for gradient in expected["gradients"])
    assert scale > 0
    for outcome in (rank[weights][disturbance.name] for rank in two_ranks):
        assert outcome["dropped"] == expected["dropped"] == (disturbance.dropped is not None)
        assert outcome["rewards"] == [pytest.approx(rewards, abs=1e-6) for rewards in expected["rewards"]]
        assert outcome["sums"] == pytest.approx(expected["sums"], rel=1e-5, abs=1e-7)
        for found, reference in zip(outcome["gradients"], expected["gradients"], strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-3, atol=1e-5 * scale)


def test_what_is_not_finite_on_one_rank_stops_both_alike(
    two_ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for outcome in (rank["sharded"][NOT_FINITE.name] for rank in two_ranks):
        assert outcome["fault"] == alone[NOT_FINITE.name]["fault"]
        assert outcome["fault"].startswith("row 1: ")
        assert all(gradient is None for gradient in outcome["gradients"])
