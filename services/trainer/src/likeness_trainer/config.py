"""The recipe of a run: one YAML file, overridden by the environment and then by ``--set a.b=c``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from likeness_trainer.data.dataset import DataConfig
from likeness_trainer.errors import ConfigError
from likeness_trainer.learn.policy_gradient import PolicyGradientConfig
from likeness_trainer.ranks import ParallelConfig
from likeness_trainer.reward_link import RewardConfig
from likeness_trainer.run.trackers import TrackingConfig
from likeness_trainer.wan.memory_config import MemoryConfig
from likeness_trainer.wan.model_config import WanModelConfig
from likeness_trainer.wan.sampler_config import SamplerConfig

ENVIRONMENT_PREFIX = "LIKENESS_TRAINER_"


class OptimizerConfig(BaseModel):
    """AdamW on the float32 adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(2e-5, gt=0)
    """Constant after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of a running mean of the adapters that is evaluated and exported in their place. Not set: none is kept."""


class EvaluationConfig(BaseModel):
    """Held-out videos sampled before and after training, with the same noise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metadata: str | None = None
    """metadata.csv of people that are not trained on. Without it nothing is held out and nothing is evaluated."""
    pairs: int = Field(32, ge=2)
    """Pairs of person and noise."""
    seed: int = Field(1_000_003, ge=0)
    """Seed of the noise; training draws its noise under other names, so the two never meet."""
    packs: list[str] = []
    """Further face packs that score the same videos, beside the one that gave the rewards."""


class TrainConfig(BaseModel):
    """A whole run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: str = "runs/likeness"
    """Folder that the run writes."""
    seed: int = Field(0, ge=0)
    """Seed of adapters, data order and noise."""
    steps: int = Field(100, ge=1)
    """Optimizer steps."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest checkpoints kept; older ones are deleted."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this are kept as well."""
    max_skipped_steps: int = Field(5, ge=1)
    """Steps in a row that may give NaN or infinity, and so move nothing, before the run stops."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch. Not set: OMP_NUM_THREADS decides."""
    model: WanModelConfig
    sampler: SamplerConfig = SamplerConfig()
    algorithm: PolicyGradientConfig = PolicyGradientConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()

    @model_validator(mode="after")
    def _swapping_fits(self) -> TrainConfig:
        if not self.memory.swap_idle_expert:
            return self
        if self.parallel.sharding != "none":
            raise ValueError(
                f"memory.swap_idle_expert is on with parallel.sharding {self.parallel.sharding}, which spreads the "
                "weights of both experts over the ranks already; choose one of the two"
            )
        if self.algorithm.name != "policy_gradient" and not self.model.use_gradient_checkpointing:
            raise ValueError(
                f"memory.swap_idle_expert is on with algorithm.name {self.algorithm.name}, whose backward pass goes "
                "through both experts; it needs model.use_gradient_checkpointing"
            )
        return self

    @model_validator(mode="after")
    def _ranks_wait_as_long_as_the_reward(self) -> TrainConfig:
        if self.parallel.timeout_s <= self.reward.give_up_after_s:
            raise ValueError(
                f"parallel.timeout_s is {self.parallel.timeout_s:g}; it must exceed reward.give_up_after_s "
                f"({self.reward.give_up_after_s:g}), or ranks give up on one that waits for the reward server"
            )
        return self

    @model_validator(mode="after")
    def _group_fits_batches(self) -> TrainConfig:
        if self.algorithm.branch_batch > self.algorithm.group_size:
            raise ValueError(
                f"algorithm.branch_batch is {self.algorithm.branch_batch}; "
                f"it must not exceed algorithm.group_size ({self.algorithm.group_size})"
            )
        return self

    @model_validator(mode="after")
    def _feedback_fits_the_window(self) -> TrainConfig:
        steps, window = self.algorithm.feedback.last_steps, self.sampler.final_timestep - self.sampler.mid_timestep + 1
        if steps is not None and steps > window:
            raise ValueError(f"algorithm.feedback.last_steps is {steps}; the window has {window} steps")
        return self


def load_config(recipe: Path, overrides: Sequence[str] = (), environment: dict[str, str] | None = None) -> TrainConfig:
    """Returns the resolved recipe.

    Args:
        recipe: YAML file.
        overrides: ``a.b=value`` texts; values are YAML.
        environment: variables ``LIKENESS_TRAINER_A__B=value``; the process's own by default.

    Raises:
        ConfigError: names the dotted key, the value given and what is allowed.
    """
    try:
        tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {str(recipe)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(recipe)!r} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {str(recipe)!r} must hold a mapping of settings, found {type(tree).__name__}")
    variables = os.environ if environment is None else environment
    for name in sorted(variables):
        if name.startswith(ENVIRONMENT_PREFIX):
            set_dotted(tree, name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", "."), variables[name], name)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set takes KEY=VALUE, for example optimizer.learning_rate=1e-4; got {override!r}")
        set_dotted(tree, key.strip(), text, "--set")
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> TrainConfig:
    """Returns the validated recipe of a settings tree; raises ConfigError with every fault at once."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("the recipe is not valid:\n" + "\n".join(_fault(item) for item in error.errors())) from error


def set_dotted(tree: dict[str, Any], key: str, text: str, source: str) -> None:
    """Sets ``a.b`` in a tree to a YAML value."""
    try:
        value = _yaml_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} {key}: {text!r} is not a YAML value") from error
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source} {key}: {parent!r} is a value, not a group of settings")
        node = child
    node[leaf] = value


def _yaml_value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:  # YAML 1.1 reads 1e-4 as text; people mean the number
            return float(value)
        except ValueError:
            return value
    return value


def dump_config(config: TrainConfig) -> str:
    """Returns the resolved recipe as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _fault(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(recipe)"
    given = "" if item["type"] in {"missing", "value_error"} else f" (given: {item['input']!r})"
    if item["type"] == "extra_forbidden":
        return f"  {key}: unknown key{given}{_suggestion(item['loc'])}"
    return f"  {key}: {item['msg'].removeprefix('Value error, ')}{given}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """Returns the text that names the key most like an unknown one: in its own group, else in any other."""
    *parents, leaf = (str(part) for part in location)
    known = setting_keys()
    siblings = {key.rpartition(".")[2]: key for key in known if key.split(".")[:-1] == parents}
    elsewhere = {key.rpartition(".")[2]: key for key in known}
    for names in (siblings, elsewhere):
        nearest = difflib.get_close_matches(leaf, names, n=1)
        if nearest:
            return f"; did you mean {names[nearest[0]]}?"
    return f"; allowed here: {', '.join(siblings)}" if siblings else ""


def setting_keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> list[str]:
    """Returns the dotted keys of all settings, those of groups and of their members, in the order of the recipe."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += setting_keys(field.annotation, f"{prefix}{name}.")
    return keys
