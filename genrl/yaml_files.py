"""YAML files as people expect them, with files that they start from, and errors that name the place."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from genrl.parts import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML as people expect it.

    1e-3 is a number (YAML 1.1 wants 1.0e-3), `no` and `on` are words (only true and false are booleans), and a key
    given twice is an error.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in entries if first in "tTfF" or not tag.endswith(":bool")]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text; `origin` names it in a ConfigError, with line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{origin}{place}: {getattr(error, 'problem', None) or error}; this is not valid YAML"
        ) from error


def read_tree(path: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a file, over those of the files that its `base` names. ConfigError says what is wrong with it."""
    if path.resolve() in including:
        raise ConfigError(f"{path} includes itself through `base`; remove one of the `base` keys")
    if not path.is_file():
        raise ConfigError(_missing_file(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file; a configuration is YAML in UTF-8") from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds {type(tree).__name__}, not a mapping of keys such as `generator:` and `trainer:`"
        )
    bases = tree.pop("base", None) or []
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = merge(merged, read_tree(path.parent / base, (*including, path.resolve())))
    if merged and "name" not in tree:  # a file that extends another is another experiment
        merged.pop("name", None)
    if merged and "run_dir" not in tree:
        merged.pop("run_dir", None)
    return merge(merged, tree)


def _missing_file(path: Path) -> str:
    folder = next((p for p in (path.parent, *path.parent.parents) if p.is_dir()), Path("."))
    nearby = sorted(
        str(p) for p in (*folder.glob("*.y*ml"), *Path("configs").rglob("*.y*ml")) if "accelerate" not in p.parts
    )
    if not nearby:
        return f"no configuration file {path}; there is no YAML file in {folder.resolve()} either"
    best = difflib.get_close_matches(str(path), nearby, 1, 0.7)
    hint = f"did you mean {best[0]}? " if best else ""
    return f"no configuration file {path}; {hint}there are: {', '.join(dict.fromkeys(nearby))}"


def merge(base: Any, change: Any) -> Any:
    """`change` over `base`, key by key; a part of another class takes nothing, and {} empties."""
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return copy.deepcopy(change)
    if not change:  # `gauges: {}` empties what the base has
        return {}
    if change.get("class_path", base.get("class_path")) != base.get("class_path"):
        return copy.deepcopy(dict(change))
    merged = dict(base)
    for key, value in change.items():
        merged[key] = merge(base[key], value) if key in base else copy.deepcopy(value)
    return merged
