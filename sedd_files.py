"""Trained SEDD models as files: checkpoints, exported folders, the published layout.

    sedd = load_sedd("runs/mine/checkpoints/best.pt")       # or a folder that export_sedd made
    export_sedd(sedd, "my_model")                           # model.safetensors, config.json, README
    export_sedd(sedd, "my_model.pth")                       # the published layout

Nothing but tensors and plain types is read. Folders need the package safetensors.
"""
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from run_log import write_text_atomic
from sedd_diffusion import make_graph, make_noise
from sedd_model import SEDD, load_official
from sequence_data import AMINO_ACIDS, LETTERS, N_TOKENS, UNIREF50, X_ID

FORMAT = "sedd-protein-1"   # of an exported folder
PUBLISHED_LENGTH = 1024     # residues the published models were trained on


# ---------------------------------------------------------------- load
class Sedd(NamedTuple):
    """A trained model.

    model: SEDD, in eval mode. graph, noise: see sedd_diffusion. config: {"model": sizes, "graph",
    "noise"}, plain. letters: (21,) int64, how often each token stood in the training proteins.
    lengths: (longest + 1,) int64, training proteins of each length, or None. max_length: residues
    it was trained on at most. about: what else is known, plain. notes: lines for the user.
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


def load_sedd(path, ema=True, device="cpu"):
    """The Sedd in a checkpoint, an exported folder, or a file in the published layout.

    Args:
        ema: take the averaged weights where there are some.
        device: where the model goes.
    Raises: ValueError or OSError for what is not there or cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        state, saved = read_export(path)
    else:
        state = read_file(path)
        saved = state if "config" in state else published_config(path, state)
    config = {name: saved["config"][name] for name in ("model", "graph", "noise")}
    graph = make_graph(config["graph"]["type"], N_TOKENS)
    noise = noise_of(config["noise"])
    model = model_of(config["model"], graph)
    if saved.get("alphabet", LETTERS) != LETTERS:
        raise ValueError(f"{path} has the alphabet {saved['alphabet']}; expected {LETTERS}.")
    try:
        used = load_official(model, state, use_ema=ema)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    spoilt = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if spoilt:
        raise ValueError(f"{path}: {len(spoilt)} tensors hold nan or infinite numbers, first "
                         f"{spoilt[0]}; expected finite weights. Use an older checkpoint.")
    letters, lengths = (saved.get(key) for key in ("letters", "lengths"))
    notes = [f"{path}: SEDD, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million "
             f"parameters, {config['graph']['type']} graph, {config['noise']['type']} noise, "
             f"{'averaged weights' if used == 'ema' else 'weights as saved'}",
             *saved.get("notes", ())]
    if letters is None:
        notes.append("no letter frequencies of the training data: UniRef50's stand for them")
        letters = np.append(np.round(np.array(UNIREF50) * 1e6), 0)
    length = saved["config"].get("data", {}).get("max_length") or saved["max_length"]
    about = {key: saved[key] for key in ("step", "best", "data", "about") if key in saved}
    return Sedd(model.eval().to(device), graph, noise, config, np.asarray(letters, np.int64),
                None if lengths is None else np.asarray(lengths, np.int64), length,
                about.pop("about", about), tuple(notes))


def model_of(sizes, graph):
    """A fresh SEDD of a config's section `model`, as a dict, without dropout."""
    names = ("hidden_size", "n_blocks", "n_heads", "cond_dim", "parameterization")
    return SEDD(graph.vocab_size, **{name: sizes[name] for name in names}, dropout=0.0,
                scale_by_sigma=graph.absorb, forbidden=(X_ID,))


def noise_of(section):
    """The noise schedule of a config's section `noise`, as a dict with keys for all types."""
    keys = ("sigma_min", "sigma_max") if section["type"] == "geometric" else ("eps",)
    return make_noise(section["type"], **{key: section[key] for key in keys})


def read_file(path):
    """The dict in a file of torch.save. Raises ValueError or OSError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:   # torch raises half a dozen kinds for a damaged file
        reason = (str(e).splitlines() or [""])[0]
        raise ValueError(f"cannot read {path} ({type(e).__name__}: {reason}). Expected a "
                         "checkpoint of train_sedd_ddp.py or in the published layout, of tensors "
                         "and plain types.") from None
    weights = state.get("model", state) if isinstance(state, dict) else {}
    if not isinstance(weights, dict) or not any("vocab_embed" in str(name) for name in weights):
        raise ValueError(f"{path} holds no SEDD model. Expected a checkpoint of "
                         "train_sedd_ddp.py, an exported folder, or the published layout.")
    return state


def published_config(path, state):
    """Settings of a file in the published layout, which says its sizes by its shapes alone."""
    weights = {name.removeprefix("module."): value
               for name, value in state.get("model", state).items()}
    vocab, hidden = weights["vocab_embed.embedding"].shape
    if vocab not in (N_TOKENS, N_TOKENS + 1):
        raise ValueError(f"{path} has {vocab} tokens. Expected {N_TOKENS} (the letters {LETTERS}, "
                         f"uniform graph) or {N_TOKENS + 1} (with a mask, absorbing graph).")
    frequencies = weights.get("rotary_emb.inv_freq")
    if frequencies is None:
        raise ValueError(f"{path} has no rotary_emb.inv_freq, the only trace of the number of "
                         "heads. Expected a file that the published code saved, or --export FILE.")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    model = {"hidden_size": hidden, "n_blocks": len(blocks), "parameterization": "sedd",
             "n_heads": hidden // (2 * len(frequencies)),
             "cond_dim": len(weights["sigma_map.mlp.0.bias"])}
    graph = "absorb" if vocab > N_TOKENS else "uniform"
    noise = {"type": "loglinear", "eps": 1e-3} if graph == "absorb" else {
        "type": "geometric", "sigma_min": 1e-4, "sigma_max": 20.0}
    return {"config": {"model": model, "graph": {"type": graph}, "noise": noise},
            "max_length": PUBLISHED_LENGTH,
            "notes": [f"the file names no alphabet and no noise: taken as {LETTERS} and "
                      f"{noise['type']}, the published default for this graph"]}


def read_export(folder):
    """(weights, settings) of a folder that export_sedd made."""
    load_file = need_safetensors().load_file
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{folder / 'config.json'} is no JSON ({e}). Expected a folder made by "
                         "--export.") from None
    if settings.get("format") != FORMAT:
        raise ValueError(f"{folder / 'config.json'} has the format {settings.get('format')!r}; "
                         f"expected {FORMAT!r}, as --export writes it.")
    return load_file(folder / "model.safetensors"), settings


def need_safetensors():
    """The module safetensors.torch. Raises ValueError where it is not installed."""
    try:
        import safetensors.torch
        return safetensors.torch
    except ImportError as e:
        raise ValueError(f"an exported folder needs the package safetensors ({e}). Expected it: "
                         "pip install safetensors; or export a file NAME.pth.") from None


# ---------------------------------------------------------------- save
def export_sedd(sedd, target):
    """Write the model into a folder (model.safetensors, config.json, README.md), or, where the name
    ends in .pth or .pt, into a file in the published layout.

    Raises: FileExistsError for a target that exists."""
    target = Path(target)
    if target.exists():
        raise FileExistsError(f"--export {target} exists; expected a new name.")
    weights = {name: value.detach().cpu().contiguous()
               for name, value in sedd.model.state_dict().items()}
    settings = {"format": FORMAT, "alphabet": LETTERS, "max_length": sedd.max_length,
                "config": sedd.config, "letters": sedd.letters.tolist(),
                "lengths": None if sedd.lengths is None else sedd.lengths.tolist(),
                "about": sedd.about}
    if target.suffix in (".pth", ".pt"):
        if sedd.config["model"]["parameterization"] != "sedd":
            raise ValueError("the published layout knows free scores only, and this model is subs. "
                             "Expected a folder: --export NAME.")
        half = torch.arange(0, sedd.model.head_dim, 2) / sedd.model.head_dim
        averages = [p.detach().cpu() for p in sedd.model.parameters() if p.requires_grad]
        state = {**settings, "model": {**weights, "rotary_emb.inv_freq": 10000.0 ** -half},
                 "ema": {"decay": 0.9999, "num_updates": 0, "shadow_params": averages},
                 "step": int(sedd.about.get("step", 0))}
        return write_whole(target, lambda path: torch.save(state, path))
    save_file = need_safetensors().save_file
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    save_file(weights, temporary / "model.safetensors")
    write_text_atomic(temporary / "config.json", json.dumps(settings, indent=1) + "\n")
    write_text_atomic(temporary / "README.md", model_card(sedd))
    os.replace(temporary, target)


def write_whole(path, write):
    """Call write(temporary path), then rename: path is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def model_card(sedd):
    """What a person should know of an exported model, as Markdown."""
    m, best = sedd.config["model"], sedd.about.get("best") or {}
    frequencies = ", ".join(f"{letter} {count / max(sedd.letters[:X_ID].sum(), 1):.3f}"
                            for letter, count in zip(AMINO_ACIDS, sedd.letters.tolist()))
    lines = ["# SEDD protein model", "",
             f"- network: {m['n_blocks']} blocks, width {m['hidden_size']}, {m['n_heads']} heads, "
             f"{m['parameterization']}; {sedd.config['graph']['type']} graph, "
             f"{sedd.config['noise']['type']} noise",
             f"- trained on at most {sedd.max_length} residues; step "
             f"{sedd.about.get('step', 'unknown')}",
             f"- training proteins: {(sedd.about.get('data') or {}).get('n', 'unknown')}",
             f"- best validation bound: {best.get('score', 'unknown')} nats per residue, at step "
             f"{best.get('step', 'unknown')}",
             f"- letters of the training data: {frequencies}", "",
             "Weights: `model.safetensors`, names of the published SEDD code, averaged weights "
             "where there were some. Tokens: the place of a letter in `alphabet` of `config.json`; "
             "then the mask.", "", "    python sample_sedd.py THIS_FOLDER --number 10", ""]
    return "\n".join(lines)
