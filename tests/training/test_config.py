"""Configuration: what YAML and the command line may say; all else is refused where it stands."""

import re
from dataclasses import dataclass, field, make_dataclass
from operator import attrgetter
from typing import Literal

import pytest

import train_dpo_ddp
import train_sedd_ddp
from launchers import ROOT
from tool_runs import assert_named
from training.config import (
    CommonMemory,
    CommonMonitoring,
    CommonOptim,
    CommonTraining,
    DdpSection,
    check_common,
    config_differences,
    key,
    key_fields,
    keys_that,
    load_config,
    refuse_config,
)


@dataclass
class Training:
    batch_size: int | None = None
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


def assignment(dotted, text):
    """YAML that gives one key, which may be in a section."""
    section, _, name = dotted.rpartition(".")
    return f"{section}: {{{name}: {text}}}" if section else f"{name}: {text}"


def refusal(tmp_path, text, *overrides):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("dotted, text, value", [
    ("optim.lr", "1e-4", 1e-4), ("optim.lr", "3", 3.0), ("optim.lr", "'1e-4'", 1e-4),
    ("seed", "1e6", 10**6), ("seed", str(2**63 - 1), 2**63 - 1), ("seed", "010", 10),
    ("seed", "-1", -1),
    ("name", "010", "010"), ("name", "a:30", "a:30"), ("name", "2026-01-01", "2026-01-01"),
    ("training.mixed_precision", "false", False), ("training.mixed_precision", "16", "16"),
    ("optim.scale", "sqrt", "sqrt"), ("optim.scale", "{cap: 4}", {"cap": 4.0}),
    ("training.batch_size", "null", None), ("optim.betas", "[0.9, 98e-2]", (0.9, 0.98)),
    ("optim.milestones", "[1, 1e3]", (1, 1000))])
def test_a_value_is_read_as_the_type_of_its_field_in_file_and_command(
        tmp_path, dotted, text, value):
    for config in (load(tmp_path, assignment(dotted, text)),
                   load_config(Config, None, [f"{dotted}={text}"])):
        converted = attrgetter(dotted)(config)
        assert converted == value and type(converted) is type(value)


@pytest.mark.parametrize("dotted, texts", [
    ("optim.lr", ("true", "nan", "1e999", "abc", "[1]", "null")),
    ("training.accum", ("1.5", "true", "1:30:00", "1e999", "1_")),
    ("training.checkpointing", ("1", "'true'", "null")),
    ("name", ("yes", "null", "[a]")),
    ("training.mixed_precision", ("[16]",)),
    ("optim.scale", ("{cap: four}", "lineal")),
    ("optim.betas", ("[0.9]", "0.9")),
    ("optim.milestones", ("[1, x]",)),
    ("seed", (str(2**63), str(-2**70), "1e400")),
    ("graph", ("absorbing", "off"))])
def test_a_value_of_another_type_is_refused_with_its_key_and_its_place(tmp_path, dotted, texts):
    for text in texts:
        assert_named(f"config.yaml {dotted}", refusal(tmp_path, assignment(dotted, text)))
        with pytest.raises(ValueError) as caught:
            load_config(Config, None, [f"{dotted}={text}"])
        assert repr(f"{dotted}={text}") in str(caught.value)


@pytest.mark.parametrize("limits, inside, outside", [
    (dict(least=0, below=1), ["0", "0.5"], ["-0.1", "1"]),
    (dict(above=0, most=1), ["0.1", "1"], ["0", "1.1"])])
def test_a_number_outside_the_limits_of_its_key_is_refused(limits, inside, outside):
    optim = make_dataclass("Optim", [("share", float | None, key(None, **limits)),
                                     ("betas", tuple[float, ...], key((), **limits))])
    config = make_dataclass("Config", [("optim", optim, field(default_factory=optim))])
    assert load_config(config, None, ["optim.share=null"]) == config()
    for text in inside:
        load_config(config, None, [f"optim.share={text}", f"optim.betas=[{text}]"])
    for text in outside:
        for override in (f"optim.share={text}", f"optim.betas=[{inside[0]}, {text}]"):
            with pytest.raises(ValueError) as caught:
                load_config(config, None, [override])
            said = str(caught.value)
            assert override in said
            assert all(str(limit) in said.partition("expected")[2] for limit in limits.values())


def test_a_key_with_a_limit_of_another_name_is_refused():
    with pytest.raises(TypeError, match="minimum"):
        key(1, minimum=0)


@pytest.mark.parametrize("text, named", [
    ("optim: {warm_up: 3}", "optim.warm_up optim.warmup"),     # the key, and what it may mean
    ("optimizer: {lr: 3}", "optimizer optim"),
    ("optim: {accum: 3}", "optim.accum training.accum"),
    ("optim: {acum: 3}", "optim.acum lr warmup betas milestones scale"),   # all of the section
    ("learning_rate: 3", "learning_rate seed name graph training optim"),
    ("warmup: 3", "warmup optim.warmup"),
    ("optim: {qqqq: 3}", "optim.qqqq lr warmup betas milestones scale"),
    ("optim: {1: 3}", "optim.1"),
    ("optim:\n", "optim"),
    ("optim:\n  lr: 1\n  lr: 2\n", "3 'lr'"),
    ("- a\n", "'a'"),
    ("# only a comment\n", ""),
    ("optim:\n\tlr: 1\n", "2"),
    ("name: !!python/object:os.system {}\n", "1"),
    ("? [a]\n: 1\n", "1"),
    ("name: Mülheim".encode("latin-1"), "")])
def test_a_file_that_says_it_badly_is_refused_with_the_place(tmp_path, text, named):
    message = refusal(tmp_path, text)
    assert_named(f"config.yaml {named}", message)
    assert "Traceback" not in message and ".." not in message.replace("...", "")


def test_the_command_line_prevails_over_the_file_and_its_last_word_over_its_first(tmp_path):
    config = load(tmp_path, "optim: {lr: fast, warmup: 5}\ntraining: {batch_size: 4}",
                  "optim.lr=2e-4", "optim.lr=3e-4", "seed=7", "optim.betas=[0.8, 0.9]",
                  "training.batch_size=null", "name=a=b")
    assert config == Config(seed=7, name="a=b", optim=Optim(3e-4, 5, (0.8, 0.9)))


def test_an_option_of_its_own_prevails_and_gives_text_as_it_is_to_a_field_of_text():
    flags = {"optim.lr": "3e-4", "name": "010: [x", "seed": None, "training.batch_size": "5"}
    config = load_config(Config, None, ["optim.lr=1e-4", "seed=7", "name=a"], flags)
    assert config == Config(7, "010: [x", training=Training(5), optim=Optim(3e-4))
    with pytest.raises(ValueError, match="'optim.lr=fast'"):
        load_config(Config, None, (), {"optim.lr": "fast"})


@pytest.mark.parametrize("override, named", [
    ("optim.lr", ""), ("=3", ""), ("optim.lr=", ""), ("optim={lr: 1}", ""),
    ("optim.learning=1", "optim.learning"), ("option.lr=1", "'option' 'optim'"),
    ("optim.lr.cap=4", "optim.lr 'cap'"), ("optim.betas=[0.9, 0.99", "")])
def test_a_bad_override_is_refused_as_typed(tmp_path, override, named):
    message = refusal(tmp_path, "seed: 1", override)
    assert "command line" in message and override in message
    assert "config.yaml" not in message
    assert_named(named, message)


@pytest.mark.parametrize("accum, differences", [(1, []), (4, ["training.accum: 1 -> 4"])])
def test_a_key_that_a_former_config_lacks_counts_as_its_default(accum, differences):
    former = {"name": "demo", "training": {"batch_size": None}}
    assert config_differences(former, Config(training=Training(accum=accum))) == differences


def test_a_key_that_there_is_no_longer_is_a_difference():
    former = {"optim": {"lr": 3e-4, "momentum": 0.9}}
    assert config_differences(former, Config()) == ["optim.momentum: 0.9 -> (absent)"]


# ---- checks that all training scripts share ----

@dataclass
class SomeOptim(CommonOptim):
    lr: float = 1e-3


@dataclass
class ScriptConfig:
    """As that of a training script."""
    training: CommonTraining = field(default_factory=CommonTraining)
    optim: SomeOptim = field(default_factory=SomeOptim)
    memory: CommonMemory = field(default_factory=CommonMemory)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: CommonMonitoring = field(default_factory=CommonMonitoring)


def texts_on(*overrides):
    """What is said of these values: by the limits of the keys, and by check_common."""
    try:
        return check_common(load_config(ScriptConfig, None, overrides))
    except ValueError as error:
        return [re.sub("^command line, '.*?': |[.]$", "", line) for line in str(error).split("\n")]


@pytest.mark.parametrize("overrides, named", [
    ("training.seed=-1", "training.seed -1"),
    ("memory.max_memory_per_gpu=1.5", "memory.max_memory_per_gpu 1.5"),
    ("optim.scale=linear", "optim.scale linear optim.base_global_batch"),
    ("optim.scale={cap:0.5} optim.base_global_batch=8", "optim.scale"),
    ("optim.scale={top:2} optim.base_global_batch=8", "optim.scale"),
    ("optim.decay_steps=5", "optim.decay_steps 5.0 optim.decay none"),
    ("optim.decay_steps=0 optim.decay=linear", "optim.decay_steps 0.0"),
    ("optim.min_lr=1e-5", "optim.min_lr 1e-05 optim.decay none"),
    ("optim.min_lr=1e-5 optim.decay=noam", "optim.min_lr 1e-05 optim.decay noam"),
    ("optim.decay_steps=5 optim.decay=noam", "optim.decay_steps 5.0 optim.decay noam"),
    ("optim.min_lr=1 optim.decay=wsd", "optim.min_lr 1.0 optim.lr 0.001"),
    ("monitoring.wandb={projekt:a}", "monitoring.wandb"),
    ("optim.betas=[0.9,1]", "optim.betas 0.9 1.0"),
    ("optim.eps=0", "optim.eps 0.0"),
    ("training.stop_signals=[SIGKILL]", "training.stop_signals[0] 'SIGKILL'"),
    *((f"training.profile={text}", f"training.profile '{text}'")
      for text in ("10", "0:3", "13:10", "1:51", "a:b", "1:2:3")),
    ("training.keep_last=0", "training.keep_last 0")])
def test_a_value_that_makes_no_sense_is_named(overrides, named):
    text, = texts_on(*overrides.split())
    assert_named(named, text)
    assert "; expected " in text


def test_every_such_value_is_named_at_once():
    texts = texts_on("optim.eps=0", "training.seed=-1", "training.accum=0")
    assert [text.partition(" is ")[0] for text in texts] == ["optim.eps", "training.seed",
                                                             "training.accum"]


def test_defaults_and_null_make_sense():
    assert texts_on("training.patience=null") == []


def test_texts_are_refused_together():
    with pytest.raises(ValueError, match="a is 1.\n.*b is 2."):
        refuse_config(["a is 1", "b is 2"])
    refuse_config([])


def test_a_value_that_would_print_without_end_is_cut(tmp_path):
    text = "optim: {lr: &a0 [x, x, x, x, x, x, x, x, x]}\n"
    for k in range(1, 9):
        text += f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n"
    with pytest.raises(ValueError, match=" is .*; expected a whole number") as caught:
        load(tmp_path, text + "seed: *a8\n")
    assert len(str(caught.value)) < 5_000


def test_of_many_problems_the_first_are_listed(tmp_path):
    with pytest.raises(ValueError, match="and 80 more"):
        load(tmp_path, "".join(f"k{k}: 1\n" for k in range(100)))


def test_the_config_of_the_other_script_is_refused():
    with pytest.raises(ValueError, match="'model.base_model_name'"):
        load_config(train_sedd_ddp.Config, ROOT / "configs" / "dpo.yaml")
    with pytest.raises(ValueError, match="'noise'"):
        load_config(train_dpo_ddp.Config, ROOT / "configs" / "sedd_cpu.yaml")


def test_keys_are_found_by_what_their_fields_say():
    section = make_dataclass("Section", [("a", int, key(1, may_change=True)), ("b", int, 2)])
    config = make_dataclass("Config", [("s", section, field(default_factory=section)),
                                       ("c", int, key(3, may_change=True, per_host=True))])
    assert list(key_fields(config)) == ["s.a", "s.b", "c"]
    assert keys_that(config, "may_change") == ("s.a", "c")
    assert keys_that(config, "per_host") == ("c",)
