"""A network under the names that TensorFlow has for it, and its parameters gate by gate."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openrnn import cells
from openrnn.params import chains, size, unpack
from openrnn.spec import Spec, clip_bounds

MODES = {
    "lstm": cells.lstm,
    "gru": cells.gru,
    "rnn_tanh": cells.rnn_tanh,
    "rnn_relu": cells.rnn_relu,
}
INPUT_MODES = {
    "linear": "linear",
    "skip": "skip",
    "gates": "gates",
    "auto": "auto",
    "linear_input": "linear",
    "skip_input": "skip",
    "auto_select": "auto",
}
DIRECTIONS = ("unidirectional", "bidirectional", "reverse")


def _one_of(name: str, value: object, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")


def spec(
    rnn_mode: str,
    input_size: int,
    num_units: int,
    num_layers: int = 1,
    *,
    input_mode: str = "linear",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    bias_mode: str = "double",
    num_proj: int = 0,
    cell_clip: float | tuple[float, float] | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    reset_dropout_state: bool = False,
    recompute: str = "none",
    wavefront: int | None = None,
) -> Spec:
    """The network that the operators here take; they also take that of any cell, `cell.spec(...)`.

    Args:
        rnn_mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        input_mode: "linear", "skip" (x is added to every gate of layer 0, without a matrix),
            "gates" (x, of input_size G * num_units, has what is added to each gate, in order) or
            "auto": skip where input_size == num_units. TensorFlow's spellings are taken too.
        direction: "unidirectional", "bidirectional", or "reverse": each layer runs from the end of
            a sequence to its start.
        bias_mode: "double", "input", "recurrent" or "none".
        num_proj: P of an LSTM's projection; 0 or, as in cuDNN, num_units means none.
        cell_clip: bounds, or one symmetric bound, of an LSTM's cell state.
        precision: of float32 products, "ieee", "tf32" or "bf16", each of which permits more than
            the one before. "tf32" is for a GPU, where torch's setting is the default; backend fused
            may read operands as float16, which has as many bits. "bf16" also permits weights
            rounded to bfloat16, in calls without gradients on a CPU.
        algorithm: of cuDNN, "standard", "persist_static", "persist_dynamic" or
            "persist_static_small_h"; "auto" takes the fastest.
        reset_dropout_state: cuDNN's dropout starts anew from the seed of each call.
        recompute: "none", or "gates": backward computes gates again, to save memory.
        wavefront: steps of a chunk of layers that run at the same time, each a chunk behind the one
            below; 0: one layer after the other; None: a model of their time chooses; 1: one launch
            runs all layers, and where no such launch exists the choice is made as for None.

    Raises:
        ValueError: a word is unknown or a size impossible.

    Example:
        >>> network = spec("lstm", input_size=3, num_units=4, direction="bidirectional")
        >>> params_size(network)
        288
    """
    _one_of("rnn_mode", rnn_mode, tuple(MODES))
    _one_of("input_mode", input_mode, tuple(INPUT_MODES))
    _one_of("direction", direction, DIRECTIONS)
    skips = INPUT_MODES[input_mode]
    if skips == "auto":
        skips = "skip" if input_size == num_units else "linear"
    if num_proj == num_units:
        num_proj = 0
    if num_proj and rnn_mode != "lstm":
        raise ValueError(f"num_proj needs rnn_mode 'lstm', got {rnn_mode!r}")
    made = MODES[rnn_mode].spec(
        input_size, num_units, num_layers=num_layers,
        bidirectional=direction == "bidirectional", reverse=direction == "reverse",
        bias_mode=bias_mode, input_mode=skips, proj_size=num_proj, dropout=dropout,
        cell_clip=clip_bounds(cell_clip),
        precision=precision or "default", algorithm=algorithm,
        reset_dropout_state=reset_dropout_state, recompute=recompute, wavefront=wavefront,
    )  # fmt: skip
    cells.check(made)
    return made


def params_size(spec: Spec) -> int:
    """The number of elements of the flat buffer.

    Example:
        >>> params_size(spec("gru", input_size=3, num_units=4))
        108
    """
    return size(spec)


def params_to_canonical(params: Tensor, spec: Spec) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases gate by gate, as TensorFlow lists them: views of the flat buffer.

    Weights, for each layer and direction: a matrix (H, In) of each gate's input side, then one
    (H, O) of each gate's recurrent side, then with a projection (P, H). Biases, for each layer and
    direction: (H,) of each gate's input side, then of its recurrent side. Gates are in the order
    i f g o or r z n.

    Positions never move: 2G weights (2G + 1 with a projection) and 2G biases a layer and direction.
    What a network lacks is there and empty: (H, 0) for the input matrices of layer 0 in input_mode
    "skip", where TensorFlow itself aborts, or "gates", and (0,) for biases that the bias mode
    leaves out. Vectors of one number a unit, which only other cells have, follow all biases.

    Raises:
        ValueError: params is not a vector of `params_size(spec)` elements.

    Example:
        >>> network = spec("gru", input_size=3, num_units=4)
        >>> weights, biases = params_to_canonical(torch.randn(params_size(network)), network)
        >>> [tuple(weight.shape) for weight in weights]
        [(4, 3), (4, 3), (4, 3), (4, 4), (4, 4), (4, 4)]
    """
    gates = len(spec.gates)
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    vectors: list[Tensor] = []
    for chain in chains(spec, unpack(spec, params)):
        no_matrix = params.new_empty(gates * spec.hidden_size, 0)
        no_bias = params.new_empty(gates, 0).flatten()
        for matrix in (chain.w_ih, chain.w_hh):
            weights += (no_matrix if matrix is None else matrix).chunk(gates)
        if chain.w_hr is not None:
            weights.append(chain.w_hr)
        for bias in (chain.b_ih, chain.b_hh):
            biases += [no_bias] * gates if bias is None else bias.chunk(gates)
        vectors += chain.unit
    return weights, biases + vectors


def canonical_to_params(weights: Sequence[Tensor], biases: Sequence[Tensor], spec: Spec) -> Tensor:
    """The flat buffer of lists as `params_to_canonical` gives them; its exact inverse.

    Raises:
        ValueError: a list is too long or too short, or a tensor has another shape, dtype or device.

    Example:
        >>> network = spec("lstm", 3, 4, num_layers=2, bias_mode="input", num_proj=2)
        >>> params = torch.randn(params_size(network))
        >>> torch.equal(canonical_to_params(*params_to_canonical(params, network), network), params)
        True
    """
    shapes = params_to_canonical(torch.empty(size(spec), device="meta"), spec)
    for name, tensors, wanted in zip(("weights", "biases"), (weights, biases), shapes):
        if len(tensors) != len(wanted):
            raise ValueError(f"needs {len(wanted)} {name}, got {len(tensors)}")
        for index, (tensor, like) in enumerate(zip(tensors, wanted)):
            if tensor.shape != like.shape:
                raise ValueError(
                    f"{name}[{index}] must have shape {tuple(like.shape)}, "
                    f"got {tuple(tensor.shape)}"
                )
    tensors = [*weights, *biases]
    for tensor in tensors:
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise ValueError(
                f"weights and biases must be of one dtype and device, got {tensors[0].dtype} on "
                f"{tensors[0].device} and {tensor.dtype} on {tensor.device}"
            )
    # weights before biases and gate after gate is the order of the flat buffer as well
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
