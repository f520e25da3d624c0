"""What two processes agree on: sums of gradients, errors, checksums, shares."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from likeness_trainer.errors import ConfigError, RanksDivergedError, RewardUnavailableError
from likeness_trainer.ranks import ParallelConfig, Ranks, open_ranks


def _process(rank: int, store: str, results: str, task: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.save(task(Ranks(rank=rank, world_size=2)), f"{results}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def on_two_ranks(folder: Path, task: Any) -> list[Any]:
    """What a function returns on each of two processes."""
    multiprocessing.spawn(_process, (str(folder / "store"), str(folder), task), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _gradients(ranks: Ranks) -> list[Any]:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    parameters[0].grad = torch.full((2, 3), 1.0 + ranks.rank)  # on both: 1 + 2
    if ranks.rank == 1:
        parameters[1].grad = torch.full((2, 3), 5.0)  # on one: 0 + 5; the third on none
    ranks.sum_gradients(parameters)
    return [parameter.grad for parameter in parameters]


def _agreements(ranks: Ranks) -> dict[str, Any]:
    def told(action: Any) -> str:
        try:
            action()
        except (RewardUnavailableError, RanksDivergedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def fail_on_one() -> None:
        with ranks.together():
            if ranks.rank == 1:
                raise RewardUnavailableError("the server is away")

    return {
        "error": told(fail_on_one),
        "equal": told(lambda: ranks.require_equal("abc", "the adapters")),
        "different": told(lambda: ranks.require_equal(f"sum-{ranks.rank}", "the adapters")),
        "first": ranks.from_first(lambda: f"made by {ranks.rank}"),
        "total": ranks.total([1.0, 10.0 * ranks.rank]),
    }


def test_gradients_are_summed_and_those_that_no_rank_has_stay_none(tmp_path: Path) -> None:
    for first, second, third in on_two_ranks(tmp_path, _gradients):
        assert first.tolist() == [[3.0] * 3] * 2
        assert second.tolist() == [[5.0] * 3] * 2
        assert third is None


def test_ranks_agree_on_errors_values_and_checksums(tmp_path: Path) -> None:
    for told in on_two_ranks(tmp_path, _agreements):
        assert told["error"] == "RewardUnavailableError: the server is away"
        assert told["equal"] == "nothing"
        assert "the adapters differ" in told["different"]
        assert "rank 0 has sum-0, rank 1 has sum-1" in told["different"]
        assert told["first"] == "made by 0"
        assert told["total"] == [2.0, 10.0]


@pytest.mark.parametrize(
    ("count", "shares"), [(4, [[0, 2], [1, 3]]), (3, [[0, 2], [1, 2]]), (1, [[0], [0]]), (0, [[], []])]
)
def test_shares_are_of_equal_length_and_cover_every_index(count: int, shares: list[list[int]]) -> None:
    assert [Ranks(rank=rank, world_size=2).even_share(count) for rank in range(2)] == shares


def test_sharding_needs_processes_to_spread_the_weights_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "WORLD_SIZE" not in os.environ
    with (
        pytest.raises(ConfigError, match="torchrun --nproc-per-node"),
        open_ranks(ParallelConfig(sharding="fsdp2"), "cpu"),
    ):
        pass
