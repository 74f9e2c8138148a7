"""Trained SEDD models as files: checkpoints, the published layout, exported folders.

    sedd = load_sedd("runs/mine/checkpoints/best.pt")       # or a folder that export_sedd made
    export_sedd(sedd, "my_model")                           # config.json, model.safetensors
    config = with_architecture(config, state, given, ddp)   # --init_from of train_sedd_ddp.py
    start_from_weights(config, start, resume, model, ddp)

Files are read as tensors and plain types, never as code. Folders need the package safetensors.
"""
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_setup import broadcast
from proteins.letters import LETTERS, N_TOKENS, UNIREF50, X_ID
from sedd.diffusion import make_graph, make_noise
from sedd.model import SEDD, load_official
from training.files import check_saved, read_text, write_text_atomic, write_whole
from training.problems import refuse
from training.resume import hash_of

EXPECTED = ("Expected a checkpoint of train_sedd_ddp.py, an exported folder, or a file in the "
            "published layout.")
PUBLISHED_LENGTH = 1024     # tokens per sequence in training of the published models
LEAVE_OUT = ("To continue that run, leave --init_from out; to begin with these weights, give "
             "another --work_dir, or --fresh.")
# Weights can be used only if these keys are the same. Dropout and noise schedule may differ: the
# network's input is sigma, whatever the schedule. With another graph or parameterization the logits
# would mean something else.
WEIGHTS_DEPEND_ON = (("model", "hidden_size"), ("model", "n_blocks"), ("model", "n_heads"),
                     ("model", "cond_dim"), ("model", "parameterization"), ("graph", "type"))
SIZES = ("hidden_size", "n_blocks", "n_heads", "cond_dim", "parameterization")   # of a network
# What each type of noise is made of.
NOISE_KEYS = {"loglinear": ("eps",), "cosine": ("eps",), "geometric": ("sigma_min", "sigma_max")}


# ---------------------------------------------------------------- load
class Sedd(NamedTuple):
    """A trained model.

    model: SEDD, in eval mode. graph, noise: see sedd.diffusion.
    config: sections {"model", "graph", "noise"} of its config, as dicts.
    letters: (21,) int64, how often each token occurred in the training proteins.
    lengths: (longest + 1,) int64, number of training proteins of each length, or None.
    max_length: residues of the longest protein it was trained on.
    notes: lines for the user.
    """
    model: Any
    graph: Any
    noise: Any
    config: dict
    letters: np.ndarray
    lengths: np.ndarray | None
    max_length: int
    notes: tuple


class Saved(NamedTuple):
    """What a file or folder holds. state: what load_official takes. Others: as in Sedd."""
    state: dict
    config: dict
    max_length: int
    alphabet: str = LETTERS
    letters: list | None = None
    lengths: list | None = None
    notes: tuple = ()


def load_sedd(path, ema=True, device="cpu"):
    """The Sedd in a checkpoint, an exported folder, or a file in the published layout.

    Args:
        path: of such a file or folder, or a run folder, of which best.pt is taken, else last.pt.
        ema: take the averaged weights if the file has them.
        device: where the model goes.
    Raises: ValueError or OSError.
    """
    path, saved = read_saved(path)
    check_use(path, saved)
    config = saved.config
    graph = make_graph(config["graph"]["type"], N_TOKENS)
    model = model_of(config["model"], graph)
    try:
        noise = noise_of(config["noise"])
        used = load_official(model, saved.state, use_ema=ema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    not_finite = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if not_finite:
        raise ValueError(f"{path}: {len(not_finite)} tensors hold nan or infinite numbers, first "
                         f"{not_finite[0]}; expected finite weights. Use an older checkpoint.")
    notes = [f"{path}: SEDD, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million "
             f"parameters, {config['graph']['type']} graph, {config['noise']['type']} noise, "
             f"{'averaged weights' if used == 'ema' else 'weights as saved'}",
             *saved.notes]
    letters = saved.letters
    if letters is None:
        notes.append("the file has no letter frequencies of its training data: to score sequences, "
                     "those of UniRef50 are used instead")
        letters = np.append(np.round(np.array(UNIREF50) * 1e6), 0)
    lengths = saved.lengths
    if lengths is not None:
        lengths = np.asarray(lengths, np.int64)
    return Sedd(model=model.eval().to(device), graph=graph, noise=noise, config=config,
                letters=np.asarray(letters, np.int64), lengths=lengths,
                max_length=saved.max_length, notes=tuple(notes))


def read_saved(path):
    """(the file or folder, what it holds, a Saved) of a path of load_sedd."""
    path = file_of(Path(path))
    return path, read_folder(path) if path.is_dir() else read_file(path)


def file_of(path):
    """The path itself, or the best checkpoint of a run folder. Raises ValueError if there is none.
    """
    if path.is_dir() and not (path / "config.json").exists():
        checkpoint = checkpoint_in(path)
        if checkpoint is None and (path / "latest_model.pt").exists():
            raise ValueError(f"{path} is a run folder of train_dpo_ddp.py, so it holds a "
                             "ProteinMPNN; expected one of train_sedd_ddp.py. To draw sequences "
                             f"with it: sample_proteinmpnn.py {path}/latest_model.pt STRUCTURE.")
        if checkpoint is None:
            raise ValueError(f"{path} is a folder without config.json, best.pt and last.pt; "
                             "expected a run folder of train_sedd_ddp.py that has come to a "
                             "checkpoint, or a folder made by --export.")
        return checkpoint
    if not path.exists():
        checkpoint = checkpoint_in(path.parent)
        advice = f" There is {checkpoint}: give that." if checkpoint else ""
        raise ValueError(f"there is no {path}; expected a checkpoint of train_sedd_ddp.py, an "
                         f"exported folder, or a file in the published layout.{advice}")
    return path


def checkpoint_in(folder):
    """Path of the best SEDD checkpoint of a run folder, or in its folder checkpoints; or None."""
    if (folder / "latest_model.pt").exists():   # of DPO, which resumes from another last.pt
        return None
    for place in (folder / "checkpoints", folder):
        for name in ("best.pt", "last.pt", "last-1.pt"):
            if (place / name).is_file():
                return place / name
    return None


def check_use(path, saved, asked=None):
    """ValueError that lists what of a file's settings does not fit the alphabet and what was asked.

    asked: {(section, key): value} of some keys of WEIGHTS_DEPEND_ON."""
    problems = []
    for (section, name), wanted in (asked or {}).items():
        in_file = saved.config[section][name]
        if in_file != wanted:
            problems.append(f"{section}.{name} is {in_file} in the file: leave "
                            f"{section}.{name}={wanted} out")
    if saved.alphabet != LETTERS:
        problems.append(f"the alphabet is {saved.alphabet}; expected {LETTERS}: give other weights")
    refuse(problems, f"the weights of {path} cannot be used here:")


def model_of(sizes, graph):
    """A fresh SEDD of a config's section `model`, as a dict, without dropout."""
    return SEDD(graph.vocab_size, **{name: sizes[name] for name in SIZES}, dropout=0.0,
                scale_by_sigma=graph.absorb, forbidden=(X_ID,))


def unused_noise_keys(section):
    """Keys of a config's section `noise` that its type of noise does not use."""
    return [name for name in vars(section) if name not in ("type", *NOISE_KEYS[section.type])]


def noise_of(section):
    """The noise schedule of a config's section `noise`, as a dict with keys for all types.

    Raises: ValueError naming the key."""
    missing = [name for name in NOISE_KEYS[section["type"]] if name not in section]
    if missing:
        raise ValueError(f"config: {section['type']} noise has no {missing[0]}; expected a number.")
    try:
        return make_noise(section["type"],
                          **{name: section[name] for name in NOISE_KEYS[section["type"]]})
    except ValueError as e:
        raise ValueError(f"config: noise.{e}") from None


# ---------------------------------------------------------------- what a file holds
def read_file(path):
    """The Saved of a checkpoint, or of a file in the published layout. Raises: ValueError, OSError.
    """
    if not path.is_file():   # to read a pipe or a device may never end
        raise ValueError(f"{path} is no file; expected a file of weights or an exported folder.")
    check_saved(path)
    state = read_tensors(path, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    weights = network_of(state)
    if "vocab_embed.embedding" not in weights:
        other = ""
        if "W_e.weight" in weights:
            other = (" It holds a ProteinMPNN. Give its weights, such as best_model.pt of a run, "
                     "to sample_proteinmpnn.py, score_mutations.py or train_dpo_ddp.py.")
        raise ValueError(f"{path} holds no SEDD model, as it has no vocab_embed.embedding. "
                         f"{EXPECTED}{other}")
    if "config" not in state:
        return published_file(path, state, weights)
    config = state["config"]
    try:
        sections = {name: config[name] for name in ("model", "graph", "noise")}
        max_length = config["data"]["max_length"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: its config does not describe a model ({type(error).__name__}: "
                         f"{error}). {EXPECTED}") from None
    return Saved(state, sections, max_length, state.get("alphabet", LETTERS),
                 state.get("letters"), state.get("lengths"), tuple(state.get("notes", ())))


def read_tensors(path, load):
    """What load(path) returns. Raises ValueError or OSError."""
    try:
        return load(path)
    except Exception as error:   # a damaged file raises one of half a dozen types
        if isinstance(error, OSError) and error.filename:
            raise
        # Only the first sentence: torch then advises to load the file without weights_only.
        reason = str(error).partition(". ")[0].partition("\n")[0][:200]
        raise ValueError(f"cannot read {path} ({type(error).__name__}: {reason}). "
                         f"{EXPECTED}") from None


def network_of(state):
    """{name: weights} of the network, SEDD or ProteinMPNN, in what a file holds; {} if none."""
    weights = state
    if isinstance(state, dict):
        weights = state.get("model_state_dict", state.get("model", state))
    if not isinstance(weights, dict):
        return {}
    return {str(name).removeprefix("module."): value for name, value in weights.items()}


def published_file(path, state, weights):
    """The Saved of a file in the published layout: its settings follow from the shapes of its
    weights."""
    frequencies = weights.get("rotary_emb.inv_freq")
    if frequencies is None:
        raise ValueError(f"{path} has no rotary_emb.inv_freq, which alone tells the number of "
                         "heads. Expected a file that the published code saved.")
    vocab_size, hidden_size = weights["vocab_embed.embedding"].shape
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    model = {"hidden_size": hidden_size, "n_blocks": len(blocks), "parameterization": "sedd",
             "n_heads": hidden_size // (2 * len(frequencies)),
             "cond_dim": len(weights["sigma_map.mlp.0.bias"])}
    graph = "uniform"
    noise = {"type": "geometric", "sigma_min": 1e-4, "sigma_max": 20.0}
    if vocab_size > N_TOKENS:
        graph = "absorb"
        noise = {"type": "loglinear", "eps": 1e-3}
    alphabet = LETTERS
    if vocab_size not in (N_TOKENS, N_TOKENS + 1):
        alphabet = (f"one of {vocab_size} tokens, not of {N_TOKENS} (uniform graph) or "
                    f"{N_TOKENS + 1} (with a mask)")
    note = (f"the file names no alphabet and no noise: assumed are {LETTERS} and {noise['type']}, "
            "the published default for this graph")
    return Saved(state, {"model": model, "graph": {"type": graph}, "noise": noise},
                 PUBLISHED_LENGTH, alphabet, notes=(note,))


def read_folder(folder):
    """The Saved of a folder that export_sedd made. Raises ValueError or OSError."""
    path = folder / "config.json"
    try:
        settings = json.loads(read_text(path))
        config = {name: settings[name] for name in ("model", "graph", "noise")}
        max_length = config["model"]["length"]
        alphabet = settings["alphabet"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a model ({type(error).__name__}: {error}). "
                         "Expected a folder made by --export.") from None
    load = need_safetensors().load_file
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder} has no model.safetensors. Expected a folder made by --export.")
    state = read_tensors(weights, load)
    return Saved(state, config, max_length, alphabet, settings.get("letters"),
                 settings.get("lengths"))


def need_safetensors():
    """The module safetensors.torch. Raises ValueError if it is not installed."""
    try:
        import safetensors.torch
        return safetensors.torch
    except ImportError as error:
        raise ValueError(f"an exported folder needs the package safetensors ({error}). Install it: "
                         "`pip install safetensors`.") from None


# ---------------------------------------------------------------- start from weights
def with_architecture(config, state, given, ddp):
    """The config with the architecture of the weights that its run begins with, or began with.

    Collective. The keys of WEIGHTS_DEPEND_ON are then those of the file training.init_from, or of
    the checkpoint of a run that began with such a file. Without one the config stays as it is.

    Args:
        state: content of the checkpoint that is continued; None: a new run.
        given: keys that the command line gives, as "section.key". They keep their values, and a
            file that has others is refused.
    Raises: ValueError or OSError.
    """
    path = config.training.init_from
    sections = None
    if state is not None and state["init_from"]:
        sections = state["config"]
    elif state is None and path is not None:
        asked = {(section, name): getattr(getattr(config, section), name)
                 for section, name in WEIGHTS_DEPEND_ON if f"{section}.{name}" in given}
        if ddp.is_main:
            sections = read_architecture(path, asked)
        sections = broadcast(sections, ddp)
    if sections is None:
        return config
    changed = {}
    for section in ("model", "graph"):
        values = {name: sections[section][name] for of, name in WEIGHTS_DEPEND_ON
                  if of == section and f"{section}.{name}" not in given}
        changed[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **changed)


def read_architecture(path, asked):
    """Sections {"model", "graph"} of the settings of a file of weights. asked: see check_use."""
    try:
        path, saved = read_saved(path)
        check_use(path, saved, asked)
    except ValueError as error:
        raise ValueError(f"--init_from: {error}") from None
    return {section: saved.config[section] for section in ("model", "graph")}


def start_from_weights(config, start, resume, model, ddp):
    """Load training.init_from into a new run; refuse it for a run that began with other weights.

    Collective. Rank 0 reads the file; wrap_ddp later sends its weights to the other ranks.

    Args:
        start: how the run starts, a training.resume.Start.
        resume: the checkpoint of --resume, or None.
        model: the run's SEDD, on the device; changed on rank 0 only, and in a new run only.
    Returns: ({"path", "hash"} of the run's initial weights, None if they were random; lines on
        these weights for the user).
    Raises: ValueError or OSError.
    """
    path = config.training.init_from
    record = None
    lines = []
    if start.state is not None:
        record = start.state["init_from"]
    if record:
        lines = [f"weights: from the run's checkpoint; it began with {record['path']} (hash "
                 f"{record['hash']})"]
    if path is None:
        return record, lines
    if resume:
        raise ValueError(f"--resume {resume} and --init_from {path} (training.init_from) exclude "
                         "each other: continue a run (training.init_from=null), or begin one with "
                         "these weights.")
    if start.state is not None and record is None:
        raise ValueError(f"{start.path} is of a run that began with random weights, not with "
                         f"--init_from {path}. {LEAVE_OUT}")
    if record and record["path"] == path:   # even if the file has changed since
        return record, lines
    sedd, now = read_start(path, ddp)
    if record:
        if now["hash"] != record["hash"]:
            raise ValueError(f"{start.path} is of a run that began with other weights (hash "
                             f"{record['hash']} of {record['path']}; now {now['hash']} of "
                             f"{path}). {LEAVE_OUT}")
        return record, lines
    if sedd:
        model.load_state_dict(sedd.model.state_dict())
        lines = [f"weights: {sedd.notes[0]}, hash {now['hash']}", *sedd.notes[1:]]
    return now, lines


def read_start(path, ddp):
    """(Sedd of a file on rank 0, None elsewhere; its {"path", "hash"}). Collective."""
    sedd = None
    record = None
    if ddp.is_main:
        try:
            sedd = load_sedd(path)
        except ValueError as error:
            raise ValueError(f"--init_from: {error}") from None
        record = {"path": path, "hash": hash_of(sedd.model.state_dict())}
    return sedd, broadcast(record, ddp)


# ---------------------------------------------------------------- export
def export_sedd(sedd, folder):
    """Write a model into a new folder: model.safetensors and config.json, with the names and keys
    of the published code, and in config.json what load_sedd needs besides.

    Raises: FileExistsError for a folder that exists."""
    folder = Path(folder)
    if os.path.lexists(folder):   # a link that leads nowhere too
        raise FileExistsError(f"--export {folder} exists; expected a new name.")
    save = need_safetensors().save
    weights = {name: value.detach().cpu().contiguous()
               for name, value in sedd.model.state_dict().items()}
    exponent = torch.arange(0, sedd.model.head_dim, 2) / sedd.model.head_dim
    weights["rotary_emb.inv_freq"] = 10000.0 ** -exponent
    model = {"name": "protein", "type": "ddit", "length": sedd.max_length, "dropout": 0.0,
             "scale_by_sigma": sedd.graph.absorb,
             **{name: sedd.config["model"][name] for name in SIZES}}
    settings = {"tokens": N_TOKENS, "model": model, "graph": sedd.config["graph"],
                "noise": sedd.config["noise"], "alphabet": LETTERS,
                "letters": sedd.letters.tolist(),
                "lengths": None if sedd.lengths is None else sedd.lengths.tolist()}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_whole(temporary / "model.safetensors", lambda file: file.write(save(weights)))
        write_text_atomic(temporary / "config.json", json.dumps(settings, indent=1) + "\n")
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
