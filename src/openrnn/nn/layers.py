"""The layers: LSTM, GRU and RNN with the signature of `torch.nn`, and Recurrent for any cell."""

from collections.abc import Sequence
from inspect import Parameter, Signature, signature
from typing import Any

from torch import Tensor

from openrnn import cells
from openrnn.nn import checks
from openrnn.nn.base import Layer

EXTRAS = """
    As in torch:
        input_size, hidden_size: I and H, features of an input step and of a state.
        num_layers: L; each layer reads the outputs of the one below.
        bias: False leaves out the bias vectors.
        batch_first: input and y have the batch first; states keep their layout.
        dropout: the probability, in training, to drop an output of each layer but the last.
        bidirectional: D = 2: a second direction from end to start; y has both side by side.
        proj_size: P: each emitted state is multiplied by a matrix (P, H), and O = P; else O = H.
        device, dtype: of the parameters.

    Keyword options beyond torch:
        backend: the only backend to try; "auto" takes the first that can, see `openrnn.explain`.
        bias_mode: "double" (as torch), "input", "recurrent" or "none": which bias vectors exist.
        input_mode: "linear", or without an input matrix of layer 0: "skip", x (I = H) is added to
            every gate, or "gates", x (I = G*H) has what is added to each gate, in their order.
        cell_clip: bounds, or one symmetric bound, of the cell state where it is read (LSTM).
        precision: of float32 products, "ieee", "tf32" or "bf16", each of which permits more than
            the one before. "tf32" is for a GPU, where torch's setting is the default; backend fused
            may read operands as float16, which has as many bits. "bf16" also permits weights
            rounded to bfloat16, in calls without gradients on a CPU.
        algorithm: of cuDNN, by name; "auto" measures once and takes the fastest with right numbers.
        reset_dropout_state: cuDNN's dropout starts anew from a fresh seed at each call.
        recompute: "none", or "gates": backward computes gates again instead of keeping them, to
            save memory (our CUDA kernels; elsewhere without effect, as `openrnn.explain` says).
        reverse: the layers run from the end of each sequence, its true end with lengths, to its
            start, as the reverse direction of a bidirectional layer does; y stays in input order.
        wavefront: layers of a stack run at the same time, each a chunk of so many steps behind the
            one below, or of fewer where they would hold too much (our CUDA kernels; elsewhere
            without effect, as `openrnn.explain` says). None: where a model of their time says that
            it pays; 0: one layer after the other; 1: one launch runs all layers, each behind the
            one below (H100, H200), and where no such launch exists the choice is made as for None.

    All but device and dtype are attributes of the layer, as `layer.num_layers`; `cell_clip` is a
    pair or None, and `precision` is "default" where None was given. `batch_first`, `dropout` and
    `backend` may be set later, and the next call follows them; another one raises AttributeError.

    A call also takes:
        lengths: (B,) integers in [0, T], any order, any device; y is 0 past them and the final
            state is that at the true end.
        reset: mask in the layout of the input, (T, B), bool or 0 and 1: where set, the states are
            replaced *before* the step (in RL terms `episode_start`), in the reverse direction after
            it; no gradient passes. Setting it at t = 0 discards `hx`.
        reset_state: what replaces them, like hx with 1 allowed for a size; zeros by default.
        return_states: also return each state after every step, (L*D, T, B, O or H) in the layout of
            the input, differentiable.
        generator: of dropout masks; by default torch's own.
        padding_value: what y is past the lengths in place of 0; the states of all steps stay 0.
"""


class _OneStateLayer(Layer):
    def _give(self, states: tuple[Tensor, ...]) -> Tensor:
        return states[0]


class LSTM(Layer):
    """A stack of long short-term memory layers: `torch.nn.LSTM`, run by the first backend that can.

        i, f, o = sigmoid(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)      g = tanh(the same sum)
        c_t = f * c_{t-1} + i * g             h_t = o * tanh(c_t), times W_hr with a projection

    Arguments, results, errors and state dict are those of `torch.nn.LSTM`, positions too.

    Shapes:
        input (T, B, I), (B, T, I) with batch_first, which may be jagged, (T, I) or PackedSequence;
        hx = (h_0, c_0) of (L*D, B, O) and (L*D, B, H) -> y (T, B, D*O), (h_n, c_n) like hx

    Raises:
        NoBackendError: the named backend refuses the call; the message says why.
        ValueError: an option is unknown or out of range; of a call, see `forward`.

    Example:
        >>> import torch, openrnn
        >>> lstm = openrnn.LSTM(10, 20, num_layers=2)
        >>> y, (h_n, c_n) = lstm(torch.randn(5, 3, 10), lengths=torch.tensor([5, 0, 2]))
        >>> tuple(y.shape), tuple(c_n.shape)
        ((5, 3, 20), (2, 3, 20))
    """

    mode = "LSTM"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        checks.construction(LSTM, args, kwargs)
        super().__init__(cells.lstm, *args, **kwargs)

    def get_expected_cell_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """(L*D, B, H), the shape of c for an input, as `torch.nn.LSTM` says it."""
        return self._spec.chains, self._batch(input, batch_sizes), self.hidden_size


class GRU(_OneStateLayer):
    """A stack of gated recurrent unit layers: `torch.nn.GRU`, run by the first backend that can.

        r, z = sigmoid(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)
        n = tanh(W_in x_t + b_in + r * (W_hn h_{t-1} + b_hn))      h_t = (1 - z) * n + z * h_{t-1}

    Arguments, results, errors and state dict are those of `torch.nn.GRU`, positions too.

    Shapes:
        input (T, B, I), (B, T, I) with batch_first, which may be jagged, (T, I) or PackedSequence;
        hx (L*D, B, H)
        -> y (T, B, D*H), h_n (L*D, B, H)

    Example:
        >>> import torch, openrnn
        >>> y, h_n = openrnn.GRU(10, 20, bidirectional=True)(torch.randn(5, 3, 10))
        >>> tuple(y.shape), tuple(h_n.shape)
        ((5, 3, 40), (2, 3, 20))
    """

    mode = "GRU"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        _refuse_positional_projection(args)
        checks.construction(GRU, args, kwargs)
        super().__init__(cells.gru, *args, **kwargs)


class RNN(_OneStateLayer):
    """A stack of Elman layers: `torch.nn.RNN`, run by the first backend that can.

        h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh), or relu of it with nonlinearity="relu"

    Arguments, results, errors and state dict are those of `torch.nn.RNN`; `nonlinearity` is the
    fourth position.

    Shapes:
        input (T, B, I), (B, T, I) with batch_first, which may be jagged, (T, I) or PackedSequence;
        hx (L*D, B, H)
        -> y (T, B, D*H), h_n (L*D, B, H)

    Example:
        >>> import torch, openrnn
        >>> y, h_n = openrnn.RNN(10, 20, 1, "relu")(torch.randn(5, 3, 10))
        >>> tuple(y.shape)
        (5, 3, 20)
    """

    _fixed = Layer._fixed | {"nonlinearity"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        checks.construction(RNN, args, kwargs)
        if len(args) > 3:
            nonlinearity, args = args[3], args[:3] + args[4:]
        else:
            nonlinearity = kwargs.pop("nonlinearity", "tanh")
        known = {"tanh": cells.rnn_tanh, "relu": cells.rnn_relu}
        if nonlinearity not in known:
            raise ValueError(
                f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'."
            )
        _refuse_positional_projection(args)
        super().__init__(known[nonlinearity], *args, **kwargs)
        self.nonlinearity = nonlinearity
        self.mode = f"RNN_{nonlinearity.upper()}"


class Recurrent(Layer):
    """A stack of layers of any elementwise cell, with everything that `LSTM` can.

    Args:
        cell: made by `openrnn.cell`, or one of those in `openrnn.cells`. A projection needs one
            that does not read its own emitted state.

    Shapes:
        input as for `LSTM`; hx a tuple of states in the order of `cell.states`
        -> y (T, B, D*O), tuple of final states, each (L*D, B, O or H)

    Example:
        >>> import torch, openrnn
        >>> layer = openrnn.Recurrent(openrnn.cells.peephole_lstm, 3, 5)
        >>> y, (h_n, c_n) = layer(torch.randn(7, 2, 3))
        >>> [name for name, _ in layer.named_parameters()][4:]
        ['p_i_l0', 'p_f_l0', 'p_o_l0']
    """

    def __init__(self, cell: cells.Cell, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cell, cells.Cell):
            raise TypeError(f"cell must be made by openrnn.cell, got {type(cell).__name__}")
        checks.construction(Recurrent, (cell, *args), kwargs)
        super().__init__(cell, *args, **kwargs)

    def extra_repr(self) -> str:
        """The cell's name, then as `LSTM`."""
        return f"{self.cell.name}, {super().extra_repr()}"


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")


def _refuse_positional_projection(args: Sequence[Any]) -> None:
    # torch's GRU and RNN hand their 8th position on to proj_size as well, and refuse it later
    if len(args) > 7 and args[7]:
        _refuse_projection({"proj_size": args[7]})


def _describe() -> None:
    """Signatures that `help`, editors and `torch.nn.utils.skip_init` can read, and the extras."""
    every = list(signature(Layer).parameters.values())
    cell, *torchs = every
    which = Parameter("nonlinearity", cell.kind, default="tanh", annotation=str)
    rows: list[tuple[type[Layer], list[Parameter]]] = [
        (LSTM, torchs),
        (GRU, torchs),
        (RNN, [*torchs[:3], which, *torchs[3:]]),
        (Recurrent, every),
    ]
    for layer, names in rows:
        layer.__doc__ = f"{layer.__doc__}{EXTRAS}"
        layer.__signature__ = Signature(names)  # type: ignore[attr-defined]  # looked up by inspect


_describe()
