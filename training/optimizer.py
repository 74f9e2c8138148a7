"""The optimizer of a training script: AdamW, or Muon for the matrices inside the blocks.

    optimizer = make_optimizer(model, lr, config.optim, ddp)
    optimizer.found_inf = bad              # scalar; 1.0: the gradient is nan, change nothing
    optimizer.step()                       # decided on the device: nothing waits for it

Muon replaces the update of a matrix by the nearest matrix of which all singular values are equal,
so that no direction is learned much faster than others. It takes the same learning rate as AdamW,
as its updates are scaled to the size of AdamW's (0.2 sqrt(larger side), arXiv 2502.16982).
Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the update is torch.optim.Muon's.
"""
import torch

from ddp_setup import Ddp, broadcast


def make_optimizer(model, lr, optim, ddp=None):
    """The optimizer that the config asks for, over all parameters of `model`.

    optim: section of the config. ddp: the ranks that share Muon's work; None: no others.
    Raises: ValueError where this torch has no Muon."""
    if optim.name == "adamw":
        return _adamw(model.parameters(), lr, optim)
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"config: optim.name is muon; torch {torch.__version__} has none. "
                         "Expected torch 2.9 or newer, or optim.name adamw with "
                         "about a quarter of the learning rate.")
    return MuonAndAdamW(model, lr, optim, ddp or Ddp())


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
    """torch.optim.Muon for block_matrices and AdamW for all other parameters, used as one.

    Where all ranks are on one host they share the matrices: each updates some and sends them to the
    others. Over a network that would take longer than to update all."""

    _step_supports_amp_scaling = True   # a GradScaler sets found_inf, and waits for nothing
    found_inf = None

    def __init__(self, model, lr, optim, ddp):
        matrices = block_matrices(model)
        ids = {id(p) for p in matrices}
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=optim.weight_decay,
                                     adjust_lr_fn="match_rms_adamw")
        for p in matrices:   # made here: `step` copies them before the first update
            self.muon.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.adamw = _adamw([p for p in model.parameters() if id(p) not in ids], lr, optim)
        self.ddp = ddp
        self.by_size = sorted(matrices, key=torch.Tensor.numel)

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups

    @property
    def state(self):
        return {**self.muon.state, **self.adamw.state}

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        """Update all parameters; where found_inf is 1.0 they and the state stay as they are."""
        bad = self.found_inf
        self.adamw.found_inf = bad
        self.adamw.step()
        # A device is not waited for.
        known_to_be_good = bad is None or (bad.device.type == "cpu" and not bad)
        if known_to_be_good:
            self._update_matrices()
            return
        # torch's Muon knows no found_inf: what it changes is put back where the step was bad.
        tensors = []
        for p, state in self.muon.state.items():
            tensors += [p, state["momentum_buffer"]]
        before = [t.clone() for t in tensors]
        self._update_matrices()
        for t, old in zip(tensors, before):
            t.copy_(torch.where(bad > 0, old, t))

    def _update_matrices(self):
        """torch's Muon for this rank's share; of the other matrices only the momentum moves here,
        so that each rank has the whole state."""
        n_ranks = self.ddp.world_size
        on_several_hosts = self.ddp.local_world_size < n_ranks
        if n_ranks == 1 or on_several_hosts:
            self.muon.step()
            return
        [group] = self.muon.param_groups
        shares = [self.by_size[rank::n_ranks] for rank in range(n_ranks)]
        gradients = [p.grad for p in group["params"]]
        mine = {id(p) for p in shares[self.ddp.rank]}
        for p in group["params"]:
            if id(p) not in mine:
                self.muon.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                p.grad = None   # Muon passes over it
        self.muon.step()
        for p, gradient in zip(group["params"], gradients):
            p.grad = gradient
        for rank, share in enumerate(shares):
            if not share:   # there are more ranks than matrices
                continue
            flat = broadcast(torch.cat([p.flatten() for p in share]), self.ddp, rank)
            for p, new in zip(share, flat.split([p.numel() for p in share])):
                p.copy_(new.view_as(p))

    def state_dict(self):
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state):
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def _adamw(parameters, lr, optim):
    return torch.optim.AdamW(parameters, lr=lr, betas=optim.betas, eps=optim.eps,
                             weight_decay=optim.weight_decay, fused=True)
