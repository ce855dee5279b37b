"""`openrnn.watch`: hooks on a model that write what its training does."""

import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from openrnn import op, tensors
from openrnn.nn import Layer
from openrnn.spec import whole
from openrnn.transforms import levels
from openrnn.watch.gates import preactivations, why_not, write


class Watch:
    """What `openrnn.watch` returns: `remove()` ends it, `step()` counts where no optimizer does.

    As a context manager it ends with its block.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: Any,
        optimizer: Optimizer | None,
        every: int,
        histograms: bool,
    ) -> None:
        self._model, self.writer, self.every = weakref.ref(model), writer, every
        self.histograms = histograms and hasattr(writer, "add_histogram")
        self.steps = 0
        self._seen: set[str] = set()  # modules whose gates were written in this step
        self._trains: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._since = 0, time.perf_counter()
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, Layer) and why_not(module) is None:
                hook = _Hook(self, name)
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        if optimizer is None:
            self._handles.append(register_optimizer_step_pre_hook(self._stepping))
        else:
            self._handles.append(optimizer.register_step_pre_hook(self._stepping))
            self._trains[optimizer] = True

    def remove(self) -> None:
        """Takes all hooks away; what was written stays."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def due(self) -> bool:
        """Whether the step in progress is written."""
        return self.steps % self.every == 0

    @torch.no_grad()
    def step(self) -> None:
        """Ends a step of training, after backward and before gradients are cleared.

        Called by optimizers of torch themselves; call it in a loop that has none.
        """
        model = self._model()
        if model is None:
            self.remove()
            return
        if self.due:
            for name, norm in norms(model):
                self.writer.add_scalar(name, norm, self.steps)
            before, begin = self._since
            self._since = self.steps, time.perf_counter()
            if self.steps > before:
                rate = (self.steps - before) / max(self._since[1] - begin, 1e-9)
                self.writer.add_scalar("perf/steps_per_s", rate, self.steps)
        self.steps += 1
        self._seen.clear()

    def _stepping(self, optimizer: Optimizer, *_: object) -> None:
        """Before a step of any optimizer: one that holds a parameter of the model counts."""
        model = self._model()
        if model is None:
            self.remove()
            return
        if optimizer not in self._trains:
            held = {id(one) for group in optimizer.param_groups for one in group["params"]}
            self._trains[optimizer] = any(id(one) in held for one in model.parameters())
        if self._trains[optimizer]:
            self.step()

    def gates(self, name: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Writes the gates of a module's first call in a step that is due."""
        if not self.due or name in self._seen or not layer.training:
            return
        given = dict(zip(("input", "hx"), args)) | kwargs
        x = given.get("input")
        if not (isinstance(x, Tensor) and not x.is_nested and x.numel()) or _is_followed(x):
            return
        self._seen.add(name)
        options = {key: given.get(key) for key in ("lengths", "reset", "reset_state")}
        for gate in preactivations(layer, x.detach(), given.get("hx"), **options):
            write(self.writer, "/".join(filter(None, ("gates", name))), gate, self.steps,
                  self.histograms)  # fmt: skip


def _is_followed(x: Tensor) -> bool:
    """Whether a call is passed over: it has no numbers, or a second one would be recorded with it.

    So it is under a transform of torch.func, in a tracer, among fake tensors, and in the capture of
    a CUDA graph.
    """
    if x.is_meta or levels.transformed() or op.tracing():
        return True
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    keys: Any = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) for key in (keys.FAKE, keys.PROXY)):
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return not tensors.is_plain(x) and tensors.is_traced(x)


class _Hook:
    """The forward hook of a module; copies and pickles of the model have one that does nothing."""

    def __init__(self, watch: Watch | None = None, name: str = "") -> None:
        self.watch, self.name = watch, name

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        if torch.compiler.is_compiling() or self.watch is None:
            return
        if isinstance(module, Layer):
            self.watch.gates(self.name, module, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[], "_Hook"], tuple[()]]:
        return _Hook, ()


def norms(model: nn.Module) -> Iterable[tuple[str, float]]:
    """The norm of all gradients, and those of the parameters of recurrent layers, by name."""
    named = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
    if not named:
        return
    sizes = {name: _number(torch.linalg.vector_norm(_dense(grad))) for name, grad in named}
    yield "grad_norm", math.hypot(*sizes.values())
    for prefix, module in model.named_modules():
        if isinstance(module, Layer | nn.RNNBase):
            for name, _ in module.named_parameters(prefix):
                if name in sizes:
                    yield f"grad_norm/{name}", sizes[name]


def _dense(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _number(norm: Tensor) -> float:
    """A norm as a number: of a parameter that is spread over processes, the whole one's."""
    full = getattr(norm, "full_tensor", None)
    return float(norm if full is None else full())


def watch(
    model: nn.Module,
    writer: Any,
    *,
    optimizer: Optimizer | None = None,
    every: int = 100,
    histograms: bool = True,
) -> Watch:
    """Writes gates, gradient norms and speed of a model in training, from its own loop.

    Nothing else in the loop changes: a step of an optimizer that holds parameters of the model is
    one step. Every `every` steps, beginning with the first, there are written

        gates/NAME/l0/f             histogram of the gate's pre-activations in a recurrent layer
        gates/NAME/l0/f_saturated   share of them beyond 3 or -3
        gates/NAME/l0/f_mean        of a forget gate f, the mean of sigmoid
        grad_norm                   of all parameters; grad_norm/NAME of each recurrent one
        perf/steps_per_s            since the last time, by the clock

    For gates the layer runs a second time in these steps, without gradients and dropout; in others
    hooks only count. Gates are those of calls in training mode with a dense input, of layers of
    this package whose cell has one recurrent product; not of calls under torch.compile or a
    transform of torch.func, nor of those that a tracer or a CUDA graph records.

    Args:
        model: any module; its layers of this package have gates to write.
        writer: a `SummaryWriter`, or what has its `add_scalar` and, for histograms,
            `add_histogram`.
        optimizer: the only one whose steps count; None: all that hold parameters of the model.
        every: steps from one time to the next.
        histograms: whether to write them.

    Returns:
        A handle: `remove()` ends it, and so does the end of a `with` block. Where no optimizer of
        torch steps, call its `step()` after backward.

    Raises:
        TypeError: model is no module, or writer cannot write scalars.
        ValueError: every is less than 1.

    Example:
        >>> import torch, openrnn
        >>> class Prints:
        ...     def add_scalar(self, name, value, step):
        ...         print(step, name)
        >>> lstm = openrnn.LSTM(3, 4)
        >>> with openrnn.watch(lstm, Prints()) as handle:
        ...     lstm(torch.randn(5, 2, 3))[0].sum().backward()
        ...     handle.step()
        0 gates/l0/i_saturated
        0 gates/l0/f_saturated
        0 gates/l0/f_mean
        0 gates/l0/g_saturated
        0 gates/l0/o_saturated
        0 grad_norm
        0 grad_norm/weight_ih_l0
        0 grad_norm/weight_hh_l0
        0 grad_norm/bias_ih_l0
        0 grad_norm/bias_hh_l0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"writer must have add_scalar, as a SummaryWriter has, got {type(writer).__name__}"
        )
    every = whole("every", every)
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    return Watch(model, writer, optimizer, every, histograms)
