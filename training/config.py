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

import argparse
import dataclasses
import difflib
import json
import math
import reprlib
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from training.files import read_text

MOST_YAML_BYTES = 1 << 20    # of a config; ours have 2 KB
MOST_LISTED = 20             # problems of a config
MOST_STEPS = 10**12          # of a run: a thousand a second for 30 years
MOST_LR = 1e3                # far above any that trains
MOST_PROFILED = 50           # steps of a trace, which is in memory up to its end: MBs a step
MOST_WORKERS = 256           # processes of a rank that prepare batches
# Keys that are gone, each with the value that a run does without: the default it had, or ANY.
ANY = object()
GONE = {"training.min_delta": 0.0, "ddp.static_graph": False, "ddp.broadcast_buffers": False,
        "ddp.bucket_cap_mb": None, "data.reference_cache": ANY, "memory.structure_cache_mb": ANY,
        "monitoring.predictor": ANY}
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
    other = other_script(raw, cls)
    if problems and other:
        raise ValueError(f"{path or 'the command line'} gives keys of {other}, such as "
                         f"{', '.join(_keys_of_other(raw, cls, other)[:4])}; expected those of "
                         f"this script. Give it to {other}, or give another --config here (or "
                         "another run folder, if the file is in one).")
    if len(problems) > MOST_LISTED:
        problems[MOST_LISTED:] = [f"and {len(problems) - MOST_LISTED:,} more problems."]
    if problems:
        raise ValueError("\n".join(problems))
    return config


def read_fields(cls, values, source):
    """Make a dataclass from what a file of JSON or of torch.save holds.

    The values are converted as those of a config are. Keys that the dataclass has not are ignored.

    Args:
        cls:    dataclass, whose fields may be of any type above, dataclasses, list[T], Any, or a
            class such as torch.Tensor. A field without default must be in the file.
        values: mapping, as the file has it.
        source: path of the file, for messages.
    Returns: an instance of cls.
    Raises: ValueError, a sentence on the first value that is missing, of another type or outside
        the limits of its `key`.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds {_show(values)}; expected {_name_type(cls)}.")
    try:
        return _convert_fields(values, cls, source, f"{source}: ")
    except ValueError as error:
        raise ValueError(f"{error}.") from None


def key(default=dataclasses.MISSING, *, help="", may_change=False,  # noqa: PLR0913  (all of a key)
        per_host=False, kind=None, flag=None, **limits):
    """A field of a dataclass that says everything about a key of a config, or of a file.

        lr: float = key(3e-4, least=0, most=1e3, help="learning rate")

    Args:
        default: its value where it is not given; left out: it must be given.
        help: what it means, with its unit, for --help.
        may_change: whether a resumed run may have another value.
        per_host: whether it may differ between hosts.
        kind: the only model.kind that uses it.
        flag: an option of the command line that sets it, such as "--data".
        limits: of a number, or of each number of a list: least and most, which it may be; above
            and below, which it may not be."""
    unknown = set(limits) - {"least", "most", "above", "below"}
    if unknown:
        raise TypeError(f"key() got {', '.join(unknown)}; expected least, most, above or below")
    metadata = dict(help=help, may_change=may_change, per_host=per_host, kind=kind, flag=flag)
    return dataclasses.field(default=default, metadata={**metadata, **limits})


def other_script(nested, cls) -> str:
    """Name of the other training script, if a configuration has several of its keys; else "".

    nested: {section: {key: value}} of a configuration. cls: the dataclass of this script."""
    for script in KEYS_OF:
        if len(_keys_of_other(nested, cls, script)) > 1:
            return script
    return ""


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
        for key, item in value.items():
            items[f"{section}.{key}"] = item
    return {key: item for key, item in items.items() if key not in ignore}


def config_differences(former, config, ignore=()) -> list[str]:
    """List the differences between the configuration of a former run and that of now.

    Args:
        former: a configuration, or what config_to_dict made of one. A key that it lacks counts as
            the default: the run was made before this key existed, and did what the default does.
        config: the configuration now.
        ignore: dotted keys.
    Returns: list of "section.key: before -> now"; `now` is (absent) for a key that is gone, if the
        run did not have its default.
    """
    before = config_items(type(config)(), ignore) | config_items(former, ignore)
    now = config_items(config, ignore)
    differences = []
    for key, value in before.items():
        if key in GONE and GONE[key] in (value, ANY):
            continue
        if key not in now:
            differences.append(f"{key}: {_show(value)} -> (absent)")
        elif now[key] != value:
            differences.append(f"{key}: {_show(value)} -> {_show(now[key])}")
    return differences


def dump_yaml(config) -> str:
    """The configuration as YAML text that load_config reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, default_flow_style=None,
                          width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors, with what a misspelled option may mean."""

    def __init__(self, *args, config=None, **options):
        """config: the dataclass whose keys the command line sets with section.key=value, if any."""
        super().__init__(*args, **options)
        self.config_keys = _names(config) if config else []
        self.given = []     # the arguments that are parsed

    def parse_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        return super().parse_args(args, namespace)

    def parse_intermixed_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        return super().parse_intermixed_args(args, namespace)

    def error(self, message):   # not printed here, where each of the ranks would print it
        raise ValueError(f"command line: {self.message(message)}")

    def message(self, found):
        """A message of argparse, what unknown options may mean, and where all are listed."""
        return f"{found.removesuffix('.')}.{self.advice()} See --help."

    def advice(self):
        """What unknown options may mean, as a sentence for each; "" if none is like another."""
        known = re.findall(r"(?<![\w-])--?[A-Za-z]\w*", self.format_help())
        sentences = []
        for word in self.given:
            name = word.partition("=")[0]
            if name == "--":    # what follows is no option
                break
            if not re.match("--?[A-Za-z]", name) or name in known:
                continue
            plain = name.strip("-").replace("-", "_")
            keys = [f"{key}=VALUE" for key in self.config_keys if f".{key}".endswith(f".{plain}")]
            near = difflib.get_close_matches(f"--{plain}", known, 1)
            if keys and near != [f"--{plain}"]:
                near = keys
            if near:
                sentences.append(f" Did you mean {near[0]}, not {name}?")
        return "".join(dict.fromkeys(sentences))


# ---- keys and limits that all training scripts share ----

# Keys by which a config shows for which script it is. Others mean something in both, or are rare.
KEYS_OF = {
    "train_sedd_ddp.py": ("graph", "noise", "model.hidden_size", "model.n_blocks", "model.n_heads",
                          "model.cond_dim", "data.file", "data.demo_proteins", "data.min_length",
                          "training.tokens_per_batch", "training.eval_samples", "optim.ema",
                          "monitoring.n_samples", "monitoring.sample_steps"),
    "train_dpo_ddp.py": ("model.base_model_name", "model.base_model_dir", "loss.name",
                         "loss.beta", "loss.order", "data.train_data", "data.val_data",
                         "data.demo_structures", "data.demo_pairs", "monitoring.n_designs")}


@dataclass
class CommonTraining:
    """The keys of section `training` that mean the same in every script."""
    accum: int = 1                       # micro-batches per rank and optimizer step; or
    micro_batches: int | None = None     # or: of all ranks together; accum is not used then
    num_workers: int = 0                 # processes that prepare batches, per rank
    log_freq: int = 10                   # steps between rows of metrics.jsonl
    snapshot_minutes: float = 0.0        # at most, from a checkpoint to the next; 0 = no limit
    keep_last: int = 2                   # checkpoints that are kept: last.pt, last-1.pt, ...
    max_bad_steps: int = 10              # most steps in a row with a nan or infinite loss or
    #                                      gradient: they are skipped, one more ends the run
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")   # the run saves and stops
    patience: int | None = None          # evaluations without improvement that stop the run early
    profile: str | None = None           # "10:13": a trace of steps 10 to 13, see profile.py
    seed: int = 0


@dataclass
class CommonOptim:
    """Scripts add lr (at base_global_batch) and warmup (linear, in steps); `scale` scales both."""
    name: Literal["adamw", "muon"] = "adamw"   # see training/optimizer.py
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"   # or {cap: 4}
    base_global_batch: int | None = None  # that lr was chosen for; unit: see --plan
    # of the learning rate. wsd, warm-up, stable, decay: linear in a last part of the run
    decay: Literal["none", "linear", "cosine", "wsd"] = "none"
    # number of last steps that decay; below 1: fraction of n_iters; null: all after the warm-up,
    # for wsd a fifth of n_iters
    decay_steps: float | None = None
    min_lr: float = 0.0                  # where the decay ends; like lr: at base_global_batch
    grad_clip: float = 1.0               # global norm; 0 = none
    betas: tuple[float, float] = (0.9, 0.999)   # of AdamW, as is eps
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class CommonMemory:
    # true: bfloat16 if the device supports it natively, else float32
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = True
    max_memory_per_gpu: float | None = None  # fraction of the device's memory, not GB


@dataclass
class CommonMonitoring:
    watchdog_minutes: float = 30.0       # without progress, until the run is ended; 0 = off
    tensorboard: bool = False            # curves in RUN_DIR/tensorboard
    wandb: dict[str, str] | None = None  # {project, name, mode}, each optional: Weights & Biases
    check_sync_every: int = 1000         # steps between comparisons of the ranks' weights; 0 = off
    timing_every: int = 50               # steps between timed steps, see meter.py; 0 = never
    # every log_freq steps, log the norm per layer; TensorBoard and W&B also get histograms
    log_gradients: bool = False          # of the gradient, before clipping
    log_weights: bool = False            # of the weights


@dataclass
class DdpSection:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True


# Smallest allowed values. They do not apply to null, nor to keys that a script does not have.
LEAST = {"training": dict(batch_size=1, accum=1, micro_batches=1, num_workers=0, n_iters=1,
                          num_epochs=1, eval_freq=1, log_freq=1, snapshot_freq=1,
                          snapshot_minutes=0, patience=1, keep_last=1,
                          max_bad_steps=0),
         "optim": dict(lr=0, min_lr=0, warmup=0, base_global_batch=1, grad_clip=0, weight_decay=0),
         "monitoring": dict(watchdog_minutes=0, check_sync_every=0, timing_every=0)}
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")   # that a guard passes on to its rank


def check_common(config) -> list[str]:  # noqa: C901  (one `if` per key, nothing else)
    """Texts on values that have the right type but make no sense, of the keys of all scripts.

    A script's check_config adds texts on its own keys, then those of check_least, and gives them
    all to `refuse`."""
    training = config.training
    optim = config.optim
    problems = []
    if not 0 <= training.seed < 2**63:
        problems.append(f"training.seed is {training.seed}; expected 0 to 2**63 - 1")
    share = config.memory.max_memory_per_gpu
    if share is not None and not 0 < share <= 1:
        problems.append(f"memory.max_memory_per_gpu is {share}; expected a share of the memory, "
                        "above 0 up to 1")
    if optim.scale != "none" and not optim.base_global_batch:
        problems.append(f"optim.scale is {optim.scale} and optim.base_global_batch "
                        f"{optim.base_global_batch}; expected the global batch that lr was chosen "
                        "for")
    if isinstance(optim.scale, dict) and not (list(optim.scale) == ["cap"]
                                              and optim.scale["cap"] >= 1):
        problems.append(f"optim.scale is {optim.scale}; expected none, linear, sqrt or {{cap: N}} "
                        "with N of at least 1")
    if optim.decay_steps is not None and (optim.decay == "none" or not optim.decay_steps > 0):
        problems.append(f"optim.decay_steps is {optim.decay_steps} with optim.decay "
                        f"{optim.decay}; expected more than 0 (steps, or a share of them below "
                        "1), and decay linear, cosine or wsd. Without a decay give "
                        "optim.decay_steps=null")
    if optim.min_lr > 0 and optim.decay == "none":
        problems.append(f"optim.min_lr is {optim.min_lr} with optim.decay none; expected a decay "
                        "(linear, cosine or wsd), which ends there. Without one give "
                        "optim.min_lr=0")
    elif optim.min_lr > 0 and optim.min_lr > optim.lr:
        problems.append(f"optim.min_lr is {optim.min_lr} and optim.lr {optim.lr}; expected at most "
                        "lr")
    wandb = config.monitoring.wandb or {}
    if not set(wandb) <= {"project", "name", "mode"}:
        problems.append(f"monitoring.wandb has {', '.join(wandb)}; expected some of project, "
                        "name, mode")
    if not all(0 <= beta < 1 for beta in optim.betas):
        problems.append(f"optim.betas is {list(optim.betas)}; expected 0 up to below 1")
    if not 0 <= config.model.dropout < 1:
        problems.append(f"model.dropout is {config.model.dropout}; expected 0 up to below 1")
    if not 0 <= config.data.val_fraction < 1:
        problems.append(f"data.val_fraction is {config.data.val_fraction}; expected 0 up to below "
                        "1")
    if not optim.lr <= MOST_LR:
        problems.append(f"optim.lr is {optim.lr}; expected at most {MOST_LR:g}")
    if not optim.eps > 0:
        problems.append(f"optim.eps is {optim.eps}; expected more than 0")
    for name in ("n_iters", "num_epochs"):
        number = getattr(training, name, None)   # each script defines them
        if number is not None and number > MOST_STEPS:
            problems.append(f"training.{name} is {number}; expected at most {MOST_STEPS}")
    if training.num_workers > MOST_WORKERS:
        problems.append(f"training.num_workers is {training.num_workers}; expected at most "
                        f"{MOST_WORKERS} per rank")
    if training.profile is not None:
        try:
            profiled_steps(training.profile)
        except ValueError as error:
            problems.append(str(error))
    if not set(training.stop_signals) <= set(STOP_SIGNALS):
        problems.append(f"training.stop_signals is {list(training.stop_signals)}; expected some of "
                        f"{', '.join(STOP_SIGNALS)}")
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


def check_least(config, least=None) -> list[str]:
    """Texts on numbers below the smallest that are allowed.

    least: the script's own {section: {key: smallest number}}, in addition to LEAST."""
    least = least or {}
    problems = []
    for section in {**LEAST, **least}:
        smallest = {**LEAST.get(section, {}), **least.get(section, {})}
        for key, low in smallest.items():
            value = getattr(getattr(config, section), key, None)
            if value is not None and value < low:
                problems.append(f"{section}.{key} is {value}; expected at least {low}")
    return problems


def refuse(problems) -> None:
    """Raise ValueError with these texts on a configuration, a line each; return if there is none.
    """
    if problems:
        raise ValueError("\n".join(f"config: {text}." for text in problems))


# ---- YAML ----

class _Loader(yaml.SafeLoader):
    """YAML in which numbers and dates are text, and each key of a mapping comes once."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"found the key {key.value!r} again; expected "
                                                   "each key once", problem_mark=key.start_mark)
            seen.add(key.value)
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
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}. Expected a YAML configuration. Check "
                         f"the path (relative to {Path.cwd()}).") from None
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
                         f"blanks around '=', such as {_names(cls)[0]}=...")
    if dataclasses.is_dataclass(_types(cls).get(dotted)):
        raise ValueError(f"command line, {text!r}: {dotted!r} is a section; expected one of its "
                         "keys.")
    return dotted, value


def _put(raw, dotted, value, where):
    """Put value at the dotted key into the nested dict raw."""
    *sections, key = dotted.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: {section!r} is {_show(raw)}, in the YAML file or by "
                             "another override; expected a section.")
    raw[key] = value


# ---- dataclasses ----

def _types(cls):
    """{name of a field: its type}; the type of a section is a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _keys_of_other(nested, cls, script):
    """Keys of KEYS_OF[script] that a configuration has, and the dataclass cls has not."""
    given = {*nested, *config_items(nested)}
    known = {*_types(cls), *_names(cls)}
    return [key for key in KEYS_OF[script] if key in given - known]


def _names(cls, prefix=""):
    """Dotted names of all keys, including those in sections."""
    names = []
    for name, kind in _types(cls).items():
        dotted = prefix + name
        names += _names(kind, dotted + ".") if dataclasses.is_dataclass(kind) else [dotted]
    return names


def _takes_text(cls, dotted):
    """Is a key of type str, or str | None?"""
    for name in dotted.split("."):
        cls = _types(cls)[name]
    return cls is str or str in typing.get_args(cls)


def _unknown(root, cls, key, prefix, where):
    """Error text for a key that section cls does not have; it suggests the most similar key."""
    here = list(_types(cls))
    candidates = {name.rpartition(".")[2]: name for name in _names(root)}
    candidates |= {name: prefix + name for name in here}
    near = difflib.get_close_matches(str(key), candidates, 1)
    advice = f"Did you mean {candidates[near[0]]!r}?" if near else f"Known here: {', '.join(here)}."
    for script, keys in KEYS_OF.items():
        if prefix + str(key) in keys:
            advice = f"It is a key of {script}."
    kind = "key" if prefix else "section or key"
    return f"{where}: unknown {kind} {prefix + str(key)!r}. {advice}"


def _make_section(cls, raw, prefix, path, origins, root, problems):
    """Instance of the dataclass cls from a dict as YAML gave it.

    prefix: "" or "section.", to put before its keys. path: of the file, for messages; origins: what
    to say instead for keys from the command line. root: dataclass of the whole configuration.
    problems: list of error texts, to which this function appends.
    """
    kinds = _types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in raw.items():
        dotted = f"{prefix}{key}"
        where = path
        for name, text in origins.items():
            if f"{name}.".startswith(f"{dotted}."):    # the key itself, or a key in this section
                where = text
                break
        if key not in kinds:
            problems.append(_unknown(root, cls, key, prefix, where))
        elif not dataclasses.is_dataclass(kinds[key]):
            try:
                values[key] = _convert(value, kinds[key], f"{where}: {dotted}")
                _check_range(values[key], fields[key], f"{where}: {dotted}")
            except ValueError as error:
                problems.append(f"{error}.")
        elif isinstance(value, dict):
            values[key] = _make_section(kinds[key], value, dotted + ".", path, origins, root,
                                        problems)
        else:
            problems.append(f"{where}: section {dotted!r} is {_show(value)}; expected 'key: "
                            "value' lines under it. For its defaults leave the section out.")
    return cls(**values)


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
    if origin is list:
        return f"a list, each {_name_type(args[0])}"
    if dataclasses.is_dataclass(kind):
        return f"a mapping with {', '.join(_types(kind))}"
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text",
             dict: "a mapping {key: value}", list: "a list", type(None): "null"}
    plain = origin or kind
    return names.get(plain, f"a {getattr(plain, '__name__', plain)}")


def _convert(value, kind, place):  # noqa: C901  (one branch per kind of type)
    """Convert a value from a file to the annotated type.

    place: what the value is, for messages: "FILE: section.key". Raises: ValueError, the sentence
    on what does not fit, without its full stop."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_to_one(value, args, place)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _convert_fields(value, kind, place, f"{place}.")
    if origin is typing.Literal and value in args:
        return value
    if kind in (float, int):
        number = _number(value, kind)
        if number is not None:
            return number
    elif kind in (bool, str, type(None)):
        if type(value) is kind:
            return value
    elif origin in (tuple, list) and isinstance(value, (tuple, list)):
        one_kind = origin is list or Ellipsis in args
        kinds = args[:1] * len(value) if one_kind else args
        if len(value) == len(kinds):
            return origin(_convert(item, item_kind, f"{place}[{number}]")
                          for number, (item, item_kind) in enumerate(zip(value, kinds)))
    elif origin is dict and isinstance(value, dict):
        return {_convert(key, args[0], f"{place}: key {_show(key)}"):
                _convert(item, args[1], f"{place}[{_show(key)}]") for key, item in value.items()}
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    quotes = ". Quote it" if kind is str and isinstance(value, bool) else ""
    raise ValueError(f"{place} is {_show(value)}; expected {_name_type(kind)}{quotes}")


def _convert_to_one(value, kinds, place):
    """The value as the first of the kinds that accepts it."""
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return _convert(value, kind, place)   # its error names the field
        try:
            return _convert(value, kind, place)
        except ValueError:
            continue
    expected = " or ".join(map(_name_type, kinds))
    raise ValueError(f"{place} is {_show(value)}; expected {expected}")


def _convert_fields(values, cls, place, prefix):
    """Instance of the dataclass cls. prefix: what to put before the name of a field."""
    kinds = _types(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        if field.name in values:
            name = f"{prefix}{field.name}"
            fields[field.name] = _convert(values[field.name], kind, name)
            _check_range(fields[field.name], field, name)
        elif _has_no_default(field):
            raise ValueError(f"{place} has no {field.name}; expected {_name_type(kind)}")
    return cls(**fields)


def _has_no_default(field):
    return (field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING)


def _check_range(value, field, name):
    """Refuse a number, or a list with one, outside the limits that `key` gave the field."""
    limits = field.metadata
    numbers = value if isinstance(value, (tuple, list)) else [value]
    for number in numbers:
        if type(number) not in (int, float):
            continue
        is_inside = (limits.get("least", number) <= number <= limits.get("most", number)
                     and limits.get("above", -math.inf) < number < limits.get("below", math.inf))
        if not is_inside:
            raise ValueError(f"{name} is {_show(value)}; expected {_range_text(limits)}")


def _range_text(limits):
    """The limits of a key in words: "at least 0 and below 1"."""
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    texts = [f"{text} {limits[name]}" for name, text in words.items() if name in limits]
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
