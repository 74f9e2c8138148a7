"""The options of a command: errors are ValueErrors, with what a misspelled option may mean.

    parser = Parser(description="What it does.", allow_abbrev=False, config=Config)
    parser.add_key_options()                    # those of keys that have a flag, see config.key
    options = parser.parse_args(argv)           # ValueError
    config = load_config(Config, options.config, options.overrides, parser.given_keys(options))

With a configuration, --help lists its keys, with defaults and units.
"""
import argparse
import dataclasses
import difflib
import os
import re
import sys
import textwrap
import typing

from training.config import key_fields, names_of_keys, types_of
from training.problems import in_columns

WIDTH = 79          # columns of --help
KEY_WIDTH = 26      # of these, for the name of a key and its default
LOCAL_RANK = ("--local-rank", "--local_rank")   # python -m torch.distributed.launch adds one


class CheckLocalRank(argparse.Action):
    """An option that says what LOCAL_RANK says too, and is checked against it."""

    def __call__(self, parser, namespace, value, option=None):
        expected = os.environ.get("LOCAL_RANK", "0")
        if value != expected:
            parser.error(f"found {option} {value}, and LOCAL_RANK={expected} in the environment; "
                         "expected the same. Start with torchrun")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors, with what a misspelled option may mean."""

    def __init__(self, *args, description=None, config=None, **options):
        """description: of which the first line is shown; under python -OO a docstring is None.
        config: the dataclass whose keys the command line sets with section.key=value, if any."""
        first_line = (description or "").partition("\n")[0]
        super().__init__(*args, description=first_line, **options)
        self.add_argument(*LOCAL_RANK, action=CheckLocalRank, default=argparse.SUPPRESS,
                          help=argparse.SUPPRESS)
        self.config = config
        self.given = []     # the arguments that are parsed

    def add_key_options(self, several_words=()):
        """Add the options of keys that have a flag. several_words: keys whose options take more
        than one."""
        for name, field in key_fields(self.config).items():
            flags = field.metadata.get("flag")
            if not flags:
                continue
            if isinstance(flags, str):
                flags = (flags,)
            several = {"nargs": "+"} if name in several_words else {}
            self.add_argument(*flags, dest=name, metavar=field.name.upper(),
                              help=f"{name}: {field.metadata['help']}".replace("%", "%%"),
                              **several)

    def given_keys(self, options):
        """{key: what its option was given, or None} of parsed options."""
        return {name: getattr(options, name) for name, field in key_fields(self.config).items()
                if field.metadata.get("flag")}

    def format_help(self):
        usage, _, rest = super().format_help().partition("\n\n")
        text = f"{in_columns(usage)}\n\n{rest}"    # argparse breaks no group of options
        if self.config:
            text += "\n" + describe_keys(self.config)
        return text

    def parse_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        return super().parse_args(args, namespace)

    def parse_intermixed_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        return super().parse_intermixed_args(args, namespace)

    def error(self, message):   # not printed here, where each of the ranks would print it
        raise ValueError(f"command line: {self.message(message)}")

    def message(self, problem):
        """A message of argparse, what unknown options may mean, and where all are listed."""
        return f"{problem.removesuffix('.')}.{self.advice()} See --help."

    def advice(self):
        """What unknown options may mean, as a sentence for each; "" if none is like another."""
        known = re.findall(r"(?<![\w-])--?[A-Za-z]\w*", super().format_help())
        config_keys = names_of_keys(self.config) if self.config else []
        sentences = []
        for word in self.given:
            name = word.partition("=")[0]
            if name == "--":    # what follows is no option
                break
            if not re.match("--?[A-Za-z]", name) or name in (*known, *LOCAL_RANK):
                continue
            plain = name.strip("-").replace("-", "_")
            keys = [f"{dotted}=VALUE" for dotted in config_keys
                    if f".{dotted}".endswith(f".{plain}")]
            names = {option.strip("-"): option for option in known}
            near = [names[text] for text in difflib.get_close_matches(plain, names, 1)]
            if keys and plain not in names:
                near = keys
            if near:
                sentences.append(f" Did you mean {near[0]}, not {name}?")
        return "".join(dict.fromkeys(sentences))


def describe_keys(config):
    """Text: all keys of a configuration with their defaults and meanings, for --help."""
    lines = ["keys of the config, with defaults: in the file, or here as section.key=value",
             "* may differ when a run goes on; @ may differ between hosts"]
    for name, kind in types_of(config).items():
        lines += ["", f"{name}:", *describe_section(kind, "  ")]
    return "\n".join(lines) + "\n"


def describe_section(section, indent):
    """Lines on the keys of a section, and on the sections in it."""
    lines = []
    kinds = types_of(section)
    for field in dataclasses.fields(section):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            lines += [f"{indent}{field.name}:", *describe_section(kind, indent + "  ")]
            continue
        start = f"{indent}{field.name}: {show_default(field.default)}{marks_of(field)}"
        text = f"{field.metadata.get('help', '')} {choices_of(kind)}".strip()
        margin = " " * (KEY_WIDTH + 2)
        if len(start) <= KEY_WIDTH:
            start = start.ljust(len(margin))
        else:
            lines.append(start)
            start = margin
        lines += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=margin,
                               break_on_hyphens=False) or [start.rstrip()]
    return lines


def marks_of(field):
    """The marks of a key, which describe_keys explains, after a blank; "" if it has none."""
    marks = ""
    if field.metadata.get("may_change"):
        marks += "*"
    if field.metadata.get("per_host"):
        marks += "@"
    return f" {marks}" if marks else ""


def show_default(value):
    """A value as one would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(show_default, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def choices_of(kind):
    """The texts that a key may be, as "[a | b]"; "" if it may be any."""
    texts = []
    for member in (kind, *typing.get_args(kind)):
        if typing.get_origin(member) is typing.Literal:
            texts += typing.get_args(member)
        elif member is bool and member is not kind:
            texts += ["true", "false"]
    return f"[{' | '.join(texts)}]" if texts else ""
