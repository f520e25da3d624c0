"""The command line of the trainer."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from likeness_trainer.errors import ConfigError, TrainerError
from likeness_trainer.launch.options import add_commands as add_cluster_commands

MOST_CHANGED = {
    "what and where": (
        ("run_dir", "folder that the run writes"),
        ("data.metadata", "metadata.csv, .json or .jsonl with the columns video, prompt, reference_image"),
        ("evaluation.metadata", "people that are not trained on"),
        ("model.model_paths.dit", "weights; also dit2, vae, text_encoder"),
        ("model.base_loras", "LoRA files that are part of the base, as [{path: FILE, expert: dit, strength: 1}]"),
        ("reward.endpoint", "HOST:PORT of the reward server"),
    ),
    "how long and how strong": (
        ("steps", "optimizer steps"),
        ("optimizer.learning_rate", "constant after the warm-up"),
        ("algorithm.kl_weight", "hold to the base model; 0 is faster and lets the policy drift"),
        ("algorithm.group_size", "samples of one prompt that are compared"),
        ("algorithm.groups_per_step", "prompts in one update"),
        ("model.lora_rank", "size of the adapters"),
    ),
    "memory and speed": (
        ("algorithm.branch_batch", "samples in one DiT evaluation"),
        ("model.use_gradient_checkpointing", "recompute instead of keeping activations"),
        ("memory.swap_idle_expert", "one of two experts on the device at a time (docs/scale.md)"),
        ("model.torch_dtype", "precision of the frozen weights"),
        ("data.num_frames", "4n + 1"),
    ),
    "algorithm (docs/algorithms.md)": (
        ("sampler.stochastic_step", "cps or flow_sde"),
        ("sampler.guidance_scale", "classifier-free guidance; 1 is none, for two experts {dit: 3.5, dit2: 3.5}"),
        ("sampler.negative_prompt", "what guidance leads away from"),
        ("algorithm.window", "all or one"),
        ("algorithm.credit", "latent_frame or video"),
        ("algorithm.ratio", "standard or guard"),
        ("algorithm.reward_weights", "components of the reward, for example {identity: 1, motion: 0.5}"),
    ),
}
"""Settings listed by `train --help`, the most changed first."""

EXAMPLES = """examples:
  likeness-trainer demo                                  train the toy world end to end, in minutes
  likeness-trainer data check videos/metadata.csv        name every row that cannot be used
  likeness-trainer plan recipes/wan2.2-i2v-a14b.yaml --gpus 8 --gpu-memory 80GiB --set algorithm.groups_per_step=8
  likeness-trainer train recipes/wan2.2-i2v-a14b.yaml --set data.metadata=videos/metadata.csv
  likeness-trainer train recipes/wan2.2-i2v-a14b.yaml --resume
  likeness-trainer report runs/likeness
  likeness-trainer submit recipes/wan2.2-i2v-a14b.yaml --nodes 2 --gpus-per-node 8 --image IMAGE --dry-run
"""


class _Parser(argparse.ArgumentParser):
    """A parser that tells how a setting is given when one was given as an option."""

    def error(self, message: str) -> NoReturn:
        start = "unrecognized arguments: --"
        if message.startswith(start):
            name, _, rest = message.removeprefix(start).replace("=", " ").partition(" ")
            message += _as_setting(name.replace("-", "_"), rest.split(" ")[0])
        super().error(message)


def _as_setting(name: str, value: str) -> str:
    from likeness_trainer.config import setting_keys

    keys = sorted((key for key in setting_keys() if name in (key, key.rpartition(".")[2])), key=len)
    return f"; settings of the recipe are given as --set {keys[0]}={value or 'VALUE'}" if keys else ""


def main() -> None:
    """Runs a command; errors that the user can mend are told without a traceback, each with its exit code."""
    arguments = build_parser().parse_args()
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.WARNING, format="%(levelname)s: %(message)s"
    )
    run: Callable[[argparse.Namespace], None] = arguments.run
    from likeness_trainer.data.errors import DatasetError

    try:
        run(arguments)
    except TrainerError as error:
        sys.exit(_told(error, error.exit_code))
    except DatasetError as error:
        sys.exit(_told(error, 2))
    except KeyboardInterrupt:
        sys.exit(130)


def _told(error: Exception, code: int) -> int:
    rank = os.environ.get("RANK", "0")  # set by torchrun
    print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every command has a help text of its own."""
    parser = _Parser(
        prog="likeness-trainer",
        description="Fine-tunes Wan video models with reinforcement learning so that a person keeps their face.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--verbose", action="store_true", help="log what libraries say while they load")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    _add_plan(commands)
    _add_train(commands)
    _add_demo(commands)
    _add_sample(commands)
    _add_evaluate(commands)
    _add_export(commands)
    _add_report(commands)
    _add_data(commands)
    add_cluster_commands(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("train", help="train a LoRA from a recipe", description=textwrap.fill(
        "Trains a LoRA from a recipe. Settings: the recipe, then variables LIKENESS_TRAINER_A__B, then "
        "--set. Needs a reward server at reward.endpoint (`likeness-reward serve`). Ctrl-C stops after a step, "
        "with a checkpoint. Exit codes: 2 a setting, file or row is wrong; 75 the reward server stayed away.", width=100
    ), epilog=_most_changed(), formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see recipes/")
    _add_set(command)
    command.add_argument(
        "--resume", action="store_true", help="go on with the run in run_dir, from its newest checkpoint"
    )
    command.add_argument(
        "--accept-other-reward",
        action="store_true",
        help="resume although the reward server has other models than those that gave the rewards so far",
    )
    command.set_defaults(run=_train)


def _most_changed() -> str:
    lines = ["settings that are changed most, each with --set KEY=VALUE:"]
    for group, settings in MOST_CHANGED.items():
        lines += ["", f"  {group}", *(f"    {key:<34}{text}" for key, text in settings)]
    return "\n".join([*lines, "", "Every setting of a run, with its value, stands in RUN/config.yaml."])


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("plan", help="what a recipe needs of GPUs", description=(
        "Tells what a recipe needs before there are weights, data or a GPU: parameters, bytes of each GPU by part and "
        "phase, DiT evaluations and FLOPs of a step, whether it fits, and which switch would make it fit. Runs the "
        "trainer's own code on the meta device, in seconds to a minute on one CPU core; see docs/plan.md."
    ))  # fmt: skip
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, see recipes/")
    command.add_argument("--gpus", type=int, default=1, metavar="N", help="processes, one a GPU (default: %(default)s)")
    command.add_argument("--gpu-memory", default="80GiB", metavar="SIZE", help="of each GPU (default: %(default)s)")
    command.add_argument(
        "--reserve",
        default="4GiB",
        metavar="SIZE",
        help="of each GPU, kept free for the CUDA context, workspaces of kernels and fragmentation, which cannot be "
        "computed (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    _add_set(command)
    command.set_defaults(run=_plan)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("demo", help="train the toy world end to end", description=(
        "Paints people, starts a reward server on loopback, trains a LoRA of the toy model, compares held-out people "
        "before and after. Takes minutes on two CPU cores and downloads nothing."
    ))  # fmt: skip
    command.add_argument("--recipe", type=Path, default=Path("recipes/toy.yaml"), help="default: %(default)s")
    command.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s, numbered when taken"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of people, adapters and noise (default: 0)")
    command.add_argument(
        "--evaluation-pack",
        action="append",
        default=[],
        metavar="DIR",
        help="also score held-out videos under this face pack",
    )
    _add_set(command)
    command.add_argument("--resume", action="store_true", help="go on with the demo in --run-dir")
    command.set_defaults(run=_demo)


def _add_sample(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("sample", help="make one video with a run's LoRA", description=(
        "Samples one video with the newest LoRA of a run, without stochastic steps, and writes it as mp4."
    ))  # fmt: skip
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument("--prompt", required=True)
    command.add_argument("--image", type=Path, help="first frame; needed by image-to-video models")
    command.add_argument("--output", type=Path, required=True, metavar="FILE.mp4")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--without-lora", action="store_true", help="the untouched model, for comparison")
    command.set_defaults(run=_sample)


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("evaluate", help="compare held-out people before and after", description=(
        "Samples the held-out pairs of a run with and without its newest LoRA, with the same noise, scores them "
        "through the reward server, prints every part of the reward with its 95 % interval and every pair, and "
        "rewrites evaluation.json, summary.json and report.html."
    ))  # fmt: skip
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument(
        "--evaluation-pack", action="append", default=[], metavar="DIR", help="also score under this pack"
    )
    command.add_argument("--json", action="store_true", help="print evaluation.json instead of tables")
    _add_set(command)
    command.set_defaults(run=_evaluate)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("export-lora", help="write a run's LoRA for other tools", description=(
        "Writes, for each trained expert, LABEL.safetensors (ComfyUI, diffusers, DiffSynth) and peft/LABEL/ (PEFT), "
        "and README.md, a model card. Needs the checkpoint only, not the model."
    ))  # fmt: skip
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the newest of the run")
    command.add_argument("--output", type=Path, metavar="DIR", help="default: RUN/lora")
    command.set_defaults(run=_export)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("report", help="write report.html of a run", description=(
        "Writes RUN/report.html: curves, and the same held-out video before and after. Works while the run goes on."
    ))  # fmt: skip
    command.add_argument("run_dir", type=Path, metavar="RUN")
    command.set_defaults(run=_report)


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = commands.add_parser("data", help="look at a data set")
    check = data.add_subparsers(required=True, metavar="COMMAND").add_parser("check", help="name every unusable row",
        description="Decodes every row of a metadata.csv, .json or .jsonl and names all that cannot be used. "
        "Exit code 1 when there are any."
    )  # fmt: skip
    check.add_argument("metadata", type=Path, metavar="METADATA")
    check.add_argument("--num-frames", type=int, default=81, help="4n + 1 (default: 81)")
    check.add_argument("--height", type=int)
    check.add_argument("--width", type=int)
    check.add_argument("--max-pixels", type=int, default=480 * 480)
    check.add_argument("--fps", type=int, default=16)
    check.set_defaults(run=_check)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="override a setting; may be repeated",
    )


def _plan(arguments: argparse.Namespace) -> None:
    from likeness_trainer.planning.command import plan_recipe

    plan_recipe(
        arguments.recipe,
        arguments.overrides,
        arguments.gpus,
        arguments.gpu_memory,
        arguments.reserve,
        arguments.json,
    )


def _train(arguments: argparse.Namespace) -> None:
    from likeness_trainer.config import load_config
    from likeness_trainer.preflight import check_run, resumes
    from likeness_trainer.ranks import open_ranks
    from likeness_trainer.run.progress import RunProgress

    config = load_config(arguments.recipe, arguments.overrides)
    with open_ranks(config.parallel, config.model.device) as ranks:
        resume = resumes(config, arguments.resume, ranks)
        ready = check_run(config, resume, arguments.accept_other_reward, ranks)
        from likeness_trainer.train import train

        folder = train(config, ready, resume, RunProgress(quiet=not ranks.is_first))
    if ranks.is_first:
        print(folder.path)


def _demo(arguments: argparse.Namespace) -> None:
    from likeness_trainer.demo import run_demo, verdict

    folder = run_demo(
        arguments.recipe,
        arguments.run_dir,
        arguments.seed,
        arguments.evaluation_pack,
        arguments.overrides,
        arguments.resume,
    )
    print(verdict(folder))


def _sample(arguments: argparse.Namespace) -> None:
    from likeness_trainer.config import load_config
    from likeness_trainer.run.folder import RunFolder

    folder = RunFolder.existing(arguments.run_dir)
    config = load_config(folder.config_file, environment={})
    from likeness_trainer.run.sampling import sample_to_file

    sample_to_file(
        folder, config, arguments.prompt, arguments.image, arguments.seed, arguments.without_lora, arguments.output
    )
    print(arguments.output)


def _evaluate(arguments: argparse.Namespace) -> None:
    from likeness_trainer.config import load_config
    from likeness_trainer.run.folder import RunFolder
    from likeness_trainer.run.progress import RunProgress

    folder = RunFolder.existing(arguments.run_dir)
    packs = [f"evaluation.packs={[str(Path(pack).resolve()) for pack in arguments.evaluation_pack]}"]
    overrides = [*(packs if arguments.evaluation_pack else []), *arguments.overrides]
    config = load_config(folder.config_file, overrides, environment={})
    if config.evaluation.metadata is None:
        raise ConfigError("evaluation.metadata is not set; give held-out people with --set evaluation.metadata=FILE")
    from rich.console import Console

    from likeness_trainer.demo import verdict
    from likeness_trainer.evaluate import evaluate_run
    from likeness_trainer.run.evaluation_table import print_evaluation

    evaluate_run(folder, config, RunProgress())
    text = folder.evaluation_file.read_text(encoding="utf-8")
    if arguments.json:
        print(text, end="")
        return
    print_evaluation(json.loads(text), Console())
    print(verdict(folder))


def _export(arguments: argparse.Namespace) -> None:
    from likeness_trainer.config import load_config
    from likeness_trainer.run.export import export_run_lora
    from likeness_trainer.run.folder import RunFolder

    folder = RunFolder.existing(arguments.run_dir)
    config = load_config(folder.config_file, environment={})
    for path in export_run_lora(folder, config, arguments.checkpoint, arguments.output):
        print(path)


def _report(arguments: argparse.Namespace) -> None:
    from likeness_trainer.run.folder import RunFolder
    from likeness_trainer.run.report import write_report

    print(write_report(RunFolder.existing(arguments.run_dir).path))


def _check(arguments: argparse.Namespace) -> None:
    from pydantic import ValidationError

    from likeness_trainer.data.dataset import DataConfig, check

    names = ("metadata", "num_frames", "height", "width", "max_pixels", "fps")
    try:
        config = DataConfig(**{name: getattr(arguments, name) for name in names})
    except ValidationError as error:
        raise ConfigError("; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())) from error
    problems = check(config)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print(f"{arguments.metadata}: every row can be used")


if __name__ == "__main__":
    main()
