"""The plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

from likeness_trainer.planning.plan import GPU_COUNTS, Plan
from likeness_trainer.planning.sizes import flops, gib

PART_NAMES = {
    "gathered": "gathered blocks",
    "optimizer": "moments of AdamW",
    "latents": "latents of the groups",
    "activations": "activations and graphs",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what a recipe needs, the verdict last."""
    for part in (_title(plan), _parameters(plan), _memory(plan), *_machine(plan), _work(plan), *_savings(plan)):
        console.print(part)
    for line in verdict(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _title(plan: Plan) -> RenderableType:
    video, gpus = plan.video, plan.gpus
    algorithm, sharding = plan.config.algorithm, plan.config.parallel.sharding
    spread = f", sharding {sharding}" if gpus.count > 1 else ""
    return (
        f"{plan.config.model.architecture} on {gpus.count} GPU{'s' if gpus.count > 1 else ''} of "
        f"{gib(gpus.memory_bytes)} GiB{spread}\n"
        f"videos: {video.num_frames} frames of {video.height} x {video.width}, {video.tokens} tokens in the DiT\n"
        f"a step: {algorithm.groups_per_step} groups of {algorithm.group_size} samples, {algorithm.name}\n"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _parameters(plan: Plan) -> RenderableType:
    table = _table("Parameters", "part", "parameters", "GiB")
    for role, count in plan.model.parameters.items():
        table.add_row(role, f"{count:,}", gib(plan.model.weights[role]))
    table.add_row("LoRA, float32", f"{plan.model.adapter_parameters:,}", gib(plan.model.adapters))
    return table


def _memory(plan: Plan) -> RenderableType:
    memory = plan.memory
    table = _table("Memory of each GPU by phase, GiB", "part", *memory.parts)
    for name in dict.fromkeys(name for parts in memory.parts.values() for name in parts):
        sizes = [parts.get(name, 0) for parts in memory.parts.values()]
        table.add_row(PART_NAMES.get(name, name), *(gib(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("all", *map(gib, memory.totals.values()), style="bold")
    return table


def _machine(plan: Plan) -> Iterator[RenderableType]:
    memory = plan.memory
    rows = [
        ("frames in flight, at most", memory.frames_in_flight),
        ("checkpoints of activations", memory.checkpoints_on_host),
        ("weights", memory.weights_on_host),
    ]
    table = _table("Memory of the machine for each GPU, GiB", "part", "")
    for name, size in rows:
        if size:
            table.add_row(name, gib(size))
    yield table


def _work(plan: Plan) -> RenderableType:
    table = _table("One training step, all GPUs together", "phase", "DiT evaluations", "FLOPs", "share")
    total = sum(work.flops for work in plan.work.values())
    for name, work in plan.work.items():
        table.add_row(name, f"{work.evaluations:g}", flops(work.flops), f"{work.flops / total:.0%}")
    table.add_section()
    evaluations = sum(work.evaluations for work in plan.work.values())
    table.add_row("all", f"{evaluations:g}", flops(total), "", style="bold")
    table.add_row("each GPU", f"{evaluations / plan.gpus.count:g}", flops(total / plan.gpus.count), "")
    return table


def _savings(plan: Plan) -> Iterator[RenderableType]:
    saved = plan.savings
    if saved is None:
        return
    table = _table("Saved", "what", "without", "here", "ratio")
    for name, without, here in (
        (
            "shared prefix: evaluations of a group's rollout",
            saved.independent_evaluations,
            saved.rollout_evaluations,
        ),
        ("window: evaluations with gradient of a sample", saved.whole_chain_evaluations, saved.trained_evaluations),
    ):
        table.add_row(name, f"{without:g}", f"{here:g}", f"{here / without:.2f}")
    without, here = saved.window_graph_bytes, saved.graph_bytes
    table.add_row("backward step by step: graph, GiB", gib(without), gib(here), f"{here / without:.2f}")
    yield table


def verdict(plan: Plan) -> Iterator[str]:
    """Yields whether a recipe fits, and what would make it fit."""
    gpus, peak = plan.gpus, plan.memory.peak
    kept = f"{gib(gpus.memory_bytes)} GiB less {gib(gpus.reserve_bytes)} GiB in reserve"
    yield f"{'fits' if plan.fits else 'does not fit'}: {plan.memory.peak_phase} needs {gib(peak)} GiB of {kept}"
    for remedy in plan.remedies:
        settings = " ".join(f"--set {setting}" for setting in remedy.settings)
        yield f"  {'fits' if remedy.fits else 'not enough'}, {gib(remedy.peak_bytes)} GiB: {settings} ({remedy.costs})"
    if not plan.fits:
        yield f"  {_enough(plan.fewest_gpus)} with --set parallel.sharding=fsdp2 and nothing else changed"


def _enough(gpus: int | None) -> str:
    return f"not even {GPU_COUNTS[-1]} GPUs are enough" if gpus is None else f"{gpus} GPUs are enough"
