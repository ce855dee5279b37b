"""The flat buffer is cuDNN's, element for element, and the separate tensors are torch's."""

from itertools import product

import pytest
import torch

from openrnn import cells, params
from openrnn.spec import BIAS_MODES, Spec

CELLS = (cells.rnn_tanh, cells.gru, cells.lstm)
# (I, H, P): ones, primes, odd, a power of two, I == H for skip input
SIZES = (
    (1, 1, 0), (1, 2, 0), (1, 2, 1), (2, 1, 0), (3, 5, 0), (5, 3, 2), (7, 7, 0), (7, 7, 3),
    (13, 17, 0), (13, 17, 16), (16, 32, 8), (31, 8, 0), (33, 9, 1), (64, 64, 0), (64, 64, 63),
    (101, 37, 0), (101, 37, 11), (257, 1, 0),
)  # fmt: skip


def every_spec():
    """Each combination of what changes the layout: thousands of networks."""
    for cell, (inputs, hidden, proj), layers, both, bias, mode in product(
        CELLS, SIZES, (1, 2, 3, 5), (False, True), BIAS_MODES, ("linear", "skip", "gates")
    ):
        if (proj and cell is not cells.lstm) or (mode != "linear" and inputs != hidden):
            continue
        width = hidden * len(cell.gates) if mode == "gates" else inputs
        yield cell.spec(
            width, hidden, num_layers=layers, bidirectional=both, bias_mode=bias,
            input_mode=mode, proj_size=proj,
        )  # fmt: skip


SPECS = tuple(every_spec())


def formulas(spec: Spec):
    """Offset and size of every gate of every tensor, from closed formulas measured on cuDNN 9.28.

    mat(l) = G*H*(s_l*In_l + O) + (P*H if projection)      s_l = 0 for the input that is skipped
    off W  = sum_{q<pl} mat + g*H*In_l                     off R  = sum mat + s_l*G*H*In_l + g*H*O
    off Wr = sum_{q<pl} mat + G*H*(s_l*In_l + O)
    off bW = sum_all mat + pl*nb*G*H + g*H                 off bR = off bW + (G*H if both)
    """
    G, H, P = len(spec.gates), spec.hidden_size, spec.proj_size
    L, D, Out = spec.num_layers, 2 if spec.bidirectional else 1, P or H
    double = spec.bias_mode == "double"
    nb = {"none": 0, "input": 1, "recurrent": 1, "double": 2}[spec.bias_mode]
    In = [spec.input_size] + [Out * D] * (L - 1)
    s = [1 if spec.input_mode == "linear" else 0] + [1] * (L - 1)
    mat = [G * H * (s[layer] * In[layer] + Out) + P * H for layer in range(L)]
    base = D * sum(mat)
    found = {}
    for layer, direction in product(range(L), range(D)):
        pl = layer * D + direction
        before = sum(mat[q // D] for q in range(pl))
        name = f"l{layer}" + ("_reverse" if direction else "")
        for g in range(G):
            if s[layer]:
                found["weight_ih", name, g] = before + g * H * In[layer], H * In[layer]
            found["weight_hh", name, g] = (
                before + s[layer] * G * H * In[layer] + g * H * Out,
                H * Out,
            )
            if spec.bias_mode in ("input", "double"):
                found["bias_ih", name, g] = base + pl * nb * G * H + g * H, H
            if spec.bias_mode in ("recurrent", "double"):
                found["bias_hh", name, g] = (
                    base + pl * nb * G * H + (G * H if double else 0) + g * H, H,
                )  # fmt: skip
        if P:
            found["weight_hr", name, 0] = before + G * H * (s[layer] * In[layer] + Out), P * H
    return found, base + L * D * nb * G * H


def test_there_are_thousands_of_specs():
    assert len(SPECS) == len(set(SPECS)) > 1500


def test_offsets_and_sizes_are_those_of_cudnn():
    for spec in SPECS:
        want, total = formulas(spec)
        found = {}
        for slot in params.slots(spec):
            kind, _, name = slot.name.rpartition("_l")
            gates = 1 if kind == "weight_hr" else len(spec.gates)
            for gate in range(gates):
                size = slot.size // gates
                found[kind, f"l{name}", gate] = slot.offset + gate * size, size
        assert found == want, spec
        assert params.size(spec) == total, spec


def test_a_gate_of_a_view_lies_where_cudnn_has_it():
    """Not the table of offsets but the tensors: every element of each gate, row-major."""
    for spec in SPECS[::11]:
        want, total = formulas(spec)
        views = dict(zip((slot.name for slot in params.module_slots(spec)),
                         params.unpack(spec, torch.arange(total))))  # fmt: skip
        for (kind, name, gate), (offset, size) in want.items():
            gates = 1 if kind == "weight_hr" else len(spec.gates)
            rows = views[f"{kind}_{name}"].chunk(gates)[gate]
            assert rows.flatten().tolist() == list(range(offset, offset + size)), spec


def test_slots_fill_the_buffer_without_gaps():
    for spec in SPECS:
        end = 0
        for slot in params.slots(spec):
            assert slot.offset == end
            end += slot.size
        assert end == params.size(spec)


TORCH = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


def test_names_order_and_shapes_are_those_of_torch():
    seen = 0
    for spec in SPECS:
        if spec.bias_mode not in ("double", "none") or spec.input_mode != "linear":
            continue
        options = {"proj_size": spec.proj_size} if spec.proj_size else {}
        module = TORCH[spec.cell](
            spec.input_size, spec.hidden_size, spec.num_layers, bias=spec.bias_mode == "double",
            bidirectional=spec.bidirectional, device="meta", **options,
        )  # fmt: skip
        want = [(name, tuple(value.shape)) for name, value in module.state_dict().items()]
        assert [(slot.name, slot.shape) for slot in params.module_slots(spec)] == want
        # torch hands its kernels the same tensors, layer by layer
        flat = [tuple(weight.shape) for row in module.all_weights for weight in row]
        assert flat == [shape for _, shape in want]
        chains = [slot.chain for slot in params.module_slots(spec)]
        assert chains == [k for k, row in enumerate(module.all_weights) for _ in row]
        seen += 1
    assert seen > 300


def test_modules_hold_these_parameters():
    import openrnn

    for bias_mode, mode in product(BIAS_MODES, ("linear", "skip")):
        layer = openrnn.LSTM(
            4, 4, 2, bidirectional=True, proj_size=0 if mode == "skip" else 3,
            bias=bias_mode != "none", bias_mode=bias_mode, input_mode=mode,
        )  # fmt: skip
        found = [(name, tuple(value.shape)) for name, value in layer.named_parameters()]
        assert found == [(slot.name, slot.shape) for slot in params.module_slots(layer.spec)]


@pytest.mark.parametrize("cell", [cells.peephole_lstm, cells.slstm, *CELLS])
def test_pack_and_unpack_are_inverse(cell):
    for layers, both, bias in product((1, 2), (False, True), BIAS_MODES):
        spec = cell.spec(3, 5, num_layers=layers, bidirectional=both, bias_mode=bias)
        flat = torch.randn(params.size(spec))
        tensors = params.unpack(spec, flat)
        assert torch.equal(params.pack(spec, tensors), flat)
        fresh = [torch.randn(slot.shape) for slot in params.module_slots(spec)]
        again = params.unpack(spec, params.pack(spec, fresh))
        assert all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))


def test_per_unit_vectors_come_after_all_biases():
    spec = cells.peephole_lstm.spec(3, 5, num_layers=2)
    plain = cells.lstm.spec(3, 5, num_layers=2)
    count = len(params.slots(plain))
    same = [(slot.name, slot.offset) for slot in params.slots(spec)[:count]]
    assert same == [(slot.name, slot.offset) for slot in params.slots(plain)]
    vectors = [slot.name for slot in params.slots(spec)[count:]]
    assert vectors == ["p_i_l0", "p_f_l0", "p_o_l0", "p_i_l1", "p_f_l1", "p_o_l1"]
    assert params.size(spec) == params.size(plain) + 2 * 3 * 5


def test_unpack_gives_views():
    spec = cells.lstm.spec(3, 5, num_layers=2, bidirectional=True, proj_size=2)
    flat = torch.zeros(params.size(spec))
    for k, view in enumerate(params.unpack(spec, flat)):
        view.fill_(k + 1)
    for k, slot in enumerate(params.module_slots(spec)):
        assert (flat[slot.offset : slot.offset + slot.size] == k + 1).all()


def test_pack_and_unpack_are_differentiable():
    spec = cells.gru.spec(3, 5)
    flat = torch.randn(params.size(spec), requires_grad=True)
    packed = params.pack(spec, [2 * tensor for tensor in params.unpack(spec, flat)])
    weight = torch.randn(params.size(spec))
    packed.backward(weight)
    assert torch.equal(flat.grad, 2 * weight)


def test_chains_name_the_tensors():
    spec = cells.peephole_lstm.spec(
        4, 4, num_layers=2, bidirectional=True, bias_mode="input", input_mode="skip", proj_size=3
    )
    slots = params.module_slots(spec)
    found = params.chains(spec, [torch.empty(slot.shape) for slot in slots])
    tensors = [torch.empty(slot.shape) for slot in slots]
    by_name = {slot.name: tensor for slot, tensor in zip(slots, tensors)}
    found = params.chains(spec, tensors)
    assert len(found) == 4
    for chain, suffix in zip(found, ("_l0", "_l0_reverse", "_l1", "_l1_reverse")):
        assert chain.w_ih is by_name.get("weight_ih" + suffix)
        assert (chain.w_ih is None) == suffix.startswith("_l0")
        assert chain.w_hh is by_name["weight_hh" + suffix]
        assert chain.b_ih is by_name["bias_ih" + suffix]
        assert chain.b_hh is None
        assert chain.w_hr is by_name["weight_hr" + suffix]
        assert [id(p) for p in chain.unit] == [id(by_name[n + suffix]) for n in spec.unit_params]


def test_wrong_tensors_are_named():
    spec = cells.gru.spec(3, 5)
    tensors = [torch.zeros(slot.shape) for slot in params.module_slots(spec)]
    with pytest.raises(ValueError, match=r"needs 4 parameters \(weight_ih_l0, .*\), got 3"):
        params.pack(spec, tensors[:3])
    tensors[1] = torch.zeros(15, 4)
    with pytest.raises(ValueError, match=r"weight_hh_l0 must have shape \(15, 5\), got \(15, 4\)"):
        params.pack(spec, tensors)
    for wrong in (torch.zeros(149), torch.zeros(150, 1)):
        with pytest.raises(ValueError, match=r"a vector of 150 elements, got shape"):
            params.unpack(spec, wrong)
