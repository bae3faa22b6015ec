"""Parts of a configuration: classes found by import path, and objects written as `class_path` with `init_args`."""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genrl.signatures import REQUIRED, parameters

# Where the nearest right name of a mistyped class is looked for.
SEARCHED = (
    "diffusion",
    "generators",
    "rewards",
    "algorithms",
    "objectives",
    "training",
    "prompts",
    "networks",
    "policies",
    "envs",
    "envs.data",
)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, what is allowed and the file."""


def import_object(path: Any, where: str) -> Any:
    """The class or function at a dotted import path (`package.module.Class` or `package.Class.method`).

    Raises:
        ConfigError: nothing is there (the message names the nearest known class), or its module fails to import.
    """
    if not isinstance(path, str) or not is_import_path(path):
        raise ConfigError(
            f"{where}: class_path {path!r} is no import path; write package.module.Class" + nearest_class(path)
        )
    names = path.split(".")
    for split in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name + ".").startswith(error.name + "."):
                continue
            raise ConfigError(
                f"{where}: {path} needs the package {error.name!r}, which is not installed; "
                "`genrl doctor` shows which extra brings it"
            ) from error
        except Exception as error:  # the user's own module, with a mistake in it
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{where}: importing {module_name} failed with {reason}") from error
        try:
            found = functools.reduce(getattr, names[split:], module)
        except AttributeError:
            break
        if not callable(found):
            raise ConfigError(f"{where}: {path} is a {type(found).__name__}; expected a class or a function")
        return found
    raise ConfigError(f"{where}: there is no class {path}{nearest_class(path)}")


def import_path(cls: type) -> str:
    """The shortest path under which `cls` can be imported: its package's, if the package exports it."""
    names = cls.__module__.split(".")
    for length in range(1, len(names)):
        package = importlib.import_module(".".join(names[:length]))
        if getattr(package, cls.__qualname__, None) is cls:
            return f"{package.__name__}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def nearest_class(path: Any) -> str:
    known: dict[str, str] = {}
    for package in SEARCHED:
        with contextlib.suppress(ImportError):  # a package whose dependencies are missing has nothing to offer
            module = importlib.import_module(f"genrl.{package}")
            for name in getattr(module, "__all__", None) or dir(module):
                if isinstance(getattr(module, name, None), type):
                    known.setdefault(name, f"genrl.{package}.{name}")
    module_name, _, last = str(path).rpartition(".")
    lower = {name.lower(): name for name in known}
    best = difflib.get_close_matches(last.lower(), lower, 1, 0.6)
    if best:
        return f"; did you mean {known[lower[best[0]]]}?"
    return f"; is {module_name.split('.')[0]!r} installed or in the current folder?" if module_name else ""


UNWRITABLE = object()


def to_plain(value: Any, keep: Any = None) -> Any:
    """`value` in YAML types: tuples as lists, objects as class_path and init_args where these can be read back.

    `keep` is returned in place of what has no such form (a value that was converted from plain YAML).
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        plain = [to_plain(item) for item in value]
        return (UNWRITABLE if keep is None else keep) if any(item is UNWRITABLE for item in plain) else plain
    if isinstance(value, Mapping):
        items = {str(k): to_plain(v) for k, v in value.items()}
        return (UNWRITABLE if keep is None else keep) if any(v is UNWRITABLE for v in items.values()) else items
    if keep is not None or value is REQUIRED or isinstance(value, type) or callable(getattr(value, "__get__", None)):
        return UNWRITABLE if keep is None else keep
    known, takes_any = parameters(type(value))
    if takes_any or any(not hasattr(value, name) for name in known):
        return UNWRITABLE
    arguments = {name: to_plain(getattr(value, name)) for name in known}
    if any(argument is UNWRITABLE for argument in arguments.values()):
        return UNWRITABLE
    return {"class_path": import_path(type(value)), "init_args": arguments}


def is_import_path(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) is not None


def contains_part(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class_path" in value or any(contains_part(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(contains_part(item) for item in value)
