"""A run directory before a run: whether it can be written, whose it is, what changed since the last time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from genrl.generators.base import Generator
from genrl.prompts import Prompt
from genrl.training.checkpoint import clean_up, list_checkpoints

LOCK = ".lock"
MARK = ".genrl-run"  # made before anything else, so that a run knows its own folder
_REPLACED = ("checkpoints", "samples", "tensorboard", "evaluations", "videos")
_FILES = ("config.yaml", "run.json", "metrics.jsonl", "prompt_rewards.jsonl", "summary.json", "report.html")
_WRITTEN = (*_REPLACED, *_FILES)
# With another of these it is another experiment, whose numbers must not be mixed with the old ones.
_IDENTITY = ("seed", "generator", "prompts", "reward", "algorithm.class_path", "policy", "data", "env")
# Settings that may change between two parts of a run without making it another experiment.
_FREE = ("name", "run_dir", "evaluation", "trainer.iterations", "trainer.checkpoint_every", "trainer.keep_checkpoints",
         "trainer.preview_every", "trainer.tensorboard", "trainer.cpu_threads", "trainer.processes",
         "trainer.reward_timeout", "trainer.device", "trainer.collapse_fraction", "data.cache_dir",
         "data.workers")  # fmt: skip
# Settings of parts that say where and in what portions something is computed, not what: a server that moved, a batch
# that did not fit into memory. Changing one is told, and makes no other experiment.
_MOVABLE = {"url", "timeout", "retries", "backoff", "wait", "headers", "batch_size", "device", "checkpointing",
            "gradient_checkpointing", "offload_text_encoders", "vae_tiling", "vae_slicing", "prompt_cache"}  # fmt: skip


def check_parts(generator: Any, prompts: Any) -> None:
    """Refuse a generator or a prompt source that a run would find incomplete later.

    Raises:
        ValueError: naming what is missing.
    """
    methods = [name for name in vars(Generator) if not name.startswith("_") and callable(getattr(Generator, name))]
    missing = [name for name in methods if name != "from_pretrained" and not callable(getattr(generator, name, None))]
    if missing:
        raise ValueError(
            f"generator {type(generator).__name__} has no {', '.join(missing)}; genrl.generators.base.Generator "
            "describes every method"
        )
    for name in ("train", "held_out"):
        listed = getattr(prompts, name, None)
        if not listed or not all(isinstance(p, Prompt) for p in listed):
            raise ValueError(
                f"prompts.{name} of {type(prompts).__name__} must be a list of genrl.prompts.Prompt that is not empty, "
                f"got {listed!r:.80}"
            )


def claim_run_dir(run_dir: Path) -> Any:
    """A lock that only one run at a time can hold; it ends with its process, however that ends.

    Raises:
        OSError: when the directory cannot be written.
        ValueError: when another run is writing into it, or it holds files that no run wrote.
    """
    from filelock import FileLock, Timeout

    _refuse_foreign_files(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / MARK).touch()
        probe = run_dir / ".write-test"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        lock = FileLock(run_dir / LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another run is writing into {run_dir} at this moment; choose another run_dir, or stop that run first"
        ) from error
    except OSError as error:
        raise OSError(f"run directory {run_dir} cannot be written ({error}); choose another run_dir") from error
    return lock


def _refuse_foreign_files(run_dir: Path) -> None:
    """Only a folder that a run made may have the files that a run replaces."""
    if (run_dir / MARK).exists():
        return
    foreign = [name for name in _WRITTEN if (run_dir / name).exists()]
    if foreign:
        raise ValueError(
            f"run_dir = {run_dir} has {', '.join(foreign)} but is no run of genrl (it has no {MARK}); choose another "
            "folder, since a run writes its own there"
        )


def prepare_run_dir(run_dir: Path, config: dict[str, Any] | None, resume: str) -> list[str]:
    """Bring a claimed run directory into the state to start from.

    Returns:
        What a resumed run changes: "key: old -> new".

    Raises:
        ValueError: for an unknown ``resume``, a missing checkpoint with ``"require"`` or a run of another
            experiment.
    """
    if resume not in ("auto", "never", "require"):
        raise ValueError(f"resume = {resume!r} is unknown; allowed are auto, never, require")
    clean_up(run_dir)
    steps = list_checkpoints(run_dir)
    if resume == "require" and not steps:
        raise ValueError(f"--resume require, but {run_dir} has no checkpoint; use --resume auto to start one")
    changes: list[str] = []
    if resume == "never" or not steps:
        for name in _REPLACED:
            shutil.rmtree(run_dir / name, ignore_errors=True)
        for name in ("report.html", "summary.json"):
            (run_dir / name).unlink(missing_ok=True)
    elif config is not None:
        changes = changed_settings(run_dir / "config.yaml", config)
        keys = {change: change.split(":")[0] for change in changes}
        other = [c for c, key in keys.items() if key.startswith(_IDENTITY) and not _MOVABLE & set(key.split("."))]
        if other:
            raise ValueError(
                f"{run_dir} holds a run of another experiment ({'; '.join(other[:3])}). Choose another run_dir, give "
                "the old settings to go on with it, or replace it with --resume never"
            )
    return changes


def save_config(run_dir: Path, config: dict[str, Any] | None) -> None:
    """Write ``config.yaml``; after a resumed run has loaded its checkpoint, so that a refused one changes nothing."""
    if config is not None:
        from genrl.config import save

        save(config, run_dir / "config.yaml")


def changed_settings(path: Path, config: dict[str, Any]) -> list[str]:
    """Settings of a saved configuration that another one changes, without those that a run may change freely."""
    import yaml

    if not path.is_file():
        return []
    before = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    old, new = flatten(_without_held_out(before)), flatten(_without_held_out(config))
    watched = [key for key in sorted(old.keys() | new.keys()) if not any(f"{key}.".startswith(f"{f}.") for f in _FREE)]
    pairs = [(key, old.get(key, "absent"), new.get(key, "absent")) for key in watched]
    return [f"{key}: {before} -> {after}" for key, before, after in pairs if before != after]


def _without_held_out(tree: Any) -> Any:
    """A configuration without the held-out members of every `Compose`: gauges, which may come and go."""
    if isinstance(tree, (list, tuple)):
        return [_without_held_out(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if str(tree.get("class_path", "")).rpartition(".")[2] == "Compose":
        arguments = dict(tree.get("init_args") or {})
        names = set(arguments.pop("held_out", None) or ())
        for table in ("rewards", "weights", "caps", "gates"):
            entries = {k: v for k, v in (arguments.get(table) or {}).items() if k.split("/")[0] not in names}
            arguments[table] = entries or None  # a table that is empty without them is one that was not given
        tree = {**tree, "init_args": arguments}
    return {key: _without_held_out(value) for key, value in tree.items()}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested dicts, without ``init_args``."""
    if isinstance(tree, dict) and tree:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= flatten(value, prefix if key == "init_args" else f"{prefix}{key}.")
        return found
    return {prefix.removesuffix("."): list(tree) if isinstance(tree, tuple) else tree}
