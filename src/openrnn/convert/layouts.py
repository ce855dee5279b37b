"""How each library keeps the arrays of one layer and direction: rows of data.

A row of an array says which `sides` it holds, of which `gates` in which order, along which `axes`:

    sides  W input matrix, R recurrent matrix, P projection, bW and bR their biases, p vectors of
           one number a unit
    gates  by our names, in the order of the library
    axes   g gates, o units, d inputs, q outputs of the projection, s sides, n heads; what stands in
           brackets is one axis, as "d (g o)" of a matrix (In, G*H)

Matrices of two sides lie beside each other along d. With n the matrix is block-diagonal: n heads,
each with its own units and inputs. z of every GRU here multiplies the state before, as ours does.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Array:
    """One array of a library: its name there, and what stands where in it."""

    name: str
    sides: tuple[str, ...]
    gates: tuple[str, ...]
    axes: str

    @property
    def keys(self) -> list[list[tuple[str, str]]]:
        """The blocks it holds, side by side and gate by gate; a gate may name its own side."""
        found = []
        for side in self.sides:
            named = [gate.rpartition(":") for gate in self.gates or ("",)]
            found.append([(other or side, gate) for other, _, gate in named])
        return found

    @property
    def bias(self) -> bool:
        return self.sides[0] in ("bW", "bR")

    @property
    def optional(self) -> bool:
        """Whether a network may lack it: a projection."""
        return self.sides[0] == "P"


@dataclass(frozen=True)
class Layout:
    """The arrays of one layer and direction of a cell.

    Args:
        cell: the key of our cell that computes the same.
        arrays: in the order of the library.
        biases: "optional": all arrays of biases or none; "each" may be missing; "always" there.
        scope: what stands before each name where the library's prefixes are written.
    """

    cell: str
    arrays: tuple[Array, ...]
    biases: str = "always"
    scope: str = ""


@dataclass(frozen=True)
class Library:
    """A library's layouts, and how the names of arrays say layer and direction.

    Args:
        layouts: of each cell that it has, one.
        names: a pattern of {array}, {layer} and {direction} (one of `directions`); where empty,
            arrays of one layer and direction share a prefix, or come in the order of the layout.
        directions: the words for forward and reverse in a pattern.
        prefixes: patterns of {layer} and {direction}, written before names where there is one
            direction, and where there are two.
        stacked: both directions of a layer lie along a first axis of each array.
        lists: two lists, weights and biases, go through all layers and directions.
        flat: one buffer holds a network, in the layout of `openrnn.params`.
        clips: it can bound the cell state, as `cell_clip`.
        reverses: it has layers with the reverse direction alone; no array says so.
    """

    name: str
    layouts: tuple[Layout, ...]
    names: str = ""
    directions: tuple[str, str] = ("", "_reverse")
    prefixes: tuple[str, ...] = ()
    stacked: bool = False
    lists: bool = False
    flat: bool = False
    clips: bool = False
    reverses: bool = False


def row(name: str, sides: str, gates: str, axes: str) -> Array:
    """An array of words."""
    return Array(name, tuple(sides.split()), tuple(gates.split()), axes)


GATES = {"lstm": "i f g o", "gru": "r z n", "rnn_tanh": "h", "rnn_relu": "h"}  # ours
OWN = "weight_ih weight_hh bias_ih bias_hh weight_hr"


def _pair(cell: str, names: str, biases: str = "always") -> Layout:
    """Matrices (G*H, In) and biases of both sides in our order; the projection of an LSTM."""
    w_ih, w_hh, b_ih, b_hh, *w_hr = names.split()
    gates = GATES[cell]
    arrays = [
        row(w_ih, "W", gates, "(g o) d"), row(w_hh, "R", gates, "(g o) d"),
        row(b_ih, "bW", gates, "(g o)"), row(b_hh, "bR", gates, "(g o)"),
    ]  # fmt: skip
    if cell == "lstm" and w_hr:
        arrays.append(row(w_hr[0], "P", "", "q o"))
    return Layout(cell, tuple(arrays), biases)


def _kernels(cell: str, gates: str, *biases: Array, always: bool = False) -> Layout:
    """Matrices as (In, G*H), as Keras and Haste have them."""
    matrices = (
        row("kernel", "W", gates, "d (g o)"),
        row("recurrent_kernel", "R", gates, "d (g o)"),
    )
    return Layout(cell, matrices + biases, "always" if always else "optional")


def _onnx(cell: str, gates: str, peepholes: str = "") -> Layout:
    arrays = [
        row("W", "W", gates, "(g o) d"), row("R", "R", gates, "(g o) d"),
        row("B", "bW bR", gates, "(s g o)"),
    ]  # fmt: skip
    if peepholes:
        arrays.append(row("P", "p", peepholes, "(g o)"))
    return Layout(cell, tuple(arrays), "optional")


def _gate_by_gate(cell: str, *rows: str) -> Layout:
    """One array a gate: words of a name with {} for what stands for the gate, side, axes, gates.

    A gate is "ours", or "ours=theirs" where its name differs.
    """
    arrays = []
    for words in rows:
        name, side, axes, *gates = words.split()
        for gate in gates:
            own, renamed, theirs = gate.partition("=")
            shown = theirs if renamed else own
            arrays.append(row(name.format(shown), side, own, axes.replace("_", " ")))
    return Layout(cell, tuple(arrays))


def _flax(cell: str, gates: str, bias: str, **renamed: str) -> Layout:
    """flax: a dense layer for each gate and side."""
    inputs = " ".join(f"{gate}={renamed.get(gate, gate)}" for gate in gates.split())
    return _gate_by_gate(
        cell, f"i{{}}/kernel W d_o {inputs}", f"h{{}}/kernel R d_o {gates}", *bias.split(", ")
    )


def _dense(cell: str, gates: str, bias: str) -> Layout:
    """flax.nnx: one dense layer for each side."""
    name = "dense_i/bias" if bias == "bW" else "dense_h/bias"
    return Layout(cell, (
        row("dense_i/kernel", "W", gates, "d (g o)"), row("dense_h/kernel", "R", gates, "d (g o)"),
        row(name, bias, gates, "(g o)"),
    ))  # fmt: skip


def _legacy(cell: str, gates: str) -> Layout:
    """mx.rnn: one array a gate, under our gate or another name, "h=" for none."""
    return _gate_by_gate(
        cell,
        f"i2h{{}}_weight W o_d {gates}", f"h2h{{}}_weight R o_d {gates}",
        f"i2h{{}}_bias bW o {gates}", f"h2h{{}}_bias bR o {gates}",
    )  # fmt: skip


def _canonical(cell: str) -> Layout:
    """TensorFlow's lists: matrices gate by gate, then the projection; biases gate by gate."""
    gates = GATES[cell].split()
    arrays = []
    for kind, sides, axes in (("weights", "W R", "o d"), ("biases", "bW bR", "o")):
        keys = [(side, gate) for side in sides.split() for gate in gates]
        arrays += [row(f"{kind}/{k}", side, gate, axes) for k, (side, gate) in enumerate(keys)]
    if cell == "lstm":
        arrays.append(row(f"weights/{2 * len(gates)}", "P", "", "q o"))
    return Layout(cell, tuple(arrays))


def _flash(cell: str, inputs: str, gates: str, biases: str) -> Layout:
    """FlashRNN: R and b by heads; W is that of the dense layer before, which gives Wx."""
    return Layout(cell, (
        row("W", "W", inputs, "(g o) d"), row("R", "R", gates, "g n o d"),
        row("b", "bW", biases, "g n o"),
    ))  # fmt: skip


def _xlstm(kernel: str, bias: str) -> Layout:
    words = " ".join("ifzo")
    return Layout("slstm", (
        *(row(f"{gate}gate.weight", "W", gate, "n o d") for gate in "ifzo"),
        row("slstm_cell._recurrent_kernel_", "R", words, kernel),
        row("slstm_cell._bias_", "bW", words, bias),
    ))  # fmt: skip


def _equinox(cell: str, *biases: Array) -> Layout:
    gates = GATES[cell]
    w_ih = row("weight_ih", "W", gates, "(g o) d")
    return Layout(cell, (w_ih, row("weight_hh", "R", gates, "(g o) d"), *biases), "optional")


def _flat(name: str, *kinds: str) -> Library:
    layouts = tuple(_pair(cell, OWN) for cell in kinds)
    return Library(name, layouts, flat=True, clips=True)


ELMAN = ("rnn_tanh", "rnn_relu")
PATTERN = "{array}_l{layer}{direction}"
MXNET, MXNET_SIDES = "{direction}{layer}_{array}", ("l", "r")
SIDES = "i2h_weight h2h_weight i2h_bias h2h_bias h2r_weight"

ROWS = (
    Library("torch", tuple(_pair(cell, OWN, "optional") for cell in GATES), names=PATTERN),
    Library("keras", (
        _kernels("lstm", "i f g o", row("bias", "bW", "i f g o", "(g o)")),
        _kernels("gru", "z r n", row("bias", "bW bR", "z r n", "s (g o)")),  # reset_after=True
        _kernels("gru_reset_before", "z r n", row("bias", "bW", "z r n", "(g o)")),
        *(_kernels(cell, "h", row("bias", "bW", "h", "(g o)")) for cell in ELMAN),
    ), reverses=True),
    # the weight space of cuDNN, the opaque params of TensorFlow's CudnnRNN
    _flat("cudnn", *GATES),
    _flat("mxnet_fused", *GATES),  # `parameters` of MXNet's RNN operator
    # `weights` of jax.experimental.rnn, which has neither projection nor clip
    Library("jax", (_pair("lstm", " ".join(OWN.split()[:4])),), flat=True),
    Library("tf_canonical", tuple(map(_canonical, GATES)), lists=True, clips=True),
    # checkpoints of CudnnLSTM and its like, of CudnnCompatible cells and LSTMBlockCell: W above R
    Library("tf_cell", (
        Layout("lstm", (
            row("kernel", "W R", "i g f o", "d (g o)"), row("bias", "bW", "i g f o", "(g o)"),
        ), scope="cudnn_compatible_lstm_cell/"),
        Layout("gru", (
            row("gates/kernel", "W R", "r z", "d (g o)"), row("gates/bias", "bW", "r z", "(g o)"),
            row("candidate/input_projection/kernel", "W", "n", "d o"),
            row("candidate/input_projection/bias", "bW", "n", "o"),
            row("candidate/hidden_projection/kernel", "R", "n", "d o"),
            row("candidate/hidden_projection/bias", "bR", "n", "o"),
        ), scope="cudnn_compatible_gru_cell/"),
        *(Layout(cell, (row("kernel", "W R", "h", "d o"), row("bias", "bW", "h", "o")),
                 scope="basic_rnn_cell/") for cell in ELMAN),
    ), directions=("fw", "bw"), prefixes=(
        "rnn/multi_rnn_cell/cell_{layer}/",
        "stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}/",
    )),
    Library("flax", (
        _flax("lstm", "i f g o", "h{}/bias bR o i f g o"),
        _flax("gru", "r z n", "i{}/bias bW o r z n, h{}/bias bR o n"),
        _gate_by_gate("rnn_tanh", "i/kernel W d_o h", "h/kernel R d_o h", "i/bias bW o h"),
    ), reverses=True),
    Library("nnx_plain", (_flax("lstm", "i f g o", "h{}/bias bR o i f g o", f="f_"),),
            reverses=True),
    Library("nnx", (
        _dense("lstm", "i f g o", "bR"),
        _dense("gru", "r z n", "bW"),
        _dense("rnn_tanh", "h", "bW"),
    ), reverses=True),
    Library("equinox", (
        _equinox("lstm", row("bias", "bW", "i f g o", "(g o)")),
        _equinox("gru", row("bias", "bW", "r z n", "(g o)"), row("bias_n", "bR", "n", "o")),
    )),
    Library("onnx", (
        _onnx("lstm", "i o f g"),
        _onnx("peephole_lstm", "i o f g", "p_i p_o p_f"),
        _onnx("gru", "z r n"),  # linear_before_reset=1
        _onnx("gru_reset_before", "z r n"),  # linear_before_reset=0, the default
        _onnx("rnn_tanh", "h"),
        _onnx("rnn_relu", "h"),
    ), stacked=True, reverses=True),
    Library("gluon", tuple(_pair(cell, SIDES) for cell in GATES), names=MXNET,
            directions=MXNET_SIDES, clips=True),
    Library("mxnet", (
        _legacy("lstm", "i=_i f=_f g=_c o=_o"),
        _legacy("gru", "r=_r z=_z n=_o"),
        _legacy("rnn_tanh", "h="),
        _legacy("rnn_relu", "h="),
    ), names=MXNET, directions=MXNET_SIDES),
    Library("haste", (
        _kernels("lstm", "i g f o", row("bias", "bW", "i g f o", "(g o)"), always=True),
        _kernels("gru", "z r n", row("bias", "bW", "z r n", "(g o)"),
                 row("recurrent_bias", "bR", "z r n", "(g o)"), always=True),
    )),
    # the state dict of an sLSTMLayer without its group norm: backend vanilla, backend cuda
    Library("xlstm", (_xlstm("n (g o) d", "(g n o)"),)),
    Library("xlstm_cuda", (_xlstm("n d (g o)", "(n g o)"),)),
    Library("flashrnn", (
        _flash("lstm", "i f g o", "i f g o", "i f g o"),
        _flash("gru", "r z n", "n r z", "bR:n bW:r bW:z bW:n"),
        _flash("rnn_tanh", "h", "h", "h"),
        _flash("slstm", "i f z o", "i f z o", "i f z o"),
    )),
)  # fmt: skip
LIBRARIES = {library.name: library for library in ROWS}
