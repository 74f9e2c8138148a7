"""run_config: what YAML and the command line may say; all else is refused where it stands."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Optional

import pytest

from training.config import load_config


@dataclass
class Training:
    batch_size: Optional[int] = None
    accum: int = 1
    checkpointing: bool = False
    mixed_precision: bool | str = True


@dataclass
class Optim:
    lr: float = 3e-4
    warmup: int = 2500
    betas: tuple[float, float] = (0.9, 0.999)
    milestones: tuple[int, ...] = ()
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"


@dataclass
class Config:
    seed: int = 0
    name: str = "demo"
    graph: Literal["absorb", "uniform"] = "absorb"
    training: Training = field(default_factory=Training)
    optim: Optim = field(default_factory=Optim)


def load(tmp_path, text, *overrides):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(Config, path, overrides)


def assignment(key, text):
    """YAML that gives one key, which may be in a section."""
    section, _, name = key.rpartition(".")
    return f"{section}: {{{name}: {text}}}" if section else f"{name}: {text}"


def refusal(tmp_path, text, *overrides):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("key, text, value", [
    ("optim.lr", "1e-4", 1e-4), ("optim.lr", "3", 3.0), ("optim.lr", "'1e-4'", 1e-4),
    ("seed", "1e6", 10**6), ("seed", str(2**63 - 1), 2**63 - 1), ("seed", "010", 10),
    ("seed", "-1", -1),
    ("name", "010", "010"), ("name", "a:30", "a:30"), ("name", "2026-01-01", "2026-01-01"),
    ("training.mixed_precision", "false", False), ("training.mixed_precision", "16", "16"),
    ("optim.scale", "sqrt", "sqrt"), ("optim.scale", "{cap: 4}", {"cap": 4.0}),
    ("training.batch_size", "null", None), ("optim.betas", "[0.9, 98e-2]", (0.9, 0.98)),
    ("optim.milestones", "[1, 1e3]", (1, 1000))])
def test_a_value_is_read_as_the_type_of_its_field_in_file_and_command(tmp_path, key, text, value):
    for config in (load(tmp_path, assignment(key, text)),
                   load_config(Config, None, [f"{key}={text}"])):
        found = attrgetter(key)(config)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize("key, texts, says", [
    ("optim.lr", ("true", "nan", "1e999", "abc", "[1]", "null"), "expected a number"),
    ("training.accum", ("1.5", "true", "1:30:00", "1e999", "1_"), "expected a whole number"),
    ("training.checkpointing", ("1", "'true'", "null"), "expected true or false"),
    ("name", ("yes",), "Quote it"), ("name", ("null", "[a]"), "expected text"),
    ("training.mixed_precision", ("[16]",), "true or false or text"),
    ("optim.scale", ("{cap: four}", "lineal"), "none, linear, sqrt or a mapping"),
    ("optim.betas", ("[0.9]", "0.9"), "expected [a number, a number]"),
    ("optim.milestones", ("[1, x]",), "found 'x'"),
    ("graph", ("absorbing", "off"), "one of absorb, uniform")])
def test_a_value_of_another_type_is_refused_with_what_is_expected(tmp_path, key, texts, says):
    for text in texts:
        message = refusal(tmp_path, assignment(key, text))
        assert f"config.yaml: {key}: found" in message and says in message
    with pytest.raises(ValueError, match=f"command line, .*{key}: found"):
        load_config(Config, None, [f"{key}={texts[0]}"])


@pytest.mark.parametrize("text, advice", [
    ("optim: {warm_up: 3}", "unknown key 'optim.warm_up'. Did you mean 'optim.warmup'?"),
    ("optimizer: {lr: 3}", "unknown section or key 'optimizer'. Did you mean 'optim'?"),
    ("optim: {accum: 3}", "Did you mean 'training.accum'?"),
    ("optim: {qqqq: 3}", "Known here: lr, warmup, betas, milestones, scale"),
    ("optim: {1: 3}", "unknown key 'optim.1'"), ("optim:\n", "section 'optim' is nothing"),
    ("optim:\n  lr: 1\n  lr: 2\n", "line 3: found the key 'lr' again"),
    ("- a\n", "['a'] at the top"), ("# only a comment\n", "nothing (null) at the top"),
    ("optim:\n\tlr: 1\n", "line 2"),
    ("name: !!python/object:os.system {}\n", "not valid YAML"), ("? [a]\n: 1\n", "unhashable"),
    ("name: Mülheim".encode("latin-1"), "cannot be read")])
def test_a_file_that_says_it_badly_is_refused_with_the_place(tmp_path, text, advice):
    message = refusal(tmp_path, text)
    assert "config.yaml" in message and advice in message


def test_the_command_line_prevails_over_the_file_and_its_last_word_over_its_first(tmp_path):
    config = load(tmp_path, "optim: {lr: fast, warmup: 5}\ntraining: {batch_size: 4}",
                  "optim.lr=2e-4", "optim.lr=3e-4", "seed=7", "optim.betas=[0.8, 0.9]",
                  "training.batch_size=null", "name=a=b")
    assert config == Config(seed=7, name="a=b", optim=Optim(3e-4, 5, (0.8, 0.9)))


def test_an_option_of_its_own_prevails_and_gives_text_as_it_is_to_a_field_of_text():
    flags = {"optim.lr": "3e-4", "name": "010: [x", "seed": None, "training.batch_size": "5"}
    config = load_config(Config, None, ["optim.lr=1e-4", "seed=7", "name=a"], flags)
    assert config == Config(7, "010: [x", training=Training(5), optim=Optim(3e-4))
    with pytest.raises(ValueError, match="command line, 'optim.lr=fast': optim.lr: found 'fast'"):
        load_config(Config, None, (), {"optim.lr": "fast"})


@pytest.mark.parametrize("override, says", [
    ("optim.lr", "expected section.key=value"), ("=3", "expected section.key=value"),
    ("optim.lr=", "optim.lr: found nothing"), ("optim={lr: 1}", "is a section"),
    ("optim.learning=1", "unknown key 'optim.learning'"), ("option.lr=1", "Did you mean 'optim'?"),
    ("optim.lr.cap=4", "found {'cap': '4'}; expected a number"),
    ("optim.betas=[0.9, 0.99", "not valid YAML")])
def test_a_bad_override_is_refused_as_typed(tmp_path, override, says):
    message = refusal(tmp_path, "seed: 1", override)
    assert "command line" in message and override in message and says in message
    assert "config.yaml" not in message
