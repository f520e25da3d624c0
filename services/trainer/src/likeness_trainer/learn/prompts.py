"""Rows of the data set, made ready once: prompt and first frame encoded, the person embedded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from likeness_reward.domain import IdentityTemplate, VideoMotion
from likeness_trainer.data.dataset import Dataset, VideoExample
from likeness_trainer.ranks import Ranks
from likeness_trainer.reward_link import RewardLink
from likeness_trainer.wan.module import Conditioning, WanModule


@dataclass(frozen=True)
class PreparedPrompt:
    """Everything a group needs."""

    row: int
    """Row number in the metadata file."""
    prompt: str
    conditioning: Conditioning
    """On the CPU."""
    identity: IdentityTemplate
    reference_motion: VideoMotion | None
    """Of the clip of the row; None where the run does not measure motion."""
    num_frames: int
    height: int
    width: int


def prepare_prompts(
    model: WanModule, link: RewardLink, dataset: Dataset, limit: int | None, advance: Callable[[], None], ranks: Ranks
) -> list[PreparedPrompt]:
    """Returns rows of a data set, encoded and kept on the CPU; each rank encodes its share, and all get the whole.

    Args:
        limit: rows to prepare, the first ones; None for all.
        advance: called after each row of this rank, for a progress bar.

    Raises:
        RewardRejectedError: the reward server finds no face in the frames of a row; names the row.
    """
    prepared: dict[int, PreparedPrompt] = {}
    with ranks.together():
        for index in ranks.even_share(len(dataset) if limit is None else min(len(dataset), limit)):
            prepared[index] = _prepare(model, link, dataset[index])
            advance()
    everyone = {index: prompt for part in ranks.gather(prepared) for index, prompt in part.items()}
    return [everyone[index] for index in sorted(everyone)]


def _prepare(model: WanModule, link: RewardLink, example: VideoExample) -> PreparedPrompt:
    size = (example.num_frames, example.height, example.width)
    conditioning = model.encode(example.prompt, example.first_frame, *size).to("cpu")
    what = f"row {example.row} of the data set"
    identity = link.embed_identity(list(example.reference_frames), what)
    motion = link.measure_motion(example.reference_frames, identity, what)
    return PreparedPrompt(example.row, example.prompt, conditioning, identity, motion, *size)
