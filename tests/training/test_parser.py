"""The options of a command: which exist, what a wrong one is told, what --help lists."""

import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

import train_dpo_ddp
import train_mpnn_ddp
import train_sedd_ddp
from training.config import key, key_fields
from training.parser import Parser, describe_keys


@dataclass
class Optim:
    lr: float = key(3e-4, help="learning rate, 50% of it at the end", may_change=True,
                    flag=("--learning_rate", "--rate"))
    scale: Literal["none", "linear"] | bool = "none"
    betas: tuple[float, float] = key((0.9, 0.999), per_host=True)


@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)


def test_a_key_with_flags_has_these_options():
    parser = Parser(allow_abbrev=False, config=Config)
    parser.add_key_options()
    for argv, value in (["--rate=1"], "1"), (["--learning_rate", "2"], "2"), ([], None):
        assert parser.given_keys(parser.parse_args(argv)) == {"optim.lr": value}


def test_help_lists_each_key_with_default_meaning_choices_and_marks(capsys):
    parser = Parser(allow_abbrev=False, config=Config)
    parser.add_key_options()
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert """
optim:
  lr: 0.0003 *              learning rate, 50% of it at the end
  scale: none               [none | linear | true | false]
  betas: [0.9, 0.999] @
""" in capsys.readouterr().out


@pytest.mark.parametrize("description, shown", [("Draws.\n\nMore.", "Draws."), (None, "")])
def test_help_shows_the_first_line_of_a_docstring_if_there_is_one(capsys, description, shown):
    parser = Parser(prog="draw", description=description, add_help=False)
    parser.print_help()
    assert capsys.readouterr().out.split() == ["usage:", "draw", *shown.split()]


def test_the_usage_of_a_script_has_at_most_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser(prog="draw", allow_abbrev=False)
    group = parser.add_mutually_exclusive_group()
    for name in ("--length", "--scaffold", "--infill", "--score", "--export"):
        group.add_argument(name, metavar="A_LONG_NAME")
    usage = parser.format_help().partition("\n\n")[0]
    assert usage.count("A_LONG_NAME") == 5 and max(map(len, usage.split("\n"))) <= 80


@pytest.mark.parametrize("script", [train_sedd_ddp, train_dpo_ddp, train_mpnn_ddp])
def test_help_of_a_script_has_each_key_with_its_meaning_in_80_columns(script):
    lines = describe_keys(script.Config).split("\n")
    assert max(map(len, lines)) < 80
    for name, field_of_key in key_fields(script.Config).items():
        *_, last = name.split(".")
        assert any(line.strip().startswith(f"{last}:") for line in lines)
        assert field_of_key.metadata.get("help", "a section has none"), name


@pytest.mark.parametrize("argv, advice", [
    (["--dta", "my.fasta"], "Did you mean --data, not --dta?"),
    (["-data", "my.fasta"], "Did you mean --data, not -data?"),
    (["--work-dir=x"], "Did you mean --work_dir, not --work-dir?"),
    (["--lr", "1"], "Did you mean optim.lr=VALUE, not --lr?"),
    (["--optim.lr=1"], "Did you mean optim.lr=VALUE, not --optim.lr?")])
def test_a_misspelled_option_gets_a_suggestion(argv, advice):
    parser = Parser(allow_abbrev=False, config=Config)
    parser.add_argument("--data")
    parser.add_argument("--work_dir")
    with pytest.raises(ValueError, match=re.escape(advice)):
        parser.parse_args(argv)


@pytest.mark.parametrize("argv", [["--zzz", "1"], ["--nonsense"], ["--local-rank=0", "--zzz"]])
def test_an_option_like_no_other_gets_no_suggestion(argv):
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--data")
    parser.add_argument("--nnodes")
    parser.add_argument("--node_rank")
    with pytest.raises(ValueError) as caught:
        parser.parse_args(argv)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("argv", [["--local-rank=1"], ["--local_rank", "1"]])
def test_the_local_rank_of_an_old_launcher_is_taken_and_leaves_no_option(argv, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--data")
    assert vars(parser.parse_args([*argv, "--data", "x"])) == {"data": "x"}


@pytest.mark.parametrize("variable", ["0", None])
def test_a_local_rank_other_than_that_of_the_environment_is_refused(variable, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    with pytest.raises(ValueError, match="found --local-rank 1, and LOCAL_RANK=0"):
        Parser().parse_args(["--local-rank=1"])
