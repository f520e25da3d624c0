"""Rows of the data set, made ready once: prompt and first frame encoded, the person embedded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from likeness_reward.domain import IdentityTemplate
from likeness_trainer.data.dataset import Dataset
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
    num_frames: int
    height: int
    width: int


def prepare_prompts(
    model: WanModule, link: RewardLink, dataset: Dataset, limit: int | None, advance: Callable[[], None]
) -> list[PreparedPrompt]:
    """Returns the rows of a data set, encoded and kept on the CPU.

    Args:
        limit: rows to prepare; None for all.
        advance: called after each row, for a progress bar.

    Raises:
        RewardRejectedError: the reward server finds no face in the frames of a row; names the row.
    """
    prepared = []
    for index in range(min(len(dataset), limit or len(dataset))):
        example = dataset[index]
        conditioning = model.encode(
            example.prompt, example.first_frame, example.num_frames, example.height, example.width
        ).to("cpu")
        identity = link.embed_identity(list(example.reference_frames), what=f"row {example.row} of the data set")
        prepared.append(
            PreparedPrompt(
                example.row, example.prompt, conditioning, identity, example.num_frames, example.height, example.width
            )
        )
        advance()
    return prepared
