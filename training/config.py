"""Strict configuration: dataclass defaults <- YAML file <- command line; keys of all scripts.

    @dataclass
    class Optim:
        lr: float = 3e-4
        betas: tuple[float, float] = (0.9, 0.999)

    @dataclass
    class Config:
        optim: Optim = field(default_factory=Optim)          # a section is a dataclass

    config = load_config(Config, "configs/demo.yaml", ["optim.lr=1e-4"])

Reads one YAML file and writes nothing. Every error is a ValueError that names the file (or the
command line), the key, what was found and what was expected. YAML itself reads only lists,
mappings, true, false, yes, no, on, off and null. All else is text, read by the type of the field:

    float    1e-4, 3; not nan, not infinite
    int      whole numbers, also written 1e6 or 2.0; not 1.5
    bool     true and false; not 0 and 1
    str      any text; yes, no, on, off, true, false and null need quotes
    Literal  one of the texts of the Literal
    A | B    the first type, in the order of the annotation, that accepts the value
    tuple[T, U], tuple[T, ...], dict[str, T]

So 010 is 10, and 1:30 is no number (usual YAML 1.1 reads 8 and 90).
"""

import dataclasses
import difflib
import json
import math
import re
import reprlib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from training.files import read_text
from training.problems import refuse

MOST_YAML_BYTES = 1 << 20    # of a config; ours have 2 KB
MOST_LISTED = 20             # problems of a config
MOST_STEPS = 10**12          # of a run: a thousand a second for 30 years
MOST_LR = 1e3                # far above any that trains
MOST_PROFILED = 50           # steps of a trace, which is in memory up to its end: MBs a step
# Values in messages: a file of a few bytes of YAML can hold a value that prints without end.
SHORT = reprlib.Repr()
SHORT.maxstring = 200
SHORT.maxother = 200
SHORT.maxlist = 12
SHORT.maxlevel = 2


def load_config(cls, path=None, overrides=(), flags=None):
    """Make a configuration from defaults, a YAML file and the command line.

    Args:
        cls:       dataclass with a field per key, each with a default; a field that is a dataclass
            is a section.
        path:      YAML file; None: defaults only. A key that it lacks keeps its default.
        overrides: texts "section.key=value", whose values are YAML; the last one for a key wins.
        flags:     {"section.key": text, or None if not given}, of keys that have an option of their
            own, such as --data. They win over all; a field of type text takes the text unparsed.
    Returns: an instance of cls.
    Raises: ValueError, listing all keys that are unknown or whose value does not fit their type.
    """
    raw = {} if path is None else _read_yaml(path)
    origins = {}                        # dotted key -> where its value came from, for messages
    for text in overrides:
        dotted, value = _split_override(text, cls)
        origins[dotted] = f"command line, {text!r}"
        _put(raw, dotted, _parse(value, origins[dotted]), origins[dotted])
    for dotted, text in (flags or {}).items():
        if text is None:
            continue
        given = f"{dotted}={text}"
        origins[dotted] = f"command line, {given!r}"
        value = text if _takes_text(cls, dotted) else _parse(text, origins[dotted])
        _put(raw, dotted, value, origins[dotted])
    problems = []
    config = _make_section(cls, raw, "", str(path or "configuration"), origins, cls, problems)
    refuse(problems, most=MOST_LISTED)
    return config


def key(default, *, help="", may_change=False, per_host=False, flag=None, **limits):
    """A field of a dataclass that says everything about a key of a config.

        lr: float = key(3e-4, least=0, most=1e3, help="learning rate")

    Args:
        default: its value where it is not given.
        help: what it means, with its unit, for --help.
        may_change: whether a resumed run may have another value.
        per_host: whether it may differ between hosts.
        flag: an option of the command line that sets it, such as "--data".
        limits: of a number, or of each number of a list: least and most, which it may be; above
            and below, which it may not be."""
    unknown = set(limits) - {"least", "most", "above", "below"}
    if unknown:
        raise TypeError(f"key() got {', '.join(unknown)}; expected least, most, above or below")
    metadata = dict(help=help, may_change=may_change, per_host=per_host, flag=flag)
    return dataclasses.field(default=default, metadata={**metadata, **limits})


def key_fields(cls) -> dict[str, dataclasses.Field]:
    """{"section.key": its field, with what `key` says of it} of all keys of a configuration.

    cls: its dataclass. A section in a section counts as one key."""
    fields = {}
    for section in dataclasses.fields(cls):
        kind = types_of(cls)[section.name]
        if not dataclasses.is_dataclass(kind):      # a key of no section
            fields[section.name] = section
            continue
        for field in dataclasses.fields(kind):
            fields[f"{section.name}.{field.name}"] = field
    return fields


def keys_that(cls, mark) -> tuple[str, ...]:
    """The keys of a configuration that `key` gave a mark, such as "may_change"."""
    return tuple(name for name, field in key_fields(cls).items() if field.metadata.get(mark))


def config_to_dict(config) -> dict:
    """Nested dict of plain types (tuples become lists), fit for a checkpoint and for YAML."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_items(config, ignore=()) -> dict:
    """{"section.key": plain value} of all keys except those to ignore.

    config: a configuration, or what config_to_dict made of one.
    """
    nested = config if isinstance(config, dict) else config_to_dict(config)
    items = {}
    for section, value in nested.items():
        if not isinstance(value, dict):     # a key of no section
            items[section] = value
            continue
        for name, item in value.items():
            items[f"{section}.{name}"] = item
    return {name: item for name, item in items.items() if name not in ignore}


def config_differences(former, config, ignore=()) -> list[str]:
    """List the differences between the configuration of a former run and that of now.

    Args:
        former: a configuration, or what config_to_dict made of one. A key that it lacks, as you
            have added it since, counts as its default.
        config: the configuration now.
        ignore: dotted keys.
    Returns: list of "section.key: before -> now"; `now` is (absent) for a key that there is no
        longer.
    """
    before = config_items(type(config)(), ignore) | config_items(former, ignore)
    now = config_items(config, ignore)
    differences = []
    for name, value in before.items():
        if name not in now:
            differences.append(f"{name}: {_show(value)} -> (absent)")
        elif now[name] != value:
            differences.append(f"{name}: {_show(value)} -> {_show(now[name])}")
    return differences


def dump_yaml(config) -> str:
    """The configuration as YAML text that load_config reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, default_flow_style=None,
                          width=100)


# ---- keys that all training scripts share ----

StopSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"]   # a guard passes these to its rank

@dataclass
class CommonTraining:
    """The keys of section `training` that mean the same in every script."""
    accum: int = key(1, least=1, help="micro-batches per rank and optimizer step")
    # A resumed run may give it: it is compared with the checkpoint's number.
    micro_batches: int | None = key(None, least=1, may_change=True,
                                    help="or: those of all ranks together; accum is not used then")
    num_workers: int = key(0, least=0, most=256, may_change=True, per_host=True,
                           flag="--num_workers",
                           help="processes that prepare batches, per rank")
    log_freq: int = key(10, least=1, may_change=True, help="steps between rows of metrics.jsonl")
    snapshot_minutes: float = key(0.0, least=0, may_change=True,
                                  help="at most, from a checkpoint to the next; 0: no limit")
    keep_last: int = key(2, least=1, may_change=True,
                         help="checkpoints that are kept: last.pt, last-1.pt, ...")
    max_bad_steps: int = key(10, least=0, may_change=True,
                             help="most steps in a row with a nan or infinite loss or gradient: "
                                  "they are skipped, one more ends the run")
    stop_signals: tuple[StopSignal, ...] = key(("SIGTERM", "SIGUSR1", "SIGINT"), may_change=True,
                                               help="the run saves and stops")
    patience: int | None = key(None, least=1,
                               help="evaluations without improvement that stop the run early")
    profile: str | None = key(None, may_change=True,
                              help="10:13 makes a trace of steps 10 to 13, for ui.perfetto.dev")
    seed: int = key(0, least=0, help="of all random draws")


@dataclass
class CommonOptim:
    """Scripts add lr (at base_global_batch) and warmup (linear, in steps); `scale` scales both."""
    name: Literal["adamw", "muon"] = key("adamw", help="see training/optimizer.py")
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = key(
        "none", help="of lr and warmup with the global batch; {cap: 4}: linear up to 4 times")
    base_global_batch: int | None = key(None, least=1,
                                        help="that lr was chosen for; unit: see --plan")
    decay: Literal["none", "linear", "cosine", "wsd", "noam"] = key(
        "none", help="of the learning rate; wsd: linear in a last part of the run; noam: with "
                     "1 / sqrt(step) after the warm-up")
    decay_steps: float | None = key(None, above=0,
                                    help="last steps that decay; below 1: fraction of n_iters; "
                                         "null: all after the warm-up, for wsd a fifth of n_iters")
    min_lr: float = key(0.0, least=0, help="where the decay ends; like lr: at base_global_batch")
    grad_clip: float = key(1.0, least=0, help="largest norm of the gradient; 0: no clipping")
    betas: tuple[float, float] = key((0.9, 0.999), least=0, below=1, help="of AdamW")
    eps: float = key(1e-8, above=0, help="of AdamW")
    weight_decay: float = key(0.0, least=0, flag="--weight_decay",
                              help="share of a weight that a step takes, times lr")


@dataclass
class CommonMemory:
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = key(
        True, help="true: bfloat16 if the device computes in it, else float32")
    max_memory_per_gpu: float | None = key(None, above=0, most=1, may_change=True, per_host=True,
                                           help="fraction of the device's memory, not GB")


@dataclass
class CommonMonitoring:
    watchdog_minutes: float = key(30.0, least=0, may_change=True,
                                  help="without progress, until the run is ended; 0: off")
    tensorboard: bool = key(False, may_change=True, help="curves in RUN_DIR/tensorboard")
    wandb: dict[Literal["project", "name", "mode"], str] | None = key(
        None, may_change=True, help="Weights & Biases: {project, name, mode}, each optional")
    check_sync_every: int = key(1000, least=0, may_change=True,
                                help="steps between comparisons of the ranks' weights; 0: off")
    log_gradients: bool = key(False, may_change=True,
                              help="each log_freq steps, the norm per layer, before clipping")
    log_weights: bool = key(False, may_change=True, help="the same of the weights")


@dataclass
class DdpSection:
    find_unused_parameters: bool = key(False, help="option of DistributedDataParallel")
    gradient_as_bucket_view: bool = key(True, help="option of DistributedDataParallel")


def check_common(config) -> list[str]:
    """Texts on values of the keys of all scripts that do not fit each other, or no `key` can limit.

    A script's check_config adds texts on its own keys, and gives them all to `refuse`."""
    optim = config.optim
    problems = []
    if optim.scale != "none" and not optim.base_global_batch:
        problems.append(f"optim.scale is {optim.scale} and optim.base_global_batch "
                        f"{optim.base_global_batch}; expected the global batch that lr was chosen "
                        "for")
    if isinstance(optim.scale, dict) and not (list(optim.scale) == ["cap"]
                                              and optim.scale["cap"] >= 1):
        problems.append(f"optim.scale is {optim.scale}; expected none, linear, sqrt or {{cap: N}} "
                        "with N of at least 1")
    ends = optim.decay not in ("none", "noam")
    if optim.decay_steps is not None and not ends:
        problems.append(f"optim.decay_steps is {optim.decay_steps} with optim.decay "
                        f"{optim.decay}; expected decay linear, cosine or wsd. Without one of "
                        "these give optim.decay_steps=null")
    if optim.min_lr > 0 and not ends:
        problems.append(f"optim.min_lr is {optim.min_lr} with optim.decay {optim.decay}; expected "
                        "a decay (linear, cosine or wsd), which ends there. Without one of these "
                        "give optim.min_lr=0")
    elif optim.min_lr > 0 and optim.min_lr > optim.lr:
        problems.append(f"optim.min_lr is {optim.min_lr} and optim.lr {optim.lr}; expected at most "
                        "lr")
    if config.training.profile is not None:
        try:
            profiled_steps(config.training.profile)
        except ValueError as error:
            problems.append(str(error))
    return problems


def profiled_steps(text) -> tuple[int, int]:
    """First and last step of a training.profile such as "10:13". Raises: ValueError."""
    numbers = re.fullmatch(r"([1-9]\d{0,11}):([1-9]\d{0,11})", text)
    if numbers:
        first, last = map(int, numbers.groups())
        if first <= last < first + MOST_PROFILED:
            return first, last
    raise ValueError(f"training.profile is {text!r}; expected the first and the last step of a "
                     f"trace, such as 10:13, at most {MOST_PROFILED} steps")


def refuse_config(problems) -> None:
    """Raise ValueError with these texts on a configuration, a line each; return if there is none.
    """
    refuse([f"config: {text}." for text in problems], most=MOST_LISTED)


# ---- YAML ----

class _Loader(yaml.SafeLoader):
    """YAML in which numbers and dates are text, and each key of a mapping comes once."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            if name.value in seen and name.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"found the key {name.value!r} again; expected "
                                                   "each key once", problem_mark=name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers
             if tag.rpartition(":")[2] in ("bool", "null", "merge")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}


def _parse(text, where):
    """The value of a YAML text. where: the source of the text, for messages."""
    try:
        return _Loader(text).get_single_data()   # like yaml.safe_load
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: {getattr(error, 'problem', None) or error}. This is not "
                         "valid YAML as expected (section:, then indented key: value lines; "
                         "blanks, no tabs).") from None


def _read_yaml(path):
    try:
        text = read_text(path, MOST_YAML_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}. Expected a YAML "
                         f"configuration. Check the path (relative to {Path.cwd()}).") from None
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {_show(raw)} at the top level; expected sections, as in "
                         "'optim: {lr: 1e-4}'.")
    return raw


def _split_override(text, cls):
    """(dotted key, text of the value) of "section.key=value". Raises: ValueError."""
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted:
        raise ValueError(f"command line: found {text!r}; expected section.key=value without "
                         f"blanks around '=', such as {names_of_keys(cls)[0]}=...")
    if dataclasses.is_dataclass(types_of(cls).get(dotted)):
        raise ValueError(f"command line, {text!r}: {dotted!r} is a section; expected one of its "
                         "keys.")
    return dotted, value


def _put(raw, dotted, value, where):
    """Put value at the dotted key into the nested dict raw."""
    *sections, name = dotted.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: {section!r} is {_show(raw)}, in the YAML file or by "
                             "another override; expected a section.")
    raw[name] = value


# ---- dataclasses ----

def types_of(cls):
    """{name of a field: its type}; the type of a section is a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def names_of_keys(cls, prefix=""):
    """Dotted names of all keys, including those in sections."""
    names = []
    for name, kind in types_of(cls).items():
        dotted = prefix + name
        names += names_of_keys(kind, dotted + ".") if dataclasses.is_dataclass(kind) else [dotted]
    return names


def _takes_text(cls, dotted):
    """Is a key of type str, or str | None?"""
    for name in dotted.split("."):
        cls = types_of(cls)[name]
    return cls is str or str in typing.get_args(cls)


def _unknown(root, cls, name, prefix, where):
    """Error text for a key that section cls does not have.

    It suggests the most similar key of this section, else one of another section if it has just
    this name: one that is merely like it would be a wrong hint."""
    here = list(types_of(cls))
    meant = [prefix + near for near in difflib.get_close_matches(str(name), here, 1)]
    if not meant:
        meant = [dotted for dotted in names_of_keys(root) if dotted.rpartition(".")[2] == name]
    advice = f"Known here: {', '.join(here)}."
    if meant:
        advice = f"Did you mean {' or '.join(map(repr, meant))}?"
    kind = "key" if prefix else "section or key"
    return f"{where}: unknown {kind} {prefix + str(name)!r}. {advice}"


def _make_section(cls, raw, prefix, path, origins, root, problems):
    """Instance of the dataclass cls from a dict as YAML gave it.

    Args:
        prefix: "" or "section.", to put before its keys.
        path: of the file, for messages.
        origins: what to say instead for keys from the command line.
        root: dataclass of the whole configuration.
        problems: list of error texts, to which this function appends.
    """
    kinds = types_of(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in raw.items():
        dotted = f"{prefix}{name}"
        where = _origin(dotted, origins, path)
        if name not in kinds:
            problems.append(_unknown(root, cls, name, prefix, where))
        elif not dataclasses.is_dataclass(kinds[name]):
            try:
                values[name] = _convert(value, kinds[name], f"{where}: {dotted}")
                _check_range(values[name], fields[name], f"{where}: {dotted}")
            except ValueError as error:
                problems.append(f"{error}.")
        elif isinstance(value, dict):
            values[name] = _make_section(kinds[name], value, dotted + ".", path, origins, root,
                                         problems)
        else:
            problems.append(f"{where}: section {dotted!r} is {_show(value)}; expected 'key: "
                            "value' lines under it. For its defaults leave the section out.")
    return cls(**values)


def _origin(dotted, origins, path):
    """Where a key, or one in the section of this name, was given: on the command line or in the
    file."""
    for given, text in origins.items():
        if f"{given}.".startswith(f"{dotted}."):
            return text
    return path


# ---- values ----

def _show(value):
    if value is None:
        return "nothing (null)"
    return SHORT.repr(value)


def _name_type(kind):
    """The name of a type, in words for somebody who edits a file."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name_type(member) for member in args)
    if origin is typing.Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        items = [_name_type(item) for item in args if item is not Ellipsis]
        return f"a list, each {items[0]}" if Ellipsis in args else f"[{', '.join(items)}]"
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text",
             dict: "a mapping {key: value}", type(None): "null"}
    return names[origin or kind]


def _convert(value, kind, place):
    """Convert a value of YAML to the annotated type.

    place: what the value is, for messages: "FILE: section.key". Raises: ValueError, the sentence
    on what does not fit, without its full stop."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_to_one(value, args, place)
    if origin is typing.Literal and value in args:
        return value
    if kind in (float, int):
        number = _number(value, kind)
        if number is not None:
            return number
    elif kind in (bool, str, type(None)):
        if type(value) is kind:
            return value
    elif origin is tuple and isinstance(value, (tuple, list)):
        kinds = args[:1] * len(value) if Ellipsis in args else args
        if len(value) == len(kinds):
            return tuple(_convert(item, item_kind, f"{place}[{number}]")
                         for number, (item, item_kind) in enumerate(zip(value, kinds)))
    elif origin is dict and isinstance(value, dict):
        return {_convert(name, args[0], f"{place}: key {_show(name)}"):
                _convert(item, args[1], f"{place}[{_show(name)}]") for name, item in value.items()}
    quotes = ". Quote it" if kind is str and isinstance(value, bool) else ""
    raise ValueError(f"{place} is {_show(value)}; expected {_name_type(kind)}{quotes}")


def _convert_to_one(value, kinds, place):
    """The value as the first of the kinds that accepts it."""
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1 and isinstance(value, (dict, list, tuple)):
        return _convert(value, others[0], place)   # its error names the part that does not fit
    for kind in kinds:
        try:
            return _convert(value, kind, place)
        except ValueError:
            continue
    expected = " or ".join(map(_name_type, kinds))
    raise ValueError(f"{place} is {_show(value)}; expected {expected}")


def _check_range(value, field, name):
    """Refuse a number, or a list with one, outside the limits that `key` gave the field."""
    limits = field.metadata
    is_list = isinstance(value, tuple)
    numbers = list(value) if is_list else [value]
    shown = numbers if is_list else value   # as it is written
    for number in numbers:
        if type(number) not in (int, float):
            continue
        is_inside = (limits.get("least", number) <= number <= limits.get("most", number)
                     and limits.get("above", -math.inf) < number < limits.get("below", math.inf))
        if not is_inside:
            raise ValueError(f"{name} is {_show(shown)}; expected {_range_text(limits)}")


def _range_text(limits):
    """The limits of a key in words: "at least 0 and below 1"."""
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    texts = []
    for name, text in words.items():
        if name in limits:
            limit = limits[name]
            texts.append(f"{text} {limit:g}" if isinstance(limit, float) else f"{text} {limit:,}")
    return " and ".join(texts)


def _number(value, kind):
    """Read a number, or the text of one, as int or float. None if it is neither, or is nan,
    infinite, or a whole number that 64 bits do not hold."""
    if type(value) not in (int, float, str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    if kind is float:
        return number
    if not number.is_integer() or abs(number) > 2**63:
        return None
    try:
        whole = int(value)   # exact for large numbers, too
    except ValueError:       # int() does not read the texts 1e6 and 2.0
        whole = int(number)
    return whole if -2**63 <= whole < 2**63 else None
