"""ProteinMPNN on some CPUs of AMD: the same sums by faster products, see training/fast_linear.py.

    model = load_proteinmpnn("v_48_020.pt")
    speed_up(model)             # in place; the names in its state_dict stay

On all other processors the model computes as before.
"""
from mpnn.model import BlockLinear, ProteinMPNN
from training.fast_linear import linear, use_fast_linear


def speed_up(model: ProteinMPNN) -> None:
    """From now on the model's large products are computed by `linear`.

    In place: parameters, their names and hooks stay. Copies of the model keep it.
    """
    use_fast_linear(model)
    for module in model.modules():
        if type(module) is BlockLinear:
            module.__class__ = FastBlockLinear


class FastBlockLinear(BlockLinear):
    """BlockLinear, whose products of edges are computed by `linear`."""

    def product(self, x, block):
        return linear(x, block)
