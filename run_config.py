"""Strict configuration: dataclass defaults <- YAML file <- command line. It knows no key.

    @dataclass
    class Optim:
        lr: float = 3e-4
        betas: tuple[float, float] = (0.9, 0.999)

    @dataclass
    class Config:
        optim: Optim = field(default_factory=Optim)          # a section is a dataclass

    config = load_config(Config, "configs/demo.yaml", ["optim.lr=1e-4"])

Reads one YAML file; writes nothing. Every refusal is a ValueError that names the file (or the command line),
the key, what was found and what was expected. How values are read, by the type of the field:

    float    1e-4 too, which YAML 1.1 hands over as text; whole numbers; not nan, not infinite
    int      whole numbers, also written 1e6 or 2.0; not 1.5
    bool     true and false (YAML 1.1 reads yes, no, on, off as these too); not 0 and 1
    str      text only: a number or yes/no/on/off needs quotes
    Literal  one of the values, of the same type
    A | B    the first member, in the order of the annotation, that takes the value; None for Optional
    list[T], tuple[T, U], tuple[T, ...], dict[str, T], and plain list, tuple, dict
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from pathlib import Path

import yaml


def load_config(cls, path=None, overrides=()):
    """Instance of the dataclass cls from a YAML file (None: defaults only) and strings "section.key=value".

    Values of overrides are parsed as YAML; the last one for a key wins. Keys that are given nowhere keep the
    dataclass default. A ValueError raised by a __post_init__ is passed on with the name of its section.
    """
    raw = {} if path is None else _read_yaml(path)
    given_as = {}                                     # dotted key -> the override as typed, for messages
    for text in overrides:
        dotted, equals, value = text.partition("=")
        dotted = dotted.strip()
        if not equals or not dotted:
            raise ValueError(f"command line: found {text!r}; expected section.key=value without blanks "
                             f"around '=', such as {_names(cls)[0]}=...")
        _override(cls, raw, dotted, _parse(value, f"command line, {text!r}"), text, path)
        given_as[dotted] = f"command line, {text!r}"
    return _section(cls, raw, "", str(path) if path is not None else "configuration", given_as)


def config_to_dict(config):
    """Nested dict of plain types (tuples become lists), fit for a checkpoint and for YAML."""
    plain = lambda v: ({k: plain(x) for k, x in v.items()} if isinstance(v, dict) else
                       [plain(x) for x in v] if isinstance(v, (list, tuple)) else v)
    return plain(dataclasses.asdict(config))


def config_items(config, ignore=()):
    """{"section.key": plain value} of all keys but those to ignore."""
    return {f"{section}.{key}": value for section, keys in config_to_dict(config).items()
            for key, value in keys.items() if f"{section}.{key}" not in ignore}


def config_differences(old, new, ignore=()):
    """What differs between two nested dicts of config_to_dict: list of "section.key: old -> new".

    ignore: dotted keys, or names of whole sections. A key that one side lacks is shown as (absent).
    """
    absent, found = object(), []
    show = lambda v: "(absent)" if v is absent else repr(v)

    def compare(a, b, dotted):
        if dotted in ignore:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for key in [*a, *(k for k in b if k not in a)]:
                compare(a.get(key, absent), b.get(key, absent), f"{dotted}.{key}" if dotted else str(key))
        elif a != b or isinstance(a, bool) != isinstance(b, bool):
            found.append(f"{dotted}: {show(a)} -> {show(b)}")

    compare(old, new, "")
    return found


def dump_yaml(config):
    """The configuration as YAML text that load_config reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, default_flow_style=None, width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors."""

    def error(self, message):   # raised, so that it is printed once and not by every rank
        raise ValueError(f"command line: {message}. See --help.")


# ---- YAML ----

def _refuse_repeated_keys(node, visited):
    """YAML itself would silently take the last. visited: ids of nodes, as an alias may lead back to its anchor."""
    if id(node) in visited or not isinstance(node, yaml.CollectionNode):
        return
    visited.add(id(node))
    seen = {}
    for child in node.value:
        key, child = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"found the key '{key.value}' again (first in line "
                                                   f"{seen[key.value]}); expected each key once. Remove one",
                                           problem_mark=key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        _refuse_repeated_keys(child, visited)


def _parse(text, where):
    try:
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), set())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: {problem}. This is not valid YAML as expected (section:, then "
                         f"indented key: value lines; blanks, no tabs).") from None
    except (ValueError, TypeError) as error:             # e.g. the date 2020-13-45, or a list as a key
        raise ValueError(f"{where}: {error}. YAML cannot read one of the values: quote it.") from None


def _read_yaml(path):
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {what}; expected a YAML configuration. Check the path (relative to "
                         f"{Path.cwd()}).")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a readable YAML file.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); expected YAML. Is it the right "
                         "file?") from None
    raw = _parse(text, str(path))
    if raw is None:
        raise ValueError(f"{path} is empty; expected sections with keys. For the defaults, give no file or "
                         "one key.")
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {_show(raw)} at the top level; expected sections, as in 'optim: "
                         f"{{lr: 1e-4}}'.")
    return raw


# ---- dataclasses ----

def _fields(cls):
    """name -> (type, dataclass of the section or None)."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], hints[f.name] if dataclasses.is_dataclass(hints[f.name]) else None)
            for f in dataclasses.fields(cls) if f.init}


def _names(cls, prefix=""):
    names = []
    for name, (_, section) in _fields(cls).items():
        names += _names(section, f"{prefix}{name}.") if section else [prefix + name]
    return names


def _unknown(root, cls, key, prefix, where):
    """ValueError for a key that cls lacks, with the nearest name: here, else in another section."""
    here = list(_fields(cls))
    near = [prefix + n for n in difflib.get_close_matches(str(key), here, 1)]
    if not near:
        everywhere = {n.rpartition(".")[2]: n for n in reversed(_names(root))}
        near = [everywhere[n] for n in difflib.get_close_matches(str(key), list(everywhere), 1, 0.75)]
    advice = f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(here)}."
    kind = "section or key" if not prefix else "key"
    return ValueError(f"{where}: unknown {kind} {prefix + str(key)!r}. {advice}")


def _override(cls, raw, dotted, value, text, path):
    """Put value at dotted into the nested dict raw, refusing paths that the dataclass lacks."""
    node, owner, prefix, parts = raw, cls, "", dotted.split(".")
    where = f"command line, {text!r}"
    for part in parts[:-1]:
        fields = _fields(owner)
        if part not in fields:
            raise _unknown(cls, owner, part, prefix, where)
        prefix += part + "."
        owner = fields[part][1]
        if owner is None:
            raise ValueError(f"{where}: {prefix[:-1]!r} is a key, not a section; expected "
                             f"{prefix[:-1]}=value, where the value may be YAML such as "
                             f"'{{{dotted[len(prefix):]}: ...}}'.")
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ValueError(f"{path}: section {prefix[:-1]!r} is {_show(node)}; expected 'key: value' lines "
                             "under it.")
    fields = _fields(owner)
    if parts[-1] not in fields:
        raise _unknown(cls, owner, parts[-1], prefix, where)
    if fields[parts[-1]][1]:
        raise ValueError(f"{where}: {dotted!r} is a section; expected one of its keys, such as "
                         f"{_names(fields[parts[-1]][1], dotted + '.')[0]}=...")
    node[parts[-1]] = value


def _section(cls, raw, prefix, where, given_as, root=None):
    root = root or cls
    fields, values = _fields(cls), {}
    for key, value in raw.items():
        if key not in fields:
            raise _unknown(root, cls, key, prefix, where)
        dotted, (kind, section) = f"{prefix}{key}", fields[key]
        if section:
            if not isinstance(value, dict):
                raise ValueError(f"{where}: section {dotted!r} is {_show(value)}; expected 'key: value' "
                                 f"lines under it. For its defaults leave the section out.")
            values[key] = _section(section, value, dotted + ".", where, given_as, root)
        else:
            try:
                values[key] = _convert(value, kind)
            except ValueError as error:
                raise ValueError(f"{given_as.get(dotted, where)}: {dotted}: {error}") from None
    missing = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in values
               and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where}: nothing given for {', '.join(repr(prefix + m) for m in missing)}; "
                         f"expected a value, since there is no default.")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {prefix[:-1] + ': ' if prefix else ''}{error}") from None


# ---- values ----

def _show(value):
    if value is None:
        return "nothing (null)"
    kinds = {bool: "true/false", int: "whole number", float: "number", str: "text", dict: "mapping",
             list: "list"}
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"


def _say(kind):
    """A type as a reader of YAML would name it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_say(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join("true" if a is True else "false" if a is False else str(a) for a in args)
    if origin in (list, tuple) or kind in (list, tuple):
        items = [_say(a) for a in args if a is not Ellipsis]
        fixed = origin is tuple and Ellipsis not in args
        return f"[{', '.join(items)}]" if fixed else f"a list, each {items[0]}" if items else "a list"
    if dataclasses.is_dataclass(kind):
        return f"a mapping with the keys {', '.join(_fields(kind))}"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping",
            type(None): "null"}.get(origin or kind, str(kind))


def _convert(value, kind):
    """value as YAML gave it -> a value of the annotated type, or ValueError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    refuse = ValueError(f"found {_show(value)}; expected {_say(kind)}.")
    if kind is typing.Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for member in args:
            try:
                return _convert(value, member)
            except ValueError:
                continue
        raise refuse
    if origin is typing.Literal:
        for choice in args:
            if type(choice) is type(value) and choice == value:
                return choice
        if isinstance(value, bool) and any(isinstance(a, str) for a in args):
            raise ValueError(f"found {_show(value)}; expected {_say(kind)}. YAML reads on, off, yes and no "
                             f"without quotes as true and false: quote them.")
        near = difflib.get_close_matches(str(value), [a for a in args if isinstance(a, str)], 1)
        raise ValueError(f"{refuse}" + (f" Did you mean {near[0]!r}?" if near else ""))
    if kind in (float, int):
        return _number(value, kind, refuse)
    if kind in (bool, str, type(None)):
        if type(value) is not kind:
            raise ValueError(f"{refuse} Quote "
                             "it." if kind is str and type(value) in (bool, int, float) else f"{refuse}")
        return value
    if origin in (list, tuple) or kind in (list, tuple):
        if not isinstance(value, list):
            raise refuse
        fixed = origin is tuple and Ellipsis not in args
        if fixed and len(value) != len(args):
            raise ValueError(f"found {len(value)} values, {value!r}; expected {len(args)}: {_say(kind)}.")
        kinds = args if fixed else (args[:1] or (typing.Any,)) * len(value)
        return (origin or kind)(_convert(v, k) for v, k in zip(value, kinds))
    if origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise refuse
        key_kind, value_kind = args or (typing.Any, typing.Any)
        return {_convert(k, key_kind): _convert(v, value_kind) for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise refuse
        return _section(kind, value, "", "in this section", {})
    raise TypeError(f"a configuration field has the type {kind}, which run_config does not read")


def _number(value, kind, refuse):
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        value = float(value)                          # 1e-4: a number to everyone but YAML 1.1
    if type(value) not in (int, float) or not math.isfinite(value):
        raise refuse
    if kind is int:
        if value != int(value):
            raise refuse
        return int(value)
    return float(value)
