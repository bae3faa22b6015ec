"""Configuration files: YAML in, checked and complete dictionaries, built parts out.

A part is a mapping of `class_path` (any importable class or function, also the user's own) and `init_args`; parts nest.
Every name is checked against the signature of its class and every value against its type hint, so that a mistake is
answered before anything runs. `base: other.yaml` (relative to the file) starts from another file.

jsonargparse checks the single values. Parts are resolved here, because its errors for protocols and for nested classes
in dictionaries do not name the key and the nearest right name, which is what a person with a mistyped key needs.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import yaml

from genrl.parts import UNWRITABLE, ConfigError, contains_part, import_object, is_import_path, to_plain
from genrl.signatures import (
    REQUIRED,
    Parameter,
    check_value,
    item_hint,
    lacks_protocol,
    parameters,
    part_types,
    settings_type,
    type_name,
    union_members,
)
from genrl.yaml_files import merge, parse_yaml, read_tree

Kind = Literal["generator", "policy"]
T = TypeVar("T")


class Part(Protocol):
    """A value that must be given as `class_path` and `init_args`, of any class."""


PROTOCOLS = {"generator": "genrl.generators.base.Generator", "reward": "genrl.rewards.base.Reward"}


@dataclasses.dataclass(frozen=True)
class Config:
    """A complete configuration: `raw` holds every key with its value, defaults included, as plain YAML types."""

    raw: dict[str, Any]
    source: Path = dataclasses.field(default=Path("config.yaml"), compare=False)

    @property
    def text(self) -> str:
        """The configuration as YAML, loadable by `load_config`."""
        return yaml.safe_dump(self.raw, sort_keys=False, allow_unicode=True, width=120)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, check and complete a configuration file.

    Args:
        path: a YAML file; its key `base` names files to start from.
        overrides: `key=value` with dotted keys; `init_args` may be left out (`algorithm.kernel.noise_level=0.5`).

    Raises:
        ConfigError: no such file, unknown key or class, wrong type, missing argument.
    """
    path = Path(path)
    tree = read_tree(path)
    for text in overrides:
        _override(tree, text)
    raw = _Completer(path, [text.partition("=")[0] for text in overrides], tree).top_level()
    return Config(raw, path)


def save(config: Config | Mapping[str, Any], path: str | Path) -> None:
    """Write the complete configuration; `load_config` of that file gives an equal one."""
    config = config if isinstance(config, Config) else Config(dict(config))
    Path(path).write_text("# Complete configuration of a run, written by genrl.\n" + config.text, encoding="utf-8")


def build(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the run (`run_class`), except `config`: parts and settings are instances, the rest plain values.

    Raises:
        ConfigError: the constructor of a part refused its arguments.
    """
    raw = config.raw if isinstance(config, Config) else config
    hints = {name: parameter.hint for name, parameter in top_level(raw.get("name", "run"), kind_of(raw)).items()}
    return {name: _build(value, hints.get(name, Any), name) for name, value in raw.items()}


def build_part(raw: Mapping[str, Any], where: str = "part") -> Any:
    """One object from its `class_path` and `init_args`, as `genrl.parts.to_plain` writes it.

    Raises:
        ConfigError: there is no such class, or it refused its arguments; the message starts with `where`.
    """
    return _build(raw, Any, where)


def load_settings(path: str | Path, overrides: Sequence[str], kind: type[T]) -> T:
    """An instance of a settings class from a file of its own, checked like a configuration of a run.

    Raises:
        ConfigError: no such file, unknown key, wrong type, missing argument, or values that the class refuses.
    """
    return _build(_complete_settings(path, overrides, kind), kind, Path(path).name)


def settings_listing(path: str | Path, overrides: Sequence[str], kind: type) -> Iterator[tuple[str, Parameter, Any]]:
    """Every key of a file of its own, as `listing` gives those of a run."""
    yield from _listing(_complete_settings(path, overrides, kind), parameters(kind)[0], "")


def _complete_settings(path: str | Path, overrides: Sequence[str], kind: type) -> dict[str, Any]:
    tree = read_tree(Path(path))
    for text in overrides:
        _override(tree, text)
    completer = _Completer(Path(path), [text.partition("=")[0] for text in overrides], tree)
    return completer.arguments(*parameters(kind), tree, "", kind.__name__)


def kind_of(tree: Mapping[str, Any]) -> Kind:
    """What a configuration trains: a policy where one is named, else a generator."""
    return "policy" if "policy" in tree or "data" in tree else "generator"


def run_class(config: Config | Mapping[str, Any]) -> Any:
    """The class whose arguments `build` gives: `genrl.training.Loop` or `genrl.training.Imitation`."""
    training = importlib.import_module("genrl.training")
    raw = config.raw if isinstance(config, Config) else config
    return training.Imitation if kind_of(raw) == "policy" else training.Loop


def top_level(name: str, kind: Kind) -> dict[str, Parameter]:
    """The keys of a configuration file of a kind."""
    found = [
        Parameter("name", str, name, "names the run in reports; the file's name if not given"),
        Parameter("run_dir", str, f"runs/{name}", "everything that the run writes goes here"),
        Parameter("seed", int, 0, "fixes every random draw of the run"),
    ]
    if kind == "policy":
        env = importlib.import_module("genrl.envs.settings").EnvSettings
        settings = importlib.import_module("genrl.training.policy_settings")
        sections = (settings.PolicyTrainerSettings, settings.PolicyEvaluationSettings)
        found += [
            Parameter("policy", Part, help="the policy that is trained"),
            Parameter("data", Part, help="where its demonstrations come from"),
            Parameter("env", env | None, None, "what it is evaluated in; null measures held-out demonstrations only"),
        ]
    else:
        settings = importlib.import_module("genrl.training.settings")
        sections = (settings.TrainerSettings, settings.EvaluationSettings)
        found += [
            Parameter("generator", _protocol("generator"), help="the model that is fine-tuned"),
            Parameter("prompts", Part, help="prompts to train on and held-out prompts to evaluate on"),
            Parameter("reward", _protocol("reward"), help="what is made larger"),
            Parameter("algorithm", Part, help="how rewards change the model"),
        ]
    for key, cls in zip(("trainer", "evaluation"), sections, strict=True):
        found.append(Parameter(key, cls, {}, (cls.__doc__ or "").strip().split("\n")[0]))
    return {parameter.name: parameter for parameter in found}


def listing(config: Config) -> Iterator[tuple[str, Parameter, Any]]:
    """Every key that can be set, in short dotted form, with its parameter and its present value."""
    yield from _listing(config.raw, top_level(config.raw["name"], kind_of(config.raw)), "")


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"cannot read {text!r}; write key=value, for example trainer.iterations=10")
    value = parse_yaml(value_text, f"{text!r}:") if value_text else ""
    node: Any = tree
    *path, last = key.split(".")
    for name in path:
        node = _enter(node, name)
        child = node[int(name)] if isinstance(node, list) else node.get(name)
        if child is None or isinstance(child, str):  # not there yet, or a part written as its class path only
            child = {"class_path": child} if isinstance(child, str) else {}
            node[name] = child
        if not isinstance(child, (dict, list)):
            raise ConfigError(f"{key!r} cannot be set: {name!r} is {child!r}, which has no keys")
        node = child
    node = _enter(node, last)
    if last == "class_path" and node.get("class_path") != value:
        node.pop("init_args", None)
    node[int(last) if isinstance(node, list) else last] = value


def _enter(node: Any, name: str) -> Any:
    """Where `name` is stored: in a part, its init_args, which the short form of a key leaves out."""
    if isinstance(node, list):
        if not name.isdigit() or int(name) >= len(node):
            raise ConfigError(f"{name!r} is no position in a list of {len(node)} items")
        return node
    if "class_path" in node and name not in ("class_path", "init_args"):
        if node.get("init_args") is None:
            node["init_args"] = {}
        return node["init_args"]
    return node


# ---------------------------------------------------------------------------------------------------- checking


class _Completer:
    """Checks a tree of plain values and fills in defaults; `tree` and `overrides` only serve the error messages."""

    def __init__(self, source: Path, overrides: Sequence[str], tree: dict[str, Any]) -> None:
        self.source = source
        self.overrides = [key.replace(".init_args", "") for key in overrides]
        self.tree = tree

    def place(self, where: str) -> str:
        given = any(key == where or key.startswith(where + ".") for key in self.overrides)
        return "on the command line" if given else f"in {self.source}"

    def top_level(self) -> dict[str, Any]:
        if "out" in self.tree and not {"policy", "data", "generator"} & set(self.tree):
            raise ConfigError(f"{self.source} says what to collect, not what to train: genrl collect {self.source}")
        name = self.tree.get("name")
        known = top_level(name if isinstance(name, str) else self.source.stem, kind_of(self.tree))
        return self.arguments(known, False, self.tree, "")

    def arguments(
        self, known: dict[str, Parameter], takes_any: bool, given: Mapping[str, Any], where: str, owner: str = ""
    ) -> dict[str, Any]:
        for name in given:
            if name not in known and not takes_any:
                raise ConfigError(self.unknown(str(name), known, where))
        missing = [p.name for p in known.values() if p.default is REQUIRED and p.name not in given]
        if missing:
            keys = ", ".join(repr(_join(where, name)) for name in missing)
            raise ConfigError(f"missing {keys} in {self.source}{owner and f' (argument of {owner})'}")
        complete = {}
        for parameter in known.values():
            key = _join(where, parameter.name)
            value = given[parameter.name] if parameter.name in given else to_plain(parameter.default)
            if parameter.name in given or isinstance(value, dict):
                complete[parameter.name] = self.value(value, parameter, key)
            elif value is not UNWRITABLE:
                complete[parameter.name] = value
        extra = {k: self.value(v, Parameter(k), _join(where, k)) for k, v in given.items() if k not in known}
        return complete | extra

    def value(self, value: Any, parameter: Parameter, where: str) -> Any:
        hint, default = parameter.hint, parameter.default
        settings = settings_type(hint)
        if settings is not None and not isinstance(value, Mapping) and value not in (None, default):
            raise ConfigError(f"{where} = {value!r} {self.place(where)}; expected keys of {settings.__name__} below it")
        if isinstance(value, str) and is_import_path(value) and _wants_part(hint):
            value = {"class_path": value}
        if isinstance(value, Mapping):
            return self.mapping(value, parameter, where)
        if isinstance(value, (list, tuple)) and contains_part(value):
            return [self.value(v, Parameter("", item_hint(hint, i)), f"{where}.{i}") for i, v in enumerate(value)]
        if value is None and default is None:  # `x: int = None` is common
            return None
        try:
            return to_plain(check_value(value, hint), keep=value)
        except ValueError as error:
            raise ConfigError(f"{where} = {value!r} {self.place(where)}; expected {type_name(hint)}") from error

    def mapping(self, value: Mapping[str, Any], parameter: Parameter, where: str) -> Any:
        if "class_path" in value:
            return self.part(value, parameter.hint, where)
        default = to_plain(parameter.default)
        if isinstance(default, dict) and "class_path" in default:  # some arguments of the default part
            return self.part(merge(default, {"init_args": dict(value)}), parameter.hint, where)
        settings = settings_type(parameter.hint)
        if settings is not None:
            return self.arguments(*parameters(settings), value, where, settings.__name__)
        if (
            part_types(parameter.hint)
            and dict not in union_members(parameter.hint)
            and item_hint(parameter.hint) is Any
        ):
            raise ConfigError(f"{where} {self.place(where)} needs a class_path; expected {type_name(parameter.hint)}")
        if contains_part(value) or item_hint(parameter.hint) is Any or part_types(item_hint(parameter.hint)):
            inner = item_hint(parameter.hint)
            return {str(k): self.value(v, Parameter(str(k), inner), _join(where, str(k))) for k, v in value.items()}
        try:
            return to_plain(check_value(dict(value), parameter.hint), keep=value)
        except ValueError as error:
            raise ConfigError(
                f"{where} = {dict(value)!r} {self.place(where)}; expected {type_name(parameter.hint)}"
            ) from error

    def part(self, value: Mapping[str, Any], hint: Any, where: str) -> dict[str, Any]:
        others = [str(key) for key in value if key not in ("class_path", "init_args")]
        if others:
            raise ConfigError(
                f"{where} {self.place(where)} has {', '.join(map(repr, others))} beside class_path; "
                "arguments of the class go below init_args"
            )
        factory = import_object(value["class_path"], f"{where} {self.place(where)}")
        wanted = lacks_protocol(factory, hint)
        if wanted:
            raise ConfigError(f"{where} {self.place(where)} is {value['class_path']}; expected {wanted}")
        given = value.get("init_args") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}.init_args {self.place(where)} is {given!r}; expected a mapping of arguments")
        known, takes_any = parameters(factory)
        arguments = self.arguments(known, takes_any, given, where, value["class_path"].rpartition(".")[2])
        return {"class_path": value["class_path"], "init_args": arguments}

    def unknown(self, name: str, known: Mapping[str, Parameter], where: str) -> str:
        key = _join(where, name)
        everywhere = [k for k, _, _ in _listing(self.tree, top_level("run", kind_of(self.tree)), "", strict=False)]
        same = [k for k in everywhere if k.rpartition(".")[2] == name and k != key]
        near = [_join(where, best) for best in difflib.get_close_matches(name, known, 1, 0.6)]
        best = same or near or difflib.get_close_matches(key, everywhere, 1, 0.8)
        hint = f"did you mean {best[0]!r}?" if best else f"allowed here: {', '.join(known) or 'nothing'}"
        return f"unknown key {key!r} {self.place(key)}; {hint}"


def _listing(
    tree: Mapping[str, Any], known: Mapping[str, Parameter], where: str, strict: bool = True
) -> Iterator[tuple[str, Parameter, Any]]:
    for parameter in known.values():
        value = tree.get(parameter.name, parameter.default)
        key = _join(where, parameter.name)
        yield key, parameter, value
        yield from _listing_inside(value, parameter.hint, key, strict)


def _listing_inside(value: Any, hint: Any, key: str, strict: bool) -> Iterator[tuple[str, Parameter, Any]]:
    if not isinstance(value, Mapping):
        return
    settings = settings_type(hint)
    if "class_path" in value:
        try:
            known, _ = parameters(import_object(value["class_path"], key))
        except ConfigError:
            if strict:
                raise
            return
        yield from _listing(value.get("init_args") or {}, known, key, strict)
    elif settings is not None:
        yield from _listing(value, parameters(settings)[0], key, strict)
    else:
        for name, item in value.items():
            if contains_part(item):
                yield _join(key, str(name)), Parameter(str(name), item_hint(hint)), item
                yield from _listing_inside(item, item_hint(hint), _join(key, str(name)), strict)


# ---------------------------------------------------------------------------------------------------- building


def _protocol(part: str) -> Any:
    module, _, name = PROTOCOLS[part].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return Part


def _build(value: Any, hint: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        factory = settings_type(hint)
        given: Mapping[str, Any] = value
        if "class_path" in value:
            factory, given = import_object(value["class_path"], where), value.get("init_args") or {}
        if factory is not None:
            hints = {name: parameter.hint for name, parameter in parameters(factory)[0].items()}
            arguments = {name: _build(v, hints.get(name, Any), _join(where, name)) for name, v in given.items()}
            try:
                return factory(**arguments)
            except (ValueError, TypeError, OSError, ImportError) as error:
                named = str(error).startswith(f"{where}.")
                raise ConfigError(str(error) if named else f"{where}: {error}") from error
        if contains_part(value):
            return {name: _build(v, item_hint(hint), _join(where, name)) for name, v in value.items()}
    elif isinstance(value, list) and contains_part(value):
        items = [_build(v, item_hint(hint, i), f"{where}.{i}") for i, v in enumerate(value)]
        return tuple(items) if tuple in (getattr(m, "__origin__", m) for m in union_members(hint)) else items
    return value if value is None else check_value(copy.deepcopy(value), hint)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wants_part(hint: Any) -> bool:
    members = union_members(hint)
    return str not in members and Path not in members and bool(part_types(hint))
