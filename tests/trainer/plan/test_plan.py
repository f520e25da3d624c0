"""What a plan says: of the published models without their files, in JSON, and what would make a recipe fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_support import RECIPES, toy_recipe

from likeness_trainer.cli import main
from likeness_trainer.config import load_config
from likeness_trainer.errors import ConfigError
from likeness_trainer.planning.measure import measure
from likeness_trainer.planning.meta_model import largest_size, meta_conditioning, meta_module
from likeness_trainer.planning.plan import Gpus, Plan, make_plan
from likeness_trainer.planning.sizes import flops, gib, parse_size
from likeness_trainer.planning.switches import harmless_switches, lossy_switches, with_settings
from likeness_trainer.planning.work import savings, step_work

MIB = 2**20


def toy_plan(memory: int, *overrides: str, count: int = 1) -> Plan:
    return make_plan(toy_recipe(*overrides), Gpus(count, memory, 0), lambda what: None)


def costs_of(*overrides: str) -> tuple[Any, Any, Any]:
    config = toy_recipe(*overrides)
    model = meta_module(config)
    return config, model, measure(model, config, (9, 64, 64), lambda what: None)


def test_a_group_of_8_shares_its_prefix_and_trains_its_window() -> None:
    config, model, costs = costs_of("algorithm.groups_per_step=3")
    work = step_work(config, model, costs)
    assert {name: phase.evaluations for name, phase in work.items()} == {
        "shared prefix": 3 * 4, "branches": 3 * 8 * 4, "decoding": 0, "update": 3 * 8 * 4 * 2,
    }  # fmt: skip
    saved = savings(config, model, costs)
    assert saved is not None
    assert (saved.rollout_evaluations, saved.independent_evaluations) == (4 + 8 * 4, 8 * 8)
    assert (saved.trained_evaluations, saved.whole_chain_evaluations) == (4, 8)
    assert saved.window_graph_bytes == 4 * saved.graph_bytes > 0


def test_one_random_step_is_planned_by_its_mean() -> None:
    """Steps 4, 5, 6 are equally likely: on average 5 of prefix, 3 of a branch, 1 of update and its reference."""
    config, model, costs = costs_of("algorithm.groups_per_step=1", "algorithm.window=one")
    work = step_work(config, model, costs)
    evaluations = {name: phase.evaluations for name, phase in work.items()}
    assert evaluations == {"shared prefix": 5, "branches": 24, "decoding": 0, "update": 16}


def test_guidance_doubles_the_evaluations_and_their_flops() -> None:
    plain, guided = (
        step_work(*costs_of("algorithm.branch_batch=1", f"sampler.guidance_scale={scale}")) for scale in (1, 3.5)
    )
    for phase in ("shared prefix", "branches", "update"):
        assert guided[phase].evaluations == 2 * plain[phase].evaluations
        assert guided[phase].flops == pytest.approx(2 * plain[phase].flops, rel=0.01)
    assert guided["decoding"] == plain["decoding"]


def test_checkpointing_and_its_offload_move_memory_where_they_say() -> None:
    kept, recomputed, offloaded = (
        costs_of(f"model.use_gradient_checkpointing={on}", f"model.use_gradient_checkpointing_offload={away}")[2]
        for on, away in ((False, False), (True, False), (True, True))
    )
    cost = {name: costs.update["dit2"] for name, costs in zip("kro", (kept, recomputed, offloaded), strict=True)}
    assert cost["r"].peak_bytes < 0.6 * cost["k"].peak_bytes
    assert cost["r"].flops > cost["k"].flops
    assert cost["o"].peak_bytes < cost["r"].peak_bytes
    blocks, batch, tokens, width = 4, 8, 48, 144
    assert cost["o"].host_bytes >= blocks * batch * tokens * width * 4
    assert cost["k"].host_bytes == cost["r"].host_bytes == 0


def test_dropped_encoders_leave_after_encoding() -> None:
    kept, dropped = (toy_plan(2**30, f"memory.drop_encoders={drop}").memory for drop in (False, True))
    assert kept.parts["encoding"] == dropped.parts["encoding"]
    assert "text_encoder" in kept.parts["update"]
    assert "text_encoder" not in dropped.parts["update"]
    assert dropped.parts["update"]["vae"] < 0.6 * kept.parts["update"]["vae"]


def test_what_does_not_fit_is_told_what_would_make_it_fit() -> None:
    needed = toy_plan(2**30).memory.peak
    assert toy_plan(needed).fits
    plan = toy_plan(needed - 1)
    assert not plan.fits
    assert plan.memory.peak_phase == "decoding"
    fitting = {remedy.settings for remedy in plan.remedies if remedy.fits}
    assert ("algorithm.branch_batch=1",) in fitting
    assert all(remedy.fits == (remedy.peak_bytes < needed) for remedy in plan.remedies)
    assert not any("data." in setting for remedy in plan.remedies for setting in remedy.settings)


def test_shorter_videos_are_proposed_only_where_nothing_else_is_enough() -> None:
    plan = toy_plan(1 * MIB, "data.num_frames=21")
    assert not any(remedy.fits for remedy in plan.remedies)
    assert plan.fewest_gpus is None
    assert ("data.num_frames=17",) in {remedy.settings for remedy in plan.remedies}


def test_a_remedy_gives_the_memory_that_a_plan_with_it_gives() -> None:
    plan = toy_plan(40 * MIB)
    assert len(plan.remedies) > 2
    for remedy in plan.remedies[:2]:
        assert toy_plan(40 * MIB, *remedy.settings).memory.peak == remedy.peak_bytes


def test_sharding_is_proposed_to_several_gpus_and_a_swap_to_one() -> None:
    config = toy_recipe()
    one, two = ({s.settings[0] for s in harmless_switches(config, count, True)} for count in (1, 2))
    assert one - two == {"memory.swap_idle_expert=true"}
    assert two - one == {"parallel.sharding=fsdp2"}
    assert "memory.swap_idle_expert=true" not in {s.settings[0] for s in harmless_switches(config, 1, False)}
    changed = with_settings(config, [setting for s in harmless_switches(config, 2, True) for setting in s.settings])
    assert harmless_switches(changed, 2, True) == []


def test_smaller_videos_keep_sides_that_every_model_takes() -> None:
    recipe = load_config(RECIPES / "wan2.1-t2v-1.3b.yaml", environment={})
    assert lossy_switches(recipe)[-1].settings == ("data.height=320", "data.width=576")
    frames = [switch.settings for switch in lossy_switches(recipe)[:-1]]
    assert frames == [("data.num_frames=49",), ("data.num_frames=33",), ("data.num_frames=17",)]


@pytest.mark.parametrize(
    ("name", "latents", "more"),
    [
        ("wan2.2-i2v-a14b", (16, 21, 60, 60), {"y": (1, 20, 21, 60, 60)}),
        ("wan2.2-ti2v-5b", (48, 21, 30, 30), {"first_frame_latents": (1, 48, 1, 30, 30)}),
        ("wan2.1-t2v-1.3b", (16, 21, 60, 104), {}),
    ],
)
def test_published_models_are_told_what_they_take(name: str, latents: tuple[int, ...], more: dict[str, Any]) -> None:
    config = load_config(RECIPES / f"{name}.yaml", environment={})
    conditioning = meta_conditioning(meta_module(config), config.data.num_frames, *largest_size(config.data))
    assert conditioning.latent_shape == latents
    tensors = {key: tuple(value.shape) for key, value in conditioning.inputs.items() if hasattr(value, "shape")}
    assert tensors == {"context": (1, 512, 4096), **more}


def test_the_command_plans_a_published_model_without_its_files(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    arguments = [
        "plan", str(RECIPES / "wan2.1-t2v-1.3b.yaml"), "--json", "--gpus", "4", "--gpu-memory", "24GB",
        "--reserve", "2GiB", "--set", "data.num_frames=5", "--set", "data.height=64", "--set", "data.width=64",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["likeness-trainer", *arguments])
    main()
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["parameters"] == {
        "dit": 1_418_996_800, "text_encoder": 5_680_910_336, "vae": 126_892_531,
    }  # fmt: skip
    assert told["model"]["weights"]["dit"] == 2 * 1_418_996_800
    assert told["gpus"] == {"count": 4, "memory_bytes": 24 * 10**9, "reserve_bytes": 2 * 2**30}
    assert told["video"]["tokens"] == 2 * 4 * 4
    assert told["step"]["branches"]["evaluations"] == 4 * 8 * 4
    assert told["memory_bytes"]["peak"] == max(told["memory_bytes"]["totals"].values())
    assert told["fits"] == (told["memory_bytes"]["peak"] <= 24 * 10**9 - 2 * 2**30)


def test_the_tables_name_every_part_and_end_with_the_verdict(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    pytest.importorskip("likeness_toyworld", reason="the toy world is not installed")
    monkeypatch.setattr("sys.argv", ["likeness-trainer", "plan", str(RECIPES / "toy.yaml")])
    monkeypatch.setenv("COLUMNS", "120")
    main()
    text = capsys.readouterr().out
    for part in ("text_encoder", "moments of AdamW", "frames in flight", "shared prefix", "step by step"):
        assert part in text
    assert text.splitlines()[-1].startswith("fits: decoding needs 0.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus is 0, allowed: 1 or more"),
        (["--gpus", "3"], "algorithm.groups_per_step is 4, which 3 ranks cannot share equally"),
        (["--gpu-memory", "80"], "--gpu-memory is '80', allowed: a number with GiB, GB, MiB, MB"),
        (["--gpu-memory", "4GiB"], "--reserve is 4GiB, allowed: less than --gpu-memory (4GiB)"),
    ],
)
def test_faults_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["likeness-trainer", "plan", str(RECIPES / "toy.yaml"), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_and_flops_are_read_and_written_as_people_do() -> None:
    assert [parse_size(text, "x") for text in ("80GiB", "1.5 GB", "3MiB")] == [80 * 2**30, 15 * 10**8, 3 * MIB]
    with pytest.raises(ConfigError, match="allowed: a number with"):
        parse_size("80 G", "--gpu-memory")
    assert [gib(size) for size in (80 * 2**30, 2**30, MIB)] == ["80.0", "1.00", "0.001"]
    assert [flops(count) for count in (5.603e17, 2e12, 3e9)] == ["560.3 PFLOP", "2.0 TFLOP", "3.0 GFLOP"]


def test_a_recipe_of_an_unknown_model_without_files_is_refused(tmp_path: Path) -> None:
    config = load_config(RECIPES / "wan2.1-t2v-1.3b.yaml", ["model.architecture=wan-9"], environment={})
    with pytest.raises(ValueError, match="'wan-9'"):
        make_plan(config, Gpus(1, 2**40, 0), lambda what: None)
