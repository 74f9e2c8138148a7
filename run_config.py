"""Strict configuration: dataclass defaults <- YAML file <- command line; keys that scripts share.

    @dataclass
    class Optim:
        lr: float = 3e-4
        betas: tuple[float, float] = (0.9, 0.999)   # of AdamW, as is eps

    @dataclass
    class Config:
        optim: Optim = field(default_factory=Optim)          # a section is a dataclass

    config = load_config(Config, "configs/demo.yaml", ["optim.lr=1e-4"])

Reads one YAML file and writes nothing. Every refusal is a ValueError that names the file (or the
command line), the key, what was found and what was expected. How values are read, by the type of
the field:

    float    1e-4 too, which YAML 1.1 hands over as text; whole numbers; not nan, not infinite
    int      whole numbers, also written 1e6 or 2.0; not 1.5
    bool     true and false (YAML 1.1 reads yes, no, on, off as these too); not 0 and 1
    str      text only: a number or yes/no/on/off needs quotes
    Literal  one of the texts
    A | B    the first member, in the order of the annotation, that takes the value
    tuple[T, U], tuple[T, ...], dict[str, T]

010 and 1:30 are refused: YAML 1.1 would read them as 8 (octal) and 90 (to the base of 60).
"""

import argparse
import dataclasses
import difflib
import re
import signal
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml


def load_config(cls, path=None, overrides=(), flags=None):
    """Make a configuration from defaults, a YAML file and the command line.

    Args:
        cls:       dataclass with a field per key, each with a default; a field that is a dataclass
            is a section.
        path:      YAML file; None: defaults only. A key that it lacks keeps its default.
        overrides: texts "section.key=value", whose values are YAML; the last one for a key wins.
        flags:     {"section.key": text, or None where it is not given} of options of their own.
            They win over all; a field that takes text takes theirs as it is.
    Returns: an instance of cls.
    Raises: ValueError for what cannot be read as declared.
    """
    raw = {} if path is None else _read_yaml(path)
    given_as = {}                       # dotted key -> the override as typed, for messages
    for text in overrides:
        dotted, equals, value = text.partition("=")
        dotted = dotted.strip()
        if not equals or not dotted:
            raise ValueError(f"command line: found {text!r}; expected section.key=value without "
                             f"blanks around '=', such as {_names(cls)[0]}=...")
        _override(cls, raw, dotted, _parse(value, f"command line, {text!r}"), text, path)
        given_as[dotted] = f"command line, {text!r}"
    for dotted, text in (flags or {}).items():
        if text is not None:
            given_as[dotted] = f"command line, {f'{dotted}={text}'!r}"
            value = text if _takes_text(cls, dotted) else _parse(text, given_as[dotted])
            _override(cls, raw, dotted, value, f"{dotted}={text}", path)
    where = str(path) if path is not None else "configuration"
    return _make_section(cls, raw, "", where, given_as)


def config_to_dict(config):
    """Nested dict of plain types (tuples become lists), fit for a checkpoint and for YAML."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(dataclasses.asdict(config))


def config_items(config, ignore=()):
    """{"section.key": plain value} of all keys but those to ignore."""
    return {f"{section}.{key}": value for section, keys in config_to_dict(config).items()
            for key, value in keys.items() if f"{section}.{key}" not in ignore}


def config_differences(old, new, ignore=()):
    """List what differs between two configurations.

    Args:
        old, new: nested dicts as of config_to_dict.
        ignore:   dotted keys, or names of whole sections.
    Returns: list of "section.key: old -> new"; a key that one side lacks is shown as (absent).
    """
    absent, differences = object(), []

    def show(value):
        return "(absent)" if value is absent else repr(value)

    def compare(before, after, dotted):
        if dotted in ignore:
            return
        if isinstance(before, dict) and isinstance(after, dict):
            for key in [*before, *(key for key in after if key not in before)]:
                compare(before.get(key, absent), after.get(key, absent),
                        f"{dotted}.{key}" if dotted else str(key))
        elif before != after or isinstance(before, bool) != isinstance(after, bool):
            differences.append(f"{dotted}: {show(before)} -> {show(after)}")

    compare(old, new, "")
    return differences


def dump_yaml(config):
    """The configuration as YAML text that load_config reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, default_flow_style=None,
                          width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors."""

    def error(self, message):   # raised, so that it is printed once and not by every rank
        raise ValueError(f"command line: {message}. See --help.")


# ---- keys and limits that all training scripts share ----

@dataclass
class CommonTraining:
    """The keys of section `training` that mean the same in every script."""
    accum: int = 1                       # micro-steps per optimizer step
    num_workers: int = 0                 # processes that prepare batches, per rank
    log_freq: int = 10                   # steps between rows of metrics.jsonl
    keep_last: int = 2                   # checkpoints that are kept: last.pt, last-1.pt, ...
    max_bad_steps: int = 10              # in a row, with a nan or infinite loss or gradient: then
    #                                      the run ends
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")   # that end the run in good
    #                                                                    order
    patience: int | None = None          # evaluations without improvement before an early stop
    min_delta: float = 0.0               # nats (per residue, per pair) that count as improvement
    seed: int = 0


@dataclass
class CommonOptim:
    """Scripts add lr (at base_global_batch) and warmup (steps, linear), which follow scale."""
    name: Literal["adamw", "muon"] = "adamw"   # see optimizer.py
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"   # or {cap: 4}
    base_global_batch: int | None = None  # per step, in the unit of the script: see --plan
    decay: Literal["none", "linear", "cosine"] = "none"   # of the learning rate, to 0 at the end
    decay_steps: float | None = None     # over so many last steps; below 1: that share of all
    grad_clip: float = 1.0               # global norm; 0 = none
    betas: tuple[float, float] = (0.9, 0.999)   # of AdamW, as is eps
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class CommonMemory:
    # true: bfloat16 where the device computes in it
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = True
    max_memory_per_gpu: float | None = None  # not GB: share of the device's, above 0 up to 1


@dataclass
class CommonMonitoring:
    watchdog_minutes: float = 30.0       # without progress, then the run is ended; 0 = off
    tensorboard: bool = False            # curves in RUN_DIR/tensorboard
    wandb: dict[str, str] | None = None  # {project, name, mode}, each optional: Weights & Biases
    check_sync_every: int = 1000         # steps between comparisons of the weights over ranks
    timing_every: int = 50               # steps between timed ones, see step_meter.py; 0 = never
    log_gradients: bool = False          # norms by layer in rows of log_freq, of gradients before
    log_weights: bool = False            # clipping, and of weights; trackers: histograms too


@dataclass
class DdpSection:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    broadcast_buffers: bool = False      # the models have none
    bucket_cap_mb: int | None = None


LEAST = {"training": dict(batch_size=1, accum=1, num_workers=0, n_iters=1, num_epochs=1,
                          eval_freq=1, log_freq=1, snapshot_freq=1, patience=1, min_delta=0,
                          keep_last=1, max_bad_steps=0),
         "optim": dict(lr=0, warmup=0, base_global_batch=1, grad_clip=0, weight_decay=0),
         "ddp": dict(bucket_cap_mb=1), "monitoring": dict(watchdog_minutes=0, check_sync_every=0,
                                                   timing_every=0)}


def check_values(c, checks, least):
    """Refuse values that no type forbids.

    Args:
        c: the script's config.
        checks: pairs (whether it is right, what is wrong otherwise) beside those of all scripts.
        least: smallest values {section: {key: number}} beside LEAST.
    Raises: ValueError naming the key.
    """
    t, o, share = c.training, c.optim, c.memory.max_memory_per_gpu
    known = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    common = (
        (share is None or 0 < share <= 1,
         f"memory.max_memory_per_gpu is {share}; expected a share of the memory, above 0 up to 1"),
        (o.scale == "none" or o.base_global_batch,
         f"optim.scale is {o.scale} and optim.base_global_batch {o.base_global_batch}; expected "
         "the global batch that lr was chosen for"),
        (not isinstance(o.scale, dict) or (list(o.scale) == ["cap"] and o.scale["cap"] >= 1),
         f"optim.scale is {o.scale}; expected none, linear, sqrt or {{cap: N}} with N of at least "
         "1"),
        (o.decay_steps is None or o.decay != "none" and o.decay_steps > 0,
         f"optim.decay_steps is {o.decay_steps} with optim.decay {o.decay}; expected more than "
         "0 (steps, or a share of them below 1), and decay linear or cosine"),
        (set(c.monitoring.wandb or ()) <= {"project", "name", "mode"},
         f"monitoring.wandb has {', '.join(c.monitoring.wandb or ())}; expected some of project, "
         "name, mode"),
        (all(0 <= b < 1 for b in o.betas),
         f"optim.betas is {list(o.betas)}; expected 0 up to below 1"),
        (0 <= c.model.dropout < 1, f"model.dropout is {c.model.dropout}; expected 0 up to below 1"),
        (0 <= c.data.val_fraction < 1,
         f"data.val_fraction is {c.data.val_fraction}; expected 0 up to below 1"),
        (o.eps > 0, f"optim.eps is {o.eps}; expected more than 0"),
        (set(t.stop_signals) <= known,
         f"training.stop_signals is {list(t.stop_signals)}; expected names such as SIGTERM, of "
         "signals that a program may handle"))
    for right, text in (*common, *checks):
        if not right:
            raise ValueError(f"config: {text}.")
    for section in {**LEAST, **least}:
        for key, low in (LEAST.get(section, {}) | least.get(section, {})).items():
            value = getattr(getattr(c, section), key, None)
            if value is not None and value < low:
                raise ValueError(f"config: {section}.{key} is {value}; expected at least {low}.")


# ---- YAML ----

class _Misread(yaml.MarkedYAMLError):
    """Something that YAML would accept and take for something else than what was meant."""


def _check_nodes(node, visited, key=""):
    """Refuse repeated keys, of which YAML would take the last, and numbers with a hidden base.

    visited: ids of nodes, as an alias may lead back to its anchor. key: what the node belongs to.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and (":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value)):
            value = yaml.SafeLoader("").construct_object(node)
            raise _Misread(problem=f"{key}found {node.value}, which YAML 1.1 reads as {value:g}; "
                                   "expected a number without ':' and without a leading 0. Write "
                                   "it so, or quote it if it is text", problem_mark=node.start_mark)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_nodes(child, visited, key)
    elif isinstance(node, yaml.MappingNode):
        first_line = {}
        for name, child in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value != "<<":
                if name.value in first_line:
                    raise _Misread(problem=f"found the key '{name.value}' again (first in line "
                                           f"{first_line[name.value]}); expected each key once. "
                                           "Remove one", problem_mark=name.start_mark)
                first_line[name.value] = name.start_mark.line + 1
            _check_nodes(name, visited, key)
            is_text = isinstance(name, yaml.ScalarNode)
            _check_nodes(child, visited, f"{name.value}: " if is_text else key)


def _parse(text, where):
    try:
        _check_nodes(yaml.compose(text, yaml.SafeLoader), set())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        advice = "" if isinstance(error, _Misread) else (
            " This is not valid YAML as expected (section:, then indented key: value lines; "
            "blanks, no tabs).")
        raise ValueError(f"{where}{line}: {problem}.{advice}") from None
    except (ValueError, TypeError) as error:    # such as the date 2020-13-45, or a list as a key
        raise ValueError(f"{where}: {error}. YAML cannot read one of the values: "
                         "quote it.") from None


def _read_yaml(path):
    path = Path(path)
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {problem}; expected a YAML configuration. Check the path "
                         f"(relative to {Path.cwd()}).")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a readable YAML "
                         "file.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); expected YAML. Is it the "
                         "right file?") from None
    raw = _parse(text, str(path))
    if raw is None:
        raise ValueError(f"{path} is empty; expected sections with keys. For the defaults, give no "
                         "file or one key.")
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {_show(raw)} at the top level; expected sections, as in "
                         "'optim: {lr: 1e-4}'.")
    return raw


# ---- dataclasses ----

def _types(cls):
    """{name of a field: its type}; a section's is a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _names(cls, prefix=""):
    """Dotted names of all keys, those of sections included."""
    names = []
    for name, kind in _types(cls).items():
        dotted = prefix + name
        names += _names(kind, dotted + ".") if dataclasses.is_dataclass(kind) else [dotted]
    return names


def _takes_text(cls, dotted):
    """Is a key text, or text or nothing?"""
    for name in dotted.split("."):
        cls = _types(cls)[name]
    return cls is str or str in typing.get_args(cls)


def _unknown(root, cls, key, prefix, where):
    """ValueError for a key that cls lacks, with the nearest name: here, else in another section."""
    here = list(_types(cls))
    near = [prefix + name for name in difflib.get_close_matches(str(key), here, 1)]
    if not near:
        everywhere = {name.rpartition(".")[2]: name for name in reversed(_names(root))}
        near = [everywhere[name]
                for name in difflib.get_close_matches(str(key), list(everywhere), 1, 0.75)]
    advice = f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(here)}."
    kind = "section or key" if not prefix else "key"
    return ValueError(f"{where}: unknown {kind} {prefix + str(key)!r}. {advice}")


def _override(cls, raw, dotted, value, text, path):
    """Put value at dotted into the nested dict raw, refusing paths that the dataclass lacks."""
    node, owner, prefix, parts = raw, cls, "", dotted.split(".")
    where = f"command line, {text!r}"
    for part in parts[:-1]:
        kinds = _types(owner)
        if part not in kinds:
            raise _unknown(cls, owner, part, prefix, where)
        prefix += part + "."
        if not dataclasses.is_dataclass(kinds[part]):
            raise ValueError(f"{where}: {prefix[:-1]!r} is a key, not a section; expected "
                             f"{prefix[:-1]}=value, where the value may be YAML such as "
                             f"'{{{dotted[len(prefix):]}: ...}}'.")
        owner = kinds[part]
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ValueError(f"{path}: section {prefix[:-1]!r} is {_show(node)}; expected "
                             "'key: value' lines under it.")
    kinds = _types(owner)
    if parts[-1] not in kinds:
        raise _unknown(cls, owner, parts[-1], prefix, where)
    if dataclasses.is_dataclass(kinds[parts[-1]]):
        raise ValueError(f"{where}: {dotted!r} is a section; expected one of its keys, such as "
                         f"{_names(kinds[parts[-1]], dotted + '.')[0]}=...")
    node[parts[-1]] = value


def _make_section(cls, raw, prefix, where, given_as, root=None):
    """Instance of the dataclass cls from a dict as YAML gave it.

    prefix: "" or "section." in front of its keys. where: the file, for messages; given_as: for keys
    of the command line, what to say instead. root: dataclass of the whole, to find near names in.
    """
    root = root or cls
    kinds, values = _types(cls), {}
    for key, value in raw.items():
        if key not in kinds:
            raise _unknown(root, cls, key, prefix, where)
        dotted = f"{prefix}{key}"
        if dataclasses.is_dataclass(kinds[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: section {dotted!r} is {_show(value)}; expected "
                                 "'key: value' lines under it. For its defaults leave the section "
                                 "out.")
            values[key] = _make_section(kinds[key], value, dotted + ".", where, given_as, root)
        else:
            try:
                values[key] = _convert(value, kinds[key])
            except ValueError as error:
                raise ValueError(f"{given_as.get(dotted, where)}: {dotted}: {error}") from None
    return cls(**values)


# ---- values ----

def _show(value):
    """A value and its kind, as a reader of YAML would name it."""
    if value is None:
        return "nothing (null)"
    kinds = {bool: "true/false", int: "whole number", float: "number", str: "text", dict: "mapping",
             list: "list"}
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"


def _name_type(kind):
    """A type as a reader of YAML would name it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name_type(member) for member in args)
    if origin is typing.Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        items = [_name_type(item) for item in args if item is not Ellipsis]
        return f"a list, each {items[0]}" if Ellipsis in args else f"[{', '.join(items)}]"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "text",
            dict: "a mapping {key: value}", type(None): "null"}.get(origin or kind, str(kind))


def _convert(value, kind):
    """value as YAML gave it -> a value of the annotated type, or ValueError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    refusal = ValueError(f"found {_show(value)}; expected {_name_type(kind)}.")
    if origin in (typing.Union, types.UnionType):
        for member in args:
            try:
                return _convert(value, member)
            except ValueError:
                continue
        raise refusal
    if origin is typing.Literal:
        return _choose(value, args, refusal)
    if kind in (float, int):
        return _number(value, kind, refusal)
    if kind in (bool, str, type(None)):
        if type(value) is not kind:
            quote = kind is str and type(value) in (bool, int, float)
            raise ValueError(f"{refusal}{' Quote it.' if quote else ''}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise refusal
        kinds = args[:1] * len(value) if Ellipsis in args else args
        if len(value) != len(kinds):
            raise ValueError(f"found {len(value)} values, {value!r}; expected {len(kinds)}: "
                             f"{_name_type(kind)}.")
        return tuple(map(_convert, value, kinds))
    if origin is dict:
        if not isinstance(value, dict):
            raise refusal
        return {_convert(key, args[0]): _convert(item, args[1]) for key, item in value.items()}
    raise TypeError(f"a configuration field has the type {kind}, which run_config does not read")


def _choose(value, choices, refusal):
    """The choice of a Literal that equals value."""
    if value in choices:
        return value
    if isinstance(value, bool):
        raise ValueError(f"{refusal} YAML reads on, off, yes and no without quotes as true and "
                         "false: quote them.")
    near = difflib.get_close_matches(str(value), choices, 1)
    raise ValueError(f"{refusal}" + (f" Did you mean {near[0]!r}?" if near else ""))


def _number(value, kind, refusal):
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        value = float(value)                    # 1e-4: a number to everyone but YAML 1.1
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:     # nan, infinite
        raise refusal
    if kind is int and value != int(value):
        raise refusal
    if kind is int and abs(value) >= 2**63:
        raise ValueError(f"found {value}; expected at most {2**63 - 1}.")
    return kind(value)
