"""The whole thing in minutes on two CPU cores: data, reward server, training, a verdict on people never trained on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from likeness_trainer.config import TrainConfig, load_config
from likeness_trainer.errors import ConfigError, RewardUnavailableError
from likeness_trainer.preflight import check_run
from likeness_trainer.run.folder import RunFolder
from likeness_trainer.run.progress import RunProgress

TRAINING_CLIPS = 48
HELD_OUT_CLIPS = 32
SERVER_START_S = 60.0


def run_demo(recipe: Path, run_dir: Path, seed: int, packs: list[str], overrides: list[str], resume: bool) -> RunFolder:
    """Trains the toy recipe end to end and returns the run's folder.

    Raises:
        ConfigError: the toy world or the reward server is not installed, or the recipe cannot be read.
        TrainerError: as `train`.
    """
    try:
        from likeness_toyworld import face_pack_path
        from likeness_toyworld.dataset import write_dataset
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs the package {error.name}; `make setup` installs everything") from error
    progress = RunProgress()
    run_dir = run_dir if resume else _free_folder(run_dir)
    data = run_dir / "data"
    if not resume:
        progress.say(f"painting {TRAINING_CLIPS} people to train on and {HELD_OUT_CLIPS} held-out people in {data}")
        write_dataset(data / "train", TRAINING_CLIPS, seed)
        write_dataset(data / "held_out", HELD_OUT_CLIPS, seed, held_out=True)
    with reward_server(Path(face_pack_path()), run_dir) as endpoint:
        config = load_config(recipe, [*_settings(run_dir, data, seed, packs, endpoint), *overrides])
        return _train(config, resume, progress)


def _train(config: TrainConfig, resume: bool, progress: RunProgress) -> RunFolder:
    ready = check_run(config, resume)
    from likeness_trainer.train import train  # imports DiffSynth, which takes seconds

    return train(config, ready, resume, progress)


def _settings(run_dir: Path, data: Path, seed: int, packs: list[str], endpoint: str) -> list[str]:
    return [
        f"run_dir={run_dir}",
        f"seed={seed}",
        f"reward.endpoint={endpoint}",
        f"data.metadata={data / 'train' / 'metadata.csv'}",
        f"evaluation.metadata={data / 'held_out' / 'metadata.csv'}",
        f"evaluation.packs={[str(Path(pack).resolve()) for pack in packs]}",
    ]


@contextmanager
def reward_server(pack: Path, folder: Path) -> Iterator[str]:
    """Runs `likeness-reward serve` on a free port of the loopback interface and gives its HOST:PORT.

    Raises:
        RewardUnavailableError: it did not come up; shows the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "reward_server.address", folder / "reward_server.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "likeness_reward", "serve", "--pack", str(pack), "--host", "127.0.0.1"]
    command += ["--port", "0", "--ready-file", str(ready)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield _wait_until_ready(process, ready, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        ready.unlink(missing_ok=True)


def _wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + SERVER_START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RewardUnavailableError(f"the reward server did not start; its log {log} ends with:\n{tail}")
        time.sleep(0.1)
    return ready.read_text(encoding="utf-8").strip()


def _free_folder(wanted: Path) -> Path:
    """Returns the folder, or the same name with the first free number when it already holds a run."""
    folder, number = wanted, 2
    while folder.exists() and any(folder.iterdir()):
        folder, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return folder


def verdict(folder: RunFolder) -> str:
    """Returns the result of a run in three lines."""
    summary = folder.read_summary()
    held_out: dict[str, Any] = summary["held_out"]
    low, high = held_out["ci95"]
    lines = [
        f"identity similarity on {held_out['pairs']} held-out people and noises: "
        f"{held_out['before']:.3f} before, {held_out['after']:.3f} after, "
        f"{held_out['difference']:+.3f} (95 % interval {low:+.3f} to {high:+.3f}; pack {held_out['pack']})"
    ]
    for other in summary.get("held_out_other_packs", []):
        low, high = other["ci95"]
        lines[0] += (
            f"; under {other['pack']}: {other['before']:.3f} to {other['after']:.3f}, "
            f"{other['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
        )
    lines.append(f"LoRA for ComfyUI, diffusers and DiffSynth: {folder.lora}")
    lines.append(f"curves and the same held-out video before and after: {folder.path / 'report.html'}")
    return "\n".join(lines)
