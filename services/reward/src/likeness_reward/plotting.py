"""Similarity over time as a picture. Needs the [visual] extra."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from likeness_reward.domain import VideoReward

MOST_NAMED_VIDEOS = 10


def plot_similarities(rewards: Sequence[tuple[Path, VideoReward]], output: Path) -> None:
    """Writes the similarity of every frame of every video; frames without a face are crosses at the bottom.

    The first MOST_NAMED_VIDEOS videos have a colour and their name, the others are grey. The format is that of the
    file's suffix.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    floor = min([0.0, *(value for _, reward in rewards for value in reward.similarities if value is not None)]) - 0.04
    for position, (video, reward) in enumerate(rewards):
        _draw(axes, video, reward, floor, named=position < MOST_NAMED_VIDEOS)
    axes.set(xlabel="frame", ylabel="cosine to the identity", ylim=(floor - 0.04, 1.04))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    partial = output.with_name(f".{output.stem}.partial{output.suffix}")
    figure.savefig(partial, dpi=150)
    partial.replace(output)


def _draw(axes: Axes, video: Path, reward: VideoReward, floor: float, *, named: bool) -> None:
    values = [float("nan") if value is None else value for value in reward.similarities]
    hidden = [index for index, value in enumerate(reward.similarities) if value is None]
    (line,) = axes.plot(range(len(values)), values, marker=".")
    if named:
        line.set_label(f"{video.name}: {reward.value:.4f}")
    else:
        line.set(color="0.75", linewidth=0.8, zorder=1)
    if hidden:
        axes.plot(hidden, [floor] * len(hidden), "x", color=line.get_color())
