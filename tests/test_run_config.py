"""run_config: what YAML and the command line may say, and that everything else is refused where it stands."""

from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest
import yaml

from run_config import config_differences, config_to_dict, dump_yaml, load_config


@dataclass
class Training:
    batch_size: Optional[int] = None
    accum: int = 1
    num_workers: int = 0
    n_iters: int = 1000


@dataclass
class Optim:
    lr: float = 3e-4
    warmup: int = 2500
    betas: tuple[float, float] = (0.9, 0.999)
    milestones: list[int] = field(default_factory=list)
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; expected more than 0")


@dataclass
class Memory:
    gradient_checkpointing: bool = False
    mixed_precision: bool | str = True
    max_memory_per_gpu: float | None = None


@dataclass
class DdpOptions:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False


@dataclass
class Config:
    seed: int = 0
    name: str = "demo"
    graph: Literal["absorb", "uniform"] = "absorb"
    training: Training = field(default_factory=Training)
    optim: Optim = field(default_factory=Optim)
    memory: Memory = field(default_factory=Memory)
    ddp: DdpOptions = field(default_factory=DdpOptions)


def load(tmp_path, text, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(Config, path, overrides)


def refusal(tmp_path, text, *overrides):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_the_fragments_of_the_original_guide_load(tmp_path):
    config = load(tmp_path, """
training: {batch_size: 16, accum: 4, num_workers: 4}
optim: {lr: 1e-4, warmup: 10000}
memory: {gradient_checkpointing: False, mixed_precision: True, max_memory_per_gpu: 0.85}
ddp: {find_unused_parameters: False, gradient_as_bucket_view: True}
""")
    assert config.training == Training(batch_size=16, accum=4, num_workers=4)
    assert config.optim == Optim(lr=0.0001, warmup=10000) and type(config.optim.lr) is float
    assert config.memory == Memory(False, True, 0.85)
    assert config.ddp == DdpOptions(False, True)


def test_keys_given_nowhere_keep_their_defaults_and_no_file_gives_defaults(tmp_path):
    assert load(tmp_path, "seed: 3") == Config(seed=3)
    assert load_config(Config) == Config()


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("5E-5", 5e-5), ("3", 3.0), (".5", 0.5), ("1.", 1.0),
                                         ("+2.5e+3", 2500.0), ("'1e-4'", 1e-4)])
def test_a_float_field_takes_every_way_to_write_a_number(tmp_path, text, value):
    config = load(tmp_path, f"optim: {{lr: {text}}}")
    assert config.optim.lr == value and type(config.optim.lr) is float


@pytest.mark.parametrize("text", ["true", "nan", ".nan", "inf", ".inf", "-.inf", "1e999", "1e", "abc", "[1]", "null", "0x1f.8", "1 e3"])
def test_a_float_field_refuses_what_is_no_number(tmp_path, text):
    message = refusal(tmp_path, f"optim: {{lr: {text}}}")
    assert "config.yaml: optim.lr: found" in message and "expected a number" in message


@pytest.mark.parametrize("text, value", [("7", 7), ("1e6", 10**6), ("2.0", 2), ("1_000", 1000), ("-1", -1)])
def test_an_int_field_takes_whole_numbers_however_written(tmp_path, text, value):
    config = load(tmp_path, f"training: {{n_iters: {text}}}")
    assert config.training.n_iters == value and type(config.training.n_iters) is int


@pytest.mark.parametrize("text", ["1.5", "1e-4", "true", "'ten'", ".inf", "null", "[1]"])
def test_an_int_field_refuses_the_rest(tmp_path, text):
    assert "training.n_iters: found" in refusal(tmp_path, f"training: {{n_iters: {text}}}")


@pytest.mark.parametrize("text", ["1", "0", "'true'", "null", "1.0"])
def test_a_bool_field_takes_only_true_and_false(tmp_path, text):
    assert "expected true or false" in refusal(tmp_path, f"memory: {{gradient_checkpointing: {text}}}")


def test_a_text_field_refuses_numbers_and_booleans_and_says_to_quote(tmp_path):
    assert load(tmp_path, "name: '12'").name == "12"
    for value in ("12", "1.5", "yes"):
        assert "Quote it" in refusal(tmp_path, f"name: {value}")


def test_unions_take_each_of_their_members_with_its_own_type(tmp_path):
    read = lambda text: load(tmp_path, text)
    assert read("memory: {mixed_precision: false}").memory.mixed_precision is False
    assert read("memory: {mixed_precision: bfloat16}").memory.mixed_precision == "bfloat16"
    assert read("optim: {scale: sqrt}").optim.scale == "sqrt"
    assert read("optim: {scale: {cap: 4}}").optim.scale == {"cap": 4.0}
    assert read("training: {batch_size: null}").training.batch_size is None
    assert "true or false or text" in refusal(tmp_path, "memory: {mixed_precision: 16}")
    assert "optim.scale" in refusal(tmp_path, "optim: {scale: {cap: four}}")


def test_lists_become_the_annotated_type_and_length(tmp_path):
    assert load(tmp_path, "optim: {betas: [0.9, 98e-2], milestones: [1, 1e3]}").optim == Optim(
        betas=(0.9, 0.98), milestones=[1, 1000])
    assert "expected 2" in refusal(tmp_path, "optim: {betas: [0.9]}")
    assert "optim.betas: found 0.9" in refusal(tmp_path, "optim: {betas: 0.9}")
    assert "optim.milestones: found 'x'" in refusal(tmp_path, "optim: {milestones: [1, x]}")


def test_a_choice_refuses_other_words_with_the_nearest_and_explains_yaml_booleans(tmp_path):
    message = refusal(tmp_path, "graph: absorbing")
    assert "absorb, uniform" in message and "Did you mean 'absorb'?" in message
    assert "quote" in refusal(tmp_path, "graph: off")

    @dataclass
    class Levels:
        level: Literal[0, 1] = 0

    with pytest.raises(ValueError, match="level: found True"):       # True == 1 in Python
        load_config(Levels, None, ["level=true"])


@pytest.mark.parametrize("text, advice", [
    ("optim: {warm_up: 3}", "unknown key 'optim.warm_up'. Did you mean 'optim.warmup'?"),
    ("optimizer: {lr: 3}", "unknown section or key 'optimizer'. Did you mean 'optim'?"),
    ("optim: {accum: 3}", "Did you mean 'training.accum'?"),
    ("optim: {qqqq: 3}", "Known here: lr, warmup, betas, milestones, scale"),
    ("batch_size: 3", "Did you mean 'training.batch_size'?"),
    ("optim: {1: 3}", "unknown key 'optim.1'")])
def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path, text, advice):
    message = refusal(tmp_path, text)
    assert "config.yaml" in message and advice in message


@pytest.mark.parametrize("text, says", [
    ("optim:\n  lr: 1\n  lr: 2\n", "line 3: found the key 'lr' again (first in line 2)"),
    ("optim: {lr: 1}\nseed: 1\noptim: {warmup: 2}\n", "line 3: found the key 'optim' again"),
    ("optim:\n", "section 'optim' is nothing"),
    ("optim: 3\n", "section 'optim' is 3"),
    ("optim: [lr, 3]\n", "section 'optim' is ['lr', 3]"),
    ("- a\n- b\n", "at the top level"),
    ("just words\n", "at the top level"),
    ("", "is empty"), ("# only a comment\n", "is empty"),
    ("optim:\n\tlr: 1\n", "line 2"), ("optim: {lr: 1\n", "not valid YAML"),
    ("name: !!python/object:os.system {}\n", "not valid YAML"),
    ("name: 2020-13-45\n", "quote it"),
    ("optim: {lr: -1}\n", "optim: lr is -1.0; expected more than 0")])
def test_a_file_that_says_it_badly_is_refused_with_the_place(tmp_path, text, says):
    message = refusal(tmp_path, text)
    assert "config.yaml" in message and says in message


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: Mülheim".encode("latin-1"))
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    for path, says in [("missing.yaml", "does not exist"), (".", "is a directory"),
                       ("latin.yaml", "not UTF-8"), ("binary.yaml", "not UTF-8")]:
        with pytest.raises(ValueError, match=says):
            load_config(Config, tmp_path / path)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    (tmp_path / "w.yaml").write_bytes(b"\xef\xbb\xbfseed: 3\r\noptim:\r\n  lr: 1e-4\r\n")
    assert load_config(Config, tmp_path / "w.yaml") == Config(seed=3, optim=Optim(lr=1e-4))


def test_the_command_line_prevails_over_the_file_and_its_last_word_over_its_first(tmp_path):
    config = load(tmp_path, "optim: {lr: 1e-4, warmup: 5}", "optim.lr=2e-4", "optim.lr=3e-4", "seed=7",
                  "optim.betas=[0.8, 0.9]", "optim.scale={cap: 4}", "memory.max_memory_per_gpu=null",
                  "name=a=b")
    assert config == Config(seed=7, name="a=b", optim=Optim(3e-4, 5, (0.8, 0.9), scale={"cap": 4.0}))


@pytest.mark.parametrize("override, says", [
    ("optim.lr", "expected section.key=value"), ("=3", "expected section.key=value"),
    ("optim.lr=fast", "optim.lr: found 'fast'"), ("optim.lr=", "optim.lr: found nothing"),
    ("optim.learning=1", "unknown key 'optim.learning'"), ("option.lr=1", "Did you mean 'optim'?"),
    ("optim={lr: 1}", "is a section"), ("optim.scale.cap=4", "'optim.scale' is a key, not a section"),
    ("optim.betas=[0.9, 0.99", "not valid YAML")])
def test_a_bad_override_is_refused_as_typed(tmp_path, override, says):
    message = refusal(tmp_path, "seed: 1", override)
    assert "command line" in message and override in message and says in message
    assert "config.yaml" not in message


def test_a_bad_value_in_the_file_may_be_corrected_from_the_command_line(tmp_path):
    assert load(tmp_path, "optim: {lr: fast}", "optim.lr=1e-3").optim.lr == 1e-3


def test_a_field_without_default_must_be_given(tmp_path):
    @dataclass
    class Needs:
        path: str

    with pytest.raises(ValueError, match="nothing given for 'path'"):
        load_config(Needs)
    assert load_config(Needs, None, ["path=x"]).path == "x"


def test_dumped_yaml_reads_back_to_the_same_configuration(tmp_path):
    config = Config(seed=3, optim=Optim(1e-8, 5, (0.8, 0.9), [1, 2], {"cap": 4.0}),
                    memory=Memory(True, "float16", 0.5))
    assert load(tmp_path, dump_yaml(config)) == config
    assert yaml.safe_load(dump_yaml(config)) == config_to_dict(config)


def test_config_to_dict_holds_only_plain_types():
    plain = config_to_dict(Config())
    assert plain["optim"]["betas"] == [0.9, 0.999] and type(plain["optim"]) is dict


def test_differences_list_each_changed_key_once_and_skip_the_ignored():
    old = config_to_dict(Config())
    new = config_to_dict(Config(seed=1, training=Training(n_iters=5, accum=2), ddp=DdpOptions(True),
                                optim=Optim(scale={"cap": 4.0})))
    del new["name"]
    assert config_differences(old, new, ignore=("training.n_iters", "ddp")) == [
        "seed: 0 -> 1", "name: 'demo' -> (absent)", "training.accum: 1 -> 2",
        "optim.scale: 'none' -> {'cap': 4.0}"]
    assert config_differences(old, old) == []
    assert config_differences({"a": 1}, {"a": 1.0}) == []
    assert config_differences({"a": 1}, {"a": True}) == ["a: 1 -> True"]
