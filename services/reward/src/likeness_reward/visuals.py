"""The pictures that the score command writes beside its numbers: a plot of all videos, an annotated copy of each."""

from collections.abc import Sequence
from pathlib import Path

import typer

from likeness_reward.domain import VideoReward
from likeness_reward.extras import require_visual_extra
from likeness_reward.videos import frame_rate, read_video

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class Visuals:
    """Writes what --plot and --annotate ask for."""

    def __init__(self, videos: Sequence[Path], plot: Path | None, annotate: Path | None) -> None:
        """Checks both paths before any video is scored. Raises typer.BadParameter or MissingExtra."""
        if plot is not None or annotate is not None:
            require_visual_extra("--plot" if plot is not None else "--annotate")
        self._plot = plot
        self._copies = annotated_paths(videos, annotate) if annotate is not None else {}
        self._rewards: list[tuple[Path, VideoReward]] = []
        if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
            raise typer.BadParameter(f"--plot {plot}: the file must end in {', '.join(PLOT_SUFFIXES)}")
        for output in [plot, *self._copies.values()]:
            if output is not None and output.is_dir():
                raise typer.BadParameter(f"{output} is a folder, not a file to write")
            if output is not None and not output.parent.is_dir():
                raise typer.BadParameter(f"{output}: there is no folder {output.parent}")

    def add(self, video: Path, reward: VideoReward) -> None:
        """Takes the reward of a video, and writes its annotated copy."""
        if self._plot is not None:
            self._rewards.append((video, reward))
        if video in self._copies:
            from likeness_reward.annotation import write_annotated

            write_annotated(read_video(video), reward, frame_rate(video), self._copies[video])

    def finish(self) -> None:
        """Writes the plot of the videos so far."""
        if self._plot is not None and self._rewards:
            from likeness_reward.plotting import plot_similarities

            plot_similarities(self._rewards, self._plot)


def annotated_paths(videos: Sequence[Path], annotate: Path) -> dict[Path, Path]:
    """Returns where the annotated copy of each video goes; a missing folder for several is made.

    Raises typer.BadParameter when two videos would have the same copy, or a copy would replace its video.
    """
    if len(videos) == 1:
        if annotate.suffix.lower() != ".mp4":
            raise typer.BadParameter(f"--annotate {annotate}: the file must end in .mp4")
        copies = {videos[0]: annotate}
    else:
        if annotate.suffix or annotate.is_file():
            raise typer.BadParameter(f"--annotate {annotate}: with {len(videos)} videos, give a folder")
        copies = {video: annotate / f"{video.stem}.mp4" for video in videos}
        if len(set(copies.values())) < len(copies):
            raise typer.BadParameter(f"--annotate {annotate}: two of the videos have the same name")
        annotate.mkdir(exist_ok=True)
    for video, copy in copies.items():
        if copy.exists() and copy.samefile(video):
            raise typer.BadParameter(f"--annotate {annotate} would replace {video}")
    return copies
