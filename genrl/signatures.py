"""What a class can be given: its parameters with type, default and help text; checks of plain values against types."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One argument of a class or function. `default` is `REQUIRED` where there is none."""

    name: str
    hint: Any = Any
    default: Any = REQUIRED
    help: str = ""


def parameters(factory: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    """The named parameters of a class or function, and whether it takes any other name too (`**kwargs`)."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C without a signature
        return {}, True
    hints = _hints(factory)
    helps = _helps(factory)
    factories = {}
    if dataclasses.is_dataclass(factory):
        factories = {
            field.name: field.default_factory()
            for field in dataclasses.fields(factory)
            if field.default_factory is not dataclasses.MISSING
        }
    found = {}
    takes_any = False
    for name, entry in signature.parameters.items():
        if entry.kind is entry.VAR_KEYWORD:
            takes_any = True
        elif entry.kind not in (entry.VAR_POSITIONAL, entry.POSITIONAL_ONLY):
            default = factories.get(name, entry.default)
            found[name] = Parameter(name, hints.get(name, Any), default, helps.get(name, ""))
    return found, takes_any


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    target: Any = factory
    if inspect.isclass(factory):
        target = factory if dataclasses.is_dataclass(factory) else factory.__init__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):  # a name that only type checkers import
        return {k: v for k, v in getattr(target, "__annotations__", {}).items() if not isinstance(v, str)}


def _helps(factory: Callable[..., Any]) -> dict[str, str]:
    """Help by parameter: from the docstring's sections, from strings below the fields, or from comments behind them."""
    from docstring_parser import ParseError, parse_from_object

    helps: dict[str, str] = {}
    for target in (factory, getattr(factory, "__init__", None)):
        if target is None or not getattr(target, "__doc__", None):
            continue
        try:
            parsed = parse_from_object(target)
        except (ParseError, OSError, SyntaxError, TypeError):
            continue
        for entry in parsed.params:
            for name in entry.arg_name.split(","):  # "height, width: of the picture" is about both
                text = " ".join((entry.description or "").split())
                helps.setdefault(name.strip(), _referred(text, name.strip(), factory))
    if inspect.isclass(factory):
        try:
            source = inspect.getsource(factory)
        except (OSError, TypeError):
            return helps
        for name, comment in re.findall(r"^\s+(\w+)\s*:[^#\n]*#\s*(.+)$", source, flags=re.MULTILINE):
            if not helps.get(name):
                helps[name] = comment.strip()
    return helps


def _referred(text: str, name: str, factory: Any) -> str:
    """The help where "see `Other`" stands for what `Other`, a name in the same module, says of its own `name`."""
    reference = re.match(r"see (?::\w+:)?`~?([\w.]+)`", text)
    if reference is None:
        return text
    names = vars(sys.modules.get(getattr(factory, "__module__", ""), object))
    other = names.get(reference.group(1).rpartition(".")[2])
    found = _helps(other).get(name, "") if callable(other) and other is not factory else ""
    return found.rstrip(".") + text[reference.end() :] if found else text


def union_members(hint: Any) -> tuple[Any, ...]:
    """`int | None` -> (int, NoneType); anything else -> itself in a tuple."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(hint) for inner in union_members(member))
    if typing.get_origin(hint) is typing.Annotated:
        return union_members(typing.get_args(hint)[0])
    return (hint,)


def part_types(hint: Any) -> tuple[type, ...]:
    """The classes of `hint` whose values are written as `class_path` with `init_args`: all but Python's own."""
    members = (member for member in union_members(hint) if inspect.isclass(member))
    return tuple(
        member
        for member in members
        if typing.get_origin(member) is None
        and member.__module__ not in ("builtins", "typing", "pathlib", "os")
        and not issubclass(member, enum.Enum)
    )


def settings_type(hint: Any) -> type | None:
    """The dataclass in `hint` that may be written as a plain mapping of its fields, if there is exactly one class."""
    found = part_types(hint)
    return found[0] if len(found) == 1 and dataclasses.is_dataclass(found[0]) else None


def item_hint(hint: Any, key: Any = None) -> Any:
    """The type of the values inside a dict, list or tuple type; Any where it is not said."""
    for member in union_members(hint):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if not inspect.isclass(origin) or not args:
            continue
        if issubclass(origin, Mapping) and len(args) == 2:
            return args[1]
        if origin is tuple and isinstance(key, int) and args[-1] is not Ellipsis and key < len(args):
            return args[key]
        if not issubclass(origin, Mapping):
            return args[0]
    return Any


def check_value(value: Any, hint: Any) -> Any:
    """`value` converted to the type `hint` (a list to a tuple, an int to a float); ValueError where it does not fit.

    Types that have no plain value (a class, a protocol) accept an import path where jsonargparse does; types that
    jsonargparse does not know accept everything.
    """
    if hint is Any or hint is REQUIRED:
        return value
    members = union_members(hint)
    if value is None:
        if type(None) in members or Any in members or object in members:
            return None
        raise ValueError("null is not allowed here")
    if isinstance(value, str) and str in members:  # never let a string be read as a number
        return value
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:
        return value
    try:
        return parser.parse_object({"value": value}).value
    except jsonargparse.ArgumentError as error:
        raise ValueError(str(error)) from error


def lacks_protocol(factory: Any, hint: Any) -> str | None:
    """Why the class `factory` cannot stand where `hint` is wanted; None if it may (functions are not judged).

    A protocol's methods may be optional, so a class is refused only when it has none of them.
    """
    wanted = part_types(hint)
    others = [member for member in union_members(hint) if member is not type(None) and member not in wanted]
    if not wanted or others or not inspect.isclass(factory):
        return None
    reasons = []
    for kind in wanted:
        if getattr(kind, "_is_protocol", False):
            methods = [n for n, f in _members(kind).items() if inspect.isfunction(f) and _is_interface(n)]
            if not methods or any(callable(getattr(factory, n, None)) and _defines(factory, n) for n in methods):
                return None
            reasons.append(f"{kind.__name__} (one with {', '.join(sorted(methods))})")
        elif kind.__module__.startswith(("collections", "abc")) or issubclass(factory, kind):
            return None
        else:
            reasons.append(kind.__name__)
    return " or ".join(reasons)


def _members(kind: type) -> dict[str, Any]:
    return {name: member for base in reversed(kind.__mro__[:-1]) for name, member in vars(base).items()}


def _is_interface(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


def _defines(factory: type, name: str) -> bool:
    # `type` itself has __call__, so every class seems to have it unless its own hierarchy is asked
    return any(name in vars(base) for base in factory.__mro__[:-1])


def type_name(hint: Any) -> str:
    """A type as a person would write it: `float, 'auto' or null`."""
    names = []
    for member in union_members(hint):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if member is type(None):
            names.append("null")
        elif member in (Any, object):
            names.append("any value")
        elif origin is typing.Literal:
            names.extend(repr(a) for a in args)
        elif inspect.isclass(origin) and issubclass(origin, Mapping):
            names.append(f"mapping of {type_name(args[1])}")
        elif origin is tuple and args[-1] is not Ellipsis:
            names.append("[" + ", ".join(type_name(a) for a in args) + "]")
        elif inspect.isclass(origin) and args and origin.__module__ in ("builtins", "collections.abc"):
            names.append("callable" if origin.__name__ == "Callable" else f"list of {type_name(args[0])}")
        elif part_types(member):
            names.append(f"{member.__name__} (class_path, init_args)")
        else:
            names.append(getattr(member, "__name__", str(member)))
    names = list(dict.fromkeys(names))
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
