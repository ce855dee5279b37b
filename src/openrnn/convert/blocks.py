"""Our parameters of each layer and direction as blocks of gates, and back."""

import torch
from torch import Tensor

from openrnn import params
from openrnn.convert.rewrite import Blocks
from openrnn.spec import Spec

SIDES = {"weight_ih": "W", "weight_hh": "R", "bias_ih": "bW", "bias_hh": "bR"}


def blocks_of(spec: Spec, chain: params.Chain) -> Blocks:
    """Our parameters of one layer and direction, gate by gate."""
    found: Blocks = {}
    for side, tensor in zip(SIDES.values(), (chain.w_ih, chain.w_hh, chain.b_ih, chain.b_hh)):
        if tensor is not None:
            parts = tensor.chunk(len(spec.gates))
            found |= {(side, gate): part for gate, part in zip(spec.gates, parts)}
    if chain.w_hr is not None:
        found["P", ""] = chain.w_hr
    return found | {("p", name): vector for name, vector in zip(spec.unit_params, chain.unit)}


def tensors_of(spec: Spec, chains: list[Blocks]) -> list[Tensor]:
    """Our parameters in the order of `module_slots`; biases that are not there are zeros."""
    made = []
    for slot in params.module_slots(spec):
        name, blocks = slot.name.rsplit("_l", 1)[0], chains[slot.chain]
        if name == "weight_hr":
            made.append(blocks["P", ""])
        elif name in SIDES:
            zeros = next(iter(blocks.values())).new_zeros(spec.hidden_size)
            made.append(torch.cat([blocks.get((SIDES[name], gate), zeros) for gate in spec.gates]))
        else:
            made.append(blocks["p", name])
    return made
