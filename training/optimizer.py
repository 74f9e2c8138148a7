"""The optimizer of a training script: AdamW, or Muon for the matrices inside the blocks.

    optimizer = make_optimizer(model, lr, config.optim)

Muon replaces the update of a matrix by the nearest matrix of which all singular values are equal,
so that no direction is learned much faster than others. It takes the same learning rate as AdamW,
as its updates are scaled to the size of AdamW's (0.2 sqrt(larger side), arXiv 2502.16982).
Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the update is torch.optim.Muon's.
"""
import torch


def make_optimizer(model, lr, optim):
    """The optimizer that the config asks for, over all parameters of `model`.

    optim: section of the config.
    Raises: ValueError where this torch has no Muon."""
    if optim.name == "adamw":
        return _adamw(model.parameters(), lr, optim)
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"config: optim.name is muon; torch {torch.__version__} has none. "
                         "Expected torch 2.9 or newer, or optim.name adamw with "
                         "about a quarter of the learning rate.")
    return MuonAndAdamW(model, lr, optim)


def block_matrices(model) -> list[torch.nn.Parameter]:
    """The matrices that Muon updates: those of modules in a ModuleList (the blocks of a network).

    Embeddings, output layers and what else stands outside the blocks are left to AdamW, as in the
    source."""
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [p for block in blocks for p in block.parameters() if p.ndim == 2]


def state_bytes(model, name) -> int:
    """Bytes of the optimizer's state: two float32 numbers per weight; one where Muon updates.

    name: optim.name of the config."""
    n_weights = sum(p.numel() for p in model.parameters())
    n_by_muon = 0
    if name == "muon":
        n_by_muon = sum(p.numel() for p in block_matrices(model))
    return 8 * n_weights - 4 * n_by_muon


class MuonAndAdamW:
    """torch.optim.Muon for block_matrices and AdamW for all other parameters, used as one."""

    def __init__(self, model, lr, optim):
        matrices = block_matrices(model)
        ids = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in ids]
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=optim.weight_decay,
                                     adjust_lr_fn="match_rms_adamw")
        self.adamw = _adamw(others, lr, optim)

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups

    @property
    def state(self):
        return {**self.muon.state, **self.adamw.state}

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def step(self):
        self.muon.step()
        self.adamw.step()

    def state_dict(self):
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state):
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def _adamw(parameters, lr, optim):
    return torch.optim.AdamW(parameters, lr=lr, betas=optim.betas, eps=optim.eps,
                             weight_decay=optim.weight_decay, fused=True)
