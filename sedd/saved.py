"""Checks of a file of SEDD weights, field by field, before a network is built from it.

    check_tensors(path, state)           # the weights are tensors that the file really holds
    check_settings(path, saved, state)   # sizes as in the weights, numbers that can be

All raise ValueError, naming the file and what is wrong in it.
"""

from pathlib import Path

import torch

from proteins.letters import N_TOKENS
from training.log import is_step

NOISE_KEYS = {"loglinear": ("eps",), "cosine": ("eps",), "geometric": ("sigma_min", "sigma_max")}
GRAPHS = ("absorb", "uniform")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_BLOCKS = 1000      # the published models have 12 and 24
EXPECTED = ("expected a checkpoint of train_sedd_ddp.py, an exported folder, or a file in the "
            "published layout")


def refuse(path, problems):
    """Raise ValueError with these texts on a file, if there are any."""
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{path} has values that cannot be: {'; '.join(problems[:8])}{more}; "
                         f"{EXPECTED}.")


def weights_of(state):
    """The weights by name, without the "module." of DDP, in what a file of SEDD holds."""
    weights = state.get("model", state)
    return {name.removeprefix("module."): value for name, value in weights.items()}


def is_dense(value):
    """Whether a value is an ordinary tensor of real numbers."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided
            and value.dtype in FLOATS and value.device.type == "cpu")


def check_tensors(path, state):
    """Refuse weights or averages that are no tensors of numbers, or larger than their file."""
    file = Path(path)
    if not isinstance(state.get("model", state), dict):
        raise ValueError(f"{path}: its model is no dict of tensors; {EXPECTED}.")
    names = list(state.get("model", state))
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: its weights have names that are no text; {EXPECTED}.")
    weights = weights_of(state)
    problems = [f"{name} is no tensor of numbers" for name, value in weights.items()
                if not is_dense(value)]
    averages = state.get("ema")
    if averages is not None:
        shadow = averages.get("shadow_params") if isinstance(averages, dict) else None
        if not isinstance(shadow, list) or not all(map(is_dense, shadow)):
            problems.append("ema.shadow_params is no list of tensors")
    refuse(path, problems)
    size = file.stat().st_size
    claimed = sum(value.numel() * value.element_size() for value in weights.values())
    if claimed > size:   # a tensor may repeat a number of the file without end
        raise ValueError(f"{path}: its weights would take {claimed:,} bytes, and the file has "
                         f"{size:,}; {EXPECTED}.")


def is_count(value, least=0):
    return type(value) is int and least <= value < 2**63


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300   # neither nan nor infinite


def section(saved, *names):
    """The dict under these keys, one in the other; an empty one where there is none."""
    for name in names:
        saved = saved.get(name) if isinstance(saved, dict) else None
    return saved if isinstance(saved, dict) else {}


def check_settings(path, saved, state):
    """Refuse settings of the wrong type or size.

    saved: the dict with the config. state: the weights, which the config's sizes must have."""
    problems = []
    for name in ("model", "graph", "noise"):
        if not section(saved, "config", name):
            problems.append(f"config.{name} is missing")
    refuse(path, problems)
    refuse(path, [*problems_of_sizes(section(saved, "config", "model"), weights_of(state)),
                  *problems_of_process(saved["config"]), *problems_of_data(saved),
                  *problems_of_progress(saved)])


def problems_of_sizes(sizes, weights):
    """Texts on the section `model` of a config. weights: by name, all tensors."""
    problems = []
    for key in ("hidden_size", "n_blocks", "n_heads", "cond_dim"):
        if not is_count(sizes.get(key), least=1):
            problems.append(f"model.{key} is {sizes.get(key)!r:.40}")
        elif key == "n_blocks" and sizes[key] > MOST_BLOCKS:
            problems.append(f"model.{key} is {sizes[key]}; expected at most {MOST_BLOCKS}")
    if sizes.get("parameterization") not in ("sedd", "subs"):
        problems.append(f"model.parameterization is {sizes.get('parameterization')!r:.40}")
    if problems:
        return problems
    # These three say how large the network is; load_official compares all its shapes.
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    found = {"hidden_size": weights.get("vocab_embed.embedding", torch.empty(0)).shape[-1:],
             "cond_dim": weights.get("sigma_map.mlp.0.bias", torch.empty(0)).shape[-1:],
             "n_blocks": (len(blocks),)}
    for key, size in found.items():
        if tuple(size) != (sizes[key],):
            problems.append(f"model.{key} is {sizes[key]}, and {size[0] if size else 0} by the "
                            "weights")
    return problems


def problems_of_process(config):
    """Texts on the sections `graph` and `noise` of a config."""
    problems = []
    if config["graph"].get("type") not in GRAPHS:
        problems.append(f"graph.type is {config['graph'].get('type')!r:.40}")
    noise = config["noise"]
    kind = noise.get("type")
    if not isinstance(kind, str) or kind not in NOISE_KEYS:
        return [*problems, f"noise.type is {kind!r:.40}"]
    for key in NOISE_KEYS[kind]:
        if not is_number(noise.get(key)):
            problems.append(f"noise.{key} is {noise.get(key)!r:.40}")
    return problems


def longest_of(saved):
    """Residues of the longest protein that a model was trained on, as its file tells."""
    return section(saved, "config", "data").get("max_length") or saved.get("max_length")


def problems_of_data(saved):
    """Texts on what a file says of its training proteins."""
    problems = []
    letters = saved.get("letters")
    if letters is not None and not (is_list(letters) and len(letters) == N_TOKENS):
        problems.append(f"letters is {letters!r:.40}")
    lengths = saved.get("lengths")
    if lengths is not None and not (is_list(lengths) and sum(lengths[1:]) > 0):
        problems.append(f"lengths is {lengths!r:.40}")
    longest = longest_of(saved)
    if not is_count(longest, least=1):
        problems.append(f"max_length is {longest!r:.40}")
    if not isinstance(saved.get("alphabet", ""), str):
        problems.append(f"alphabet is {saved['alphabet']!r:.40}")
    notes = saved.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        problems.append(f"notes is {notes!r:.40}")
    return problems


def is_list(values):
    """Whether a value is a list of counts whose sum an int64 holds."""
    return isinstance(values, list) and all(map(is_count, values)) and sum(values) < 2**63


def problems_of_progress(saved):
    """Texts on the step, the best evaluation and the data that a file notes."""
    about = saved.get("about", {})
    if not isinstance(about, dict):
        return [f"about is {about!r:.40}"]
    problems = []
    if not isinstance(about.get("averaged"), (bool, type(None))):
        problems.append(f"about.averaged is {about['averaged']!r:.40}")
    for source in (saved, about):
        if "step" in source and not is_step(source["step"]):
            problems.append(f"step is {source['step']!r:.40}")
        best = source.get("best")
        is_best = isinstance(best, dict) and is_step(best.get("step"))
        if best and not (is_best and type(best.get("score")) in (int, float)):
            problems.append(f"best is {best!r:.40}")
        if not isinstance(source.get("data") or {}, dict):
            problems.append(f"data is {source['data']!r:.40}")
    return problems
