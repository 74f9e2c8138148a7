"""Trained SEDD models as files: checkpoints, exported folders, the published layout.

    sedd = load_sedd("runs/mine/checkpoints/best.pt")       # or a folder that export_sedd made
    export_sedd(sedd, "my_model")                           # model.safetensors, config.json, README
    export_sedd(sedd, "my_model.pth")                       # the published layout
    start_from_weights(config, start, resume, model, ddp)   # --init_from of train_sedd_ddp.py

Files are read as tensors and plain types, never as code. Folders need the package safetensors.
"""
import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ddp_setup import broadcast
from proteins.letters import AMINO_ACIDS, LETTERS, N_TOKENS, UNIREF50, X_ID
from sedd.diffusion import make_graph, make_noise
from sedd.fast_cpu import FastSEDD
from sedd.model import fitting_weights, load_official
from training.config import MOST_STEPS, config_to_dict, key, read_fields
from training.files import check_zip, read_text, write_text_atomic, write_whole
from training.resume import hash_of, using_checkpoint

EXPORT_FORMAT = "sedd-protein-1"   # of an exported folder
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
# What each type of noise is made of.
NOISE_KEYS = {"loglinear": ("eps",), "cosine": ("eps",), "geometric": ("sigma_min", "sigma_max")}


# ---------------------------------------------------------------- what a file holds
@dataclass
class Sizes:
    hidden_size: int = key(least=1)
    n_blocks: int = key(least=1, most=1000)     # the published models have 12 and 24
    n_heads: int = key(least=1)
    cond_dim: int = key(least=1)
    parameterization: Literal["sedd", "subs"] = key()


@dataclass
class GraphSettings:
    type: Literal["absorb", "uniform"]


@dataclass
class NoiseSettings:
    """With the keys of its type, see NOISE_KEYS."""
    type: Literal["loglinear", "geometric", "cosine"]
    eps: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None


@dataclass
class DataSettings:
    max_length: int | None = key(None, least=1)


@dataclass
class LossSettings:
    reduction: str | None = None


@dataclass
class SavedConfig:
    """The part of a config that decides what weights mean."""
    model: Sizes
    graph: GraphSettings
    noise: NoiseSettings
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    loss: LossSettings = dataclasses.field(default_factory=LossSettings)


@dataclass
class Best:
    step: int = key(least=0, most=MOST_STEPS)
    score: float = key()


@dataclass(kw_only=True)
class About:
    """What a file tells of the run that made it."""
    step: int | None = key(None, least=0, most=MOST_STEPS)
    best: Best | None = None
    data: dict[str, Any] | None = None
    averaged: bool | None = None
    reduction: str | None = None


@dataclass(kw_only=True)
class Saved(About):
    """A file of SEDD, apart from its weights."""
    config: SavedConfig
    max_length: int | None = key(None, least=1)
    alphabet: str = LETTERS
    letters: list[int] | None = key(None, least=0, most=10**15)   # their sum has 64 bits
    lengths: list[int] | None = key(None, least=0, most=10**12)
    notes: list[str] = dataclasses.field(default_factory=list)
    about: About | None = None      # in an export


@dataclass
class Averages:
    shadow_params: list[torch.Tensor]


@dataclass
class Weights:
    model: dict[str, torch.Tensor]
    ema: Averages | None = None


# ---------------------------------------------------------------- load
class Sedd(NamedTuple):
    """A trained model.

    model: SEDD, in eval mode. graph, noise: see sedd.diffusion.
    config: sections {"model", "graph", "noise"} of its config, as dicts.
    letters: (21,) int64, how often each token occurred in the training proteins.
    lengths: (longest + 1,) int64, number of training proteins of each length, or None.
    max_length: residues of the longest protein it was trained on.
    about: the step and the best evaluation, if known. notes: lines for the user.
    """
    model: Any
    graph: Any
    noise: Any
    config: dict
    letters: np.ndarray
    lengths: np.ndarray | None
    max_length: int
    about: dict
    notes: tuple


def load_sedd(path, ema=True, device="cpu", expected=None):
    """The Sedd in a checkpoint, an exported folder, or a file in the published layout.

    Args:
        path: of such a file or folder, or a run folder, of which best.pt is taken, else last.pt.
        ema: take the averaged weights if the file has them.
        device: where the model goes.
        expected: sections {"model", "graph"} of a config, as dicts, which must equal those of the
            file in the keys of WEIGHTS_DEPEND_ON; None: any are accepted.
    Raises: ValueError, naming all that does not fit, or OSError.
    """
    path = file_of(Path(path))
    state, content = read_weights(path)
    saved = read_saved(path, content)
    config = {}
    for name in ("model", "graph", "noise"):
        config[name] = {**content["config"][name], **given(getattr(saved.config, name))}
    graph = make_graph(saved.config.graph.type, N_TOKENS)
    try:
        noise = noise_of(config["noise"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    model, used = fill(path, state, config, graph, ema, differences(saved, config, expected))
    about = about_weights(content, used)
    averaged = about.get("averaged", used == "ema")
    notes = [f"{path}: SEDD, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million "
             f"parameters, {config['graph']['type']} graph, {config['noise']['type']} noise, "
             f"{'averaged weights' if averaged else 'weights as saved'}",
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
                max_length=saved.config.data.max_length or saved.max_length,
                about=about, notes=tuple(notes))


def file_of(path):
    """The path itself, or the best checkpoint of a run folder. Raises ValueError if there is none.
    """
    if path.is_dir() and not (path / "config.json").exists():
        found = checkpoint_in(path)
        found = found or model_of_dpo(path)
        if found is None and (path / "latest_model.pt").exists():
            raise ValueError(f"{path} is a run folder of train_dpo_ddp.py, so it holds a "
                             "ProteinMPNN; expected one of train_sedd_ddp.py. To draw sequences "
                             f"with it: sample_proteinmpnn.py {path}/best_model.pt STRUCTURE.")
        if found is None:
            raise ValueError(f"{path} is a folder without config.json, best.pt and last.pt; "
                             "expected a run folder of train_sedd_ddp.py that has come to a "
                             "checkpoint, or a folder made by --export.")
        return found
    if os.path.lexists(path) and not path.exists():
        raise ValueError(f"{path} is a link that leads to no file; expected a file of weights, or "
                         "an exported folder.")
    if not path.exists():
        found = checkpoint_in(path.parent)
        advice = f" There is {found}: give that." if found else ""
        raise ValueError(f"there is no {path}; expected a checkpoint of train_sedd_ddp.py, an "
                         f"exported folder, or a file in the published layout.{advice}")
    return path


def model_of_dpo(folder):
    """Path of the best SEDD in a run folder of train_dpo_ddp.py, or None."""
    for name in ("best_model.pt", "latest_model.pt"):
        path = folder / name
        if path.is_file():
            try:
                read_file(path)
            except (ValueError, OSError):   # a ProteinMPNN, or damaged
                continue
            return path
    return None


def checkpoint_in(folder):
    """Path of the best SEDD checkpoint of a run folder, or in its folder checkpoints; or None."""
    if (folder / "latest_model.pt").exists():   # of DPO, which resumes from another last.pt
        return None
    for place in (folder / "checkpoints", folder):
        for name in ("best.pt", "last.pt", "last-1.pt"):
            if (place / name).is_file():
                return place / name
    return None


def read_weights(path):
    """(what load_official takes, the settings) of a file or folder, both dicts."""
    if path.is_dir():
        return read_export(path)
    if not path.is_file():   # to read a pipe or a device may never end
        raise ValueError(f"{path} is no file; expected a file of weights or an exported folder.")
    state = read_file(path)
    check_tensors(path, state)
    if "sums" in state and "base" in state:
        raise ValueError(f"{path} is a checkpoint from which train_dpo_ddp.py resumes; expected "
                         "best_model.pt or latest_model.pt of its run folder.")
    if "config" in state:
        return state, state
    return state, published_config(path, state)


def read_saved(path, content):
    """The Saved of what a file holds. Raises: ValueError."""
    saved = read_fields(Saved, content, path)
    if saved.config.data.max_length is None and saved.max_length is None:
        raise ValueError(f"{path} has no max_length; expected a whole number. {EXPECTED}")
    if saved.letters is not None and len(saved.letters) != N_TOKENS:
        raise ValueError(f"{path} has {len(saved.letters)} letters; expected the counts of "
                         f"{N_TOKENS}. {EXPECTED}")
    if saved.lengths is not None and not sum(saved.lengths[1:]):
        raise ValueError(f"{path} has no protein in its lengths; expected the number of proteins "
                         f"of each length. {EXPECTED}")
    return saved


def given(section):
    """{key: value} of those keys of a dataclass that a file gave."""
    return {name: value for name, value in vars(section).items() if value is not None}


def check_tensors(path, state):
    """Refuse weights or averages that are no tensors, or larger than their file."""
    weights = read_fields(Weights, state if "model" in state else {"model": state}, path).model
    size = path.stat().st_size
    claimed = sum(value.numel() * value.element_size() for value in weights.values())
    if claimed > size:   # a tensor may repeat a number of the file without end
        raise ValueError(f"{path}: its weights would take {claimed:,} bytes, and the file has "
                         f"{size:,}. {EXPECTED}")


def differences(saved, config, expected):
    """Texts on what of a file's settings does not fit the alphabet and the expected config."""
    problems = []
    if expected:
        for section, name in WEIGHTS_DEPEND_ON:
            found = config[section][name]
            wanted = expected[section][name]
            if found != wanted:
                problems.append(f"{section}.{name} is {found} in the file, and {wanted} by the "
                                "config")
    if saved.alphabet != LETTERS:
        problems.append(f"the alphabet is {saved.alphabet}; expected {LETTERS}")
    return problems


def fill(path, state, config, graph, ema, problems):  # noqa: PLR0913  (all that the model is of)
    """(model with the weights of a file, which of them: "ema" or "model").

    Raises: ValueError with the problems known so far, and those of the weights. Their shapes are
    compared before the model takes memory."""
    try:
        with torch.device("meta"):
            fitting_weights(model_of(config["model"], graph), state, ema)
    except (ValueError, RuntimeError) as e:   # RuntimeError: sizes that no memory has
        problems = [*problems, str(e)]
    if problems:
        listed = "\n    ".join(problems)
        raise ValueError(f"the weights of {path} cannot be used here:\n    {listed}\n  Expected "
                         "the same. Give other weights, or set these keys as in the file.")
    model = model_of(config["model"], graph)
    used = load_official(model, state, use_ema=ema)
    not_finite = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if not_finite:
        raise ValueError(f"{path}: {len(not_finite)} tensors hold nan or infinite numbers, first "
                         f"{not_finite[0]}; expected finite weights. Use an older checkpoint.")
    return model, used


def about_weights(content, used):
    """The Sedd.about of what a file holds. used: which weights were taken, "ema" or "model"."""
    if "about" in content:    # an export
        return content["about"]
    about = {name: content[name] for name in ("step", "best", "data") if name in content}
    if about:               # a checkpoint; the published layout has none of these
        about["averaged"] = used == "ema"
        about["reduction"] = content["config"].get("loss", {}).get("reduction")
    return about


def model_of(sizes, graph):
    """A fresh SEDD of a config's section `model`, as a dict, without dropout."""
    names = ("hidden_size", "n_blocks", "n_heads", "cond_dim", "parameterization")
    return FastSEDD(graph.vocab_size, **{name: sizes[name] for name in names}, dropout=0.0,
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


def read_tensors(path, load):
    """What load(path) returns. Raises ValueError or OSError."""
    try:
        return load(path)
    except OSError:
        raise
    except Exception as e:   # a damaged file raises one of half a dozen types
        # Only the first sentence: torch then advises to load the file without weights_only.
        reason = str(e).partition(". ")[0].partition("\n")[0][:200]
        raise ValueError(f"cannot read {path} ({type(e).__name__}: {reason}). Expected a whole "
                         "checkpoint of train_sedd_ddp.py, an exported folder, or a file in the "
                         "published layout, of tensors and plain types.") from None


def read_file(path):
    """The dict in a file of torch.save. Raises ValueError or OSError."""
    check_zip(path)
    state = read_tensors(path, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    weights = state.get("model", state) if isinstance(state, dict) else {}
    embedding = "vocab_embed.embedding"
    if not isinstance(weights, dict) or not {embedding, f"module.{embedding}"} & weights.keys():
        other = ""
        if is_proteinmpnn(state):
            other = (" It holds a ProteinMPNN. Give its weights, such as best_model.pt of a run, "
                     "to sample_proteinmpnn.py, score_mutations.py or, with "
                     "model.kind=proteinmpnn (configs/dpo.yaml), train_dpo_ddp.py.")
        raise ValueError(f"{path} holds no SEDD model, as it has no {embedding}. Expected a "
                         "checkpoint of train_sedd_ddp.py, an exported folder, or the published "
                         f"layout.{other}")
    return state


def is_proteinmpnn(state):
    """Whether a file of torch.save holds a ProteinMPNN, published or of train_dpo_ddp.py."""
    if not isinstance(state, dict):
        return False
    weights = state.get("model_state_dict", state.get("model"))
    return isinstance(weights, dict) and "W_e.weight" in weights


def published_config(path, state):
    """Settings of a file in the published layout, found from the shapes of its weights."""
    weights = {name.removeprefix("module."): value
               for name, value in state.get("model", state).items()}
    embedding = weights["vocab_embed.embedding"]
    bias = weights.get("sigma_map.mlp.0.bias")
    if embedding.dim() != 2 or bias is None or bias.dim() != 1:
        raise ValueError(f"{path} has a vocab_embed.embedding of shape {tuple(embedding.shape)} "
                         "and no vector sigma_map.mlp.0.bias; expected a matrix, and a vector.")
    vocab, hidden = embedding.shape
    frequencies = weights.get("rotary_emb.inv_freq")
    if frequencies is None or frequencies.dim() != 1 or not len(frequencies):
        raise ValueError(f"{path} has no rotary_emb.inv_freq, which alone tells the number of "
                         "heads. Expected a file that the published code saved, or --export FILE.")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    model = {"hidden_size": hidden, "n_blocks": len(blocks), "parameterization": "sedd",
             "n_heads": hidden // (2 * len(frequencies)),
             "cond_dim": len(bias)}
    graph = "absorb" if vocab > N_TOKENS else "uniform"
    if graph == "absorb":
        noise = {"type": "loglinear", "eps": 1e-3}
    else:
        noise = {"type": "geometric", "sigma_min": 1e-4, "sigma_max": 20.0}
    alphabet = LETTERS
    if vocab not in (N_TOKENS, N_TOKENS + 1):   # load_sedd refuses this
        alphabet = (f"one of {vocab} tokens, not of {N_TOKENS} (uniform graph) or {N_TOKENS + 1} "
                    "(with a mask)")
    return {"config": {"model": model, "graph": {"type": graph}, "noise": noise},
            "max_length": PUBLISHED_LENGTH, "alphabet": alphabet,
            "notes": [f"the file names no alphabet and no noise: assumed are {LETTERS} and "
                      f"{noise['type']}, the published default for this graph"]}


def read_export(folder):
    """(weights, settings) of a folder that export_sedd made."""
    try:
        settings = json.loads(read_text(folder / "config.json"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json. Expected a folder made by "
                         "--export.") from None
    except (ValueError, RecursionError, OSError) as e:
        raise ValueError(f"{folder / 'config.json'} is no JSON ({e}). Expected a folder made by "
                         "--export.") from None
    found = settings.get("format") if isinstance(settings, dict) else None
    if found != EXPORT_FORMAT:
        raise ValueError(f"{folder / 'config.json'} has the format {found!r}; expected "
                         f"{EXPORT_FORMAT!r}, as --export writes it.")
    load = need_safetensors().load_file
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} is missing, or no file; expected a folder made by --export.")
    state = read_tensors(path, load)
    check_tensors(path, state)
    return state, settings


def need_safetensors():
    """The module safetensors.torch. Raises ValueError if it is not installed."""
    try:
        import safetensors.torch
        return safetensors.torch
    except ImportError as e:
        raise ValueError(f"an exported folder needs the package safetensors ({e}). Install it: "
                         "pip install safetensors; or export a file NAME.pth.") from None


# ---------------------------------------------------------------- start from weights
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
        record = start.state.get("init_from")   # checkpoints of earlier versions have none
    if record:
        with using_checkpoint(start.path):
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
    sedd, found = read_start(path, ddp, expected=None if record else config_to_dict(config))
    if record:
        if found["hash"] != record["hash"]:
            raise ValueError(f"{start.path} is of a run that began with other weights (hash "
                             f"{record['hash']} of {record['path']}; now {found['hash']} of "
                             f"{path}). {LEAVE_OUT}")
        return record, lines
    if sedd:
        model.load_state_dict(sedd.model.state_dict())
        lines = [f"weights: {sedd.notes[0]}, hash {found['hash']}", *sedd.notes[1:]]
    return found, lines


def read_start(path, ddp, expected):
    """(Sedd of a file on rank 0, None elsewhere; its {"path", "hash"}). expected: see load_sedd.
    Collective."""
    sedd = None
    found = None
    if ddp.is_main:
        try:
            sedd = load_sedd(path, expected=expected)
        except ValueError as e:
            raise ValueError(f"--init_from: {e}") from None
        found = {"path": path, "hash": hash_of(sedd.model.state_dict())}
    return sedd, broadcast(found, ddp)


# ---------------------------------------------------------------- save
def export_sedd(sedd, target):
    """Write the model into a folder (model.safetensors, config.json, README.md) or, if the name of
    the target ends in .pth or .pt, into a file in the published layout.

    Raises: FileExistsError for a target that exists."""
    target = Path(target)
    if os.path.lexists(target):   # a link that leads nowhere too
        raise FileExistsError(f"--export {target} exists; expected a new name.")
    weights = {name: value.detach().cpu().contiguous()
               for name, value in sedd.model.state_dict().items()}
    settings = {"format": EXPORT_FORMAT, "alphabet": LETTERS, "max_length": sedd.max_length,
                "config": sedd.config, "letters": sedd.letters.tolist(),
                "lengths": None if sedd.lengths is None else sedd.lengths.tolist(),
                "about": sedd.about}
    if target.suffix in (".pth", ".pt"):
        if sedd.config["model"]["parameterization"] != "sedd":
            raise ValueError("the published layout is for parameterization sedd, and this model is "
                             "subs. Expected a folder: --export NAME.")
        exponent = torch.arange(0, sedd.model.head_dim, 2) / sedd.model.head_dim
        averages = [p.detach().cpu() for p in sedd.model.parameters() if p.requires_grad]
        state = {**settings, "model": {**weights, "rotary_emb.inv_freq": 10000.0 ** -exponent},
                 "ema": {"decay": 0.9999, "num_updates": 0, "shadow_params": averages},
                 "step": int(sedd.about.get("step", 0))}
        return write_whole(target, lambda file: torch.save(state, file))
    save = need_safetensors().save
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_whole(temporary / "model.safetensors", lambda file: file.write(save(weights)))
        write_text_atomic(temporary / "config.json", json.dumps(settings, indent=1) + "\n")
        write_text_atomic(temporary / "README.md", model_card(sedd))
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_card(sedd):
    """The README.md of an exported model: what it is and how well it does."""
    model = sedd.config["model"]
    best = sedd.about.get("best") or {}
    shares = sedd.letters[:X_ID] / max(sedd.letters[:X_ID].sum(), 1)
    # Without validation proteins, the best weights are those with the lowest training loss.
    kind = "validation bound" if "val/loss" in best else "training loss"
    by_protein = sedd.about.get("reduction") == "sequence" and "val/loss" not in best
    unit = "protein" if by_protein else "residue"
    averaged = {True: "averages over steps", False: "not averaged", None: "as in the source file"}
    score = f"{best['score']:.4f} nats per {unit}" if best else "unknown"
    return f"""# SEDD protein model

- network: {model['n_blocks']} blocks, width {model['hidden_size']}, {model['n_heads']} heads, \
{model['parameterization']}; {sedd.config['graph']['type']} graph, \
{sedd.config['noise']['type']} noise
- trained on at most {sedd.max_length} residues; step {sedd.about.get('step', 'unknown')}
- training proteins: {(sedd.about.get('data') or {}).get('n', 'unknown')}
- best {kind}, of step {best.get('step', 'unknown')}: {score}
- letters of the training data: \
{', '.join(f'{letter} {share:.3f}' for letter, share in zip(AMINO_ACIDS, shares.tolist()))}

Weights: `model.safetensors`, names of the published SEDD code; \
{averaged[sedd.about.get('averaged')]}.
Token ids: the place of a letter in `alphabet` of `config.json`, from 0\
{'; the mask comes last' if sedd.graph.absorb else ''}.

    python sample_sedd.py THIS_FOLDER --number 10
"""
