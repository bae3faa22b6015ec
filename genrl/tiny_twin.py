"""The tiny twin of a configuration: the same parts on random models of a few thousand weights.

It shows within a minute, without a download, that a recipe for a large model builds, runs and saves. What it trains is
worth nothing.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genrl.config import Config
from genrl.parts import import_object

# Enough for groups with a spread, two updates and a resumed run; everything else stays as the recipe has it.
SIZES: dict[str, dict[str, Any]] = {
    "trainer": {
        "iterations": 1,
        "prompts_per_iteration": 2,
        "group_size": 2,
        "rollout_batch": None,
        "checkpoint_every": 0,
        "preview_every": 0,
        "processes": None,
    },
    "evaluation": {"every": 0, "samples_per_prompt": 2, "steps": 2},
    "algorithm": {"minibatches": 2, "micro_batch": 1, "keep_per_group": None},
    "prompts": {"max_train": 4, "max_held_out": 2},
}


def tiny_twin(config: Config, given: Sequence[str] = (), folder: Path | None = None) -> Config:
    """The configuration with every checkpoint replaced by a tiny one and sizes to match.

    A part takes part by a classmethod `tiny_arguments(arguments, folder) -> arguments`, which makes what it loads below
    `folder` and returns the arguments that load it.

    Args:
        config: of a real run.
        given: keys that were set on the command line (`trainer.iterations`); their values stay.
        folder: where tiny models are made; by default the cache.

    Raises:
        ConfigError: a class cannot be imported.
    """
    from genrl.generators.cache import cache_root

    folder = cache_root() / "tiny" if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {name: _shrunk(value, name, folder) for name, value in config.raw.items()}
    if "reward" in raw and not _draws_other_than_pictures(config):
        raw["reward"] = _with_spread(raw["reward"])
    raw["run_dir"] = raw["run_dir"] if "run_dir" in given else f"{raw['run_dir']}-tiny"
    for section, sizes in SIZES.items():
        values = raw.get(section)
        if isinstance(values, Mapping):
            arguments = values.get("init_args", values)
            own = _names(values)
            for name, size in sizes.items():
                alone = name == "minibatches" and arguments.get(name) == 1  # methods without a ratio allow one update
                if f"{section}.{name}" not in given and (name in arguments or name in own) and not alone:
                    arguments[name] = size
    trainer = raw.get("trainer", {})
    if "group_size" in trainer and "trainer.group_size" not in given:
        world = int(os.environ.get("WORLD_SIZE", "1"))  # every process takes part in every minibatch
        trainer["group_size"] = math.lcm(trainer["group_size"], world)
    if trainer.get("mixed_precision") == "fp16":  # there is no fp16 arithmetic for networks on a CPU
        trainer["mixed_precision"] = "bf16"
    return Config(raw, config.source)


def _draws_other_than_pictures(config: Config) -> bool:
    generator = config.raw.get("generator") or {}
    return "class_path" in generator and hasattr(import_object(generator["class_path"], "generator"), "preview")


def _with_spread(reward: Any) -> dict[str, Any]:
    """The reward and one more, in which samples of random models differ, so that the update is tried as well."""
    members = {"recipe": reward, "twin": {"class_path": "genrl.rewards.Incompressibility", "init_args": {}}}
    return {"class_path": "genrl.rewards.Compose", "init_args": {"rewards": members}}


def _shrunk(value: Any, where: str, folder: Path) -> Any:
    if isinstance(value, list):
        return [_shrunk(item, f"{where}.{i}", folder) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    shrunk = {name: _shrunk(item, f"{where}.{name}", folder) for name, item in value.items()}
    if "class_path" in shrunk:
        tiny = getattr(import_object(shrunk["class_path"], where), "tiny_arguments", None)
        if tiny is not None:
            shrunk["init_args"] = tiny(dict(shrunk.get("init_args") or {}), folder)
    return shrunk


def _names(part: Mapping[str, Any]) -> set[str]:
    """Argument names of a part, of which a configuration leaves out those that have no plain default."""
    if "class_path" not in part:
        return set()
    return set(inspect.signature(import_object(part["class_path"], "")).parameters)
