"""A stack whose layers are on several devices, which run at the same time."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from openrnn import arguments, dispatch, functional, op, philox, problem_key
from openrnn.errors import kind_of
from openrnn.nn import autocast, checks, flat, stages
from openrnn.nn.base import Layer
from openrnn.nn.call_cache import CachingModule
from openrnn.nn.layers import _OneStateLayer
from openrnn.nn.stages import Group, Plan, Stage
from openrnn.nn.stepper import Stepper
from openrnn.params import module_slots
from openrnn.problem_key import ProblemKey
from openrnn.route import Route
from openrnn.spec import precision_of
from openrnn.spec import whole as whole_number

CHUNKS_PER_STAGE = 2
LEAST_STEPS = 64  # of a chunk, where the caller gives no number of chunks


class Pipeline(Layer):
    """A stack whose layers are split into stages, one for each device, that run at the same time.

    It is a pipeline over time: the first stage runs chunk k + 1 while the second runs chunk k. The
    batch is not split, and results are those of the layer. (`torch.distributed.pipelining` splits
    the batch, and runs each stage in a process of its own.) It can be slower than the layer on one
    device: docs/choose.md has figures.

    Args:
        layer: an `LSTM`, `GRU`, `RNN` or `Recurrent` that runs forward. The pipeline takes over its
            parameters (the same objects) and moves each to its device; do not use the layer
            afterwards. Both have the same state dict.
        devices: one for each stage, from input to output. Each gets the same number of layers, the
            first ones one more where they do not divide. `to(...)` changes dtypes, not devices.
        chunks: the number of chunks that T is cut into. By default two for each stage, or fewer so
            that a chunk has 64 steps; 1, so that stages run one after the other, where another
            backend than "fused" runs a stage.

    Shapes:
        as those of the layer. x and states may be on any device; results are on the last one.

    Differences from the layer: each device draws its own dropout masks; gradients of weights are
    summed over chunks, in float32 if they have 16 bits; second derivatives, `torch.func` and
    `stepper` are refused; `torch.compile` breaks its graph at the call.

    Raises:
        TypeError: layer is none of those.
        ValueError: layer is bidirectional or reverse, has fewer layers than there are devices, or
            has weights that are no Parameters (quantized or parametrized); chunks is below 1.

    Example:
        >>> import torch, openrnn
        >>> lstm = openrnn.LSTM(10, 20, num_layers=4)
        >>> pipeline = openrnn.Pipeline(lstm, ["cpu", "cpu"], chunks=2)  # ["cuda:0", "cuda:1"]
        >>> y, (h_n, c_n) = pipeline(torch.randn(6, 3, 10))
        >>> tuple(y.shape), tuple(c_n.shape)
        ((6, 3, 20), (4, 3, 20))
    """

    def __init__(
        self, layer: Layer, devices: Sequence[torch.device | str | int], chunks: int | None = None
    ) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(
                f"layer must be one of openrnn, such as openrnn.LSTM, got {kind_of(layer)}"
            )
        if layer.bidirectional or layer.spec.reverse:
            kind = "bidirectional" if layer.bidirectional else "reverse"
            raise ValueError(f"a Pipeline needs a layer that runs forward, got a {kind} one")
        if isinstance(devices, str) or not 1 <= len(devices) <= layer.num_layers:
            raise ValueError(
                f"devices must be a list of 1 to {layer.num_layers}, as each gets a layer, "
                f"got {devices!r}"
            )
        weights = layer.own_weights()
        if weights is None or not all(isinstance(weight, nn.Parameter) for weight in weights):
            raise ValueError(
                "a Pipeline needs a layer whose weights are Parameters, and those of this "
                f"{type(layer).__name__} are computed or int8"
            )
        if chunks is not None and whole_number("chunks", chunks) < 1:
            raise ValueError(f"chunks must be a number from 1, or None, got {chunks}")
        CachingModule.__init__(self)  # without parameters of its own
        for name in (
            "cell", "bias_mode", "bias", "batch_first", "bidirectional", "dropout", "backend",
            "_spec", "input_size", "hidden_size", "num_layers", "proj_size", "_names", "mode",
            "nonlinearity", "training",
        ):  # fmt: skip
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        for name in self._names:
            self.register_parameter(name, getattr(layer, name))
        self.devices = tuple(map(_device, devices))
        self.chunks = chunks
        self._one_state = isinstance(layer, _OneStateLayer) or getattr(layer, "_one_state", False)
        self._outside_of_graphs()
        self._place()

    def _outside_of_graphs(self) -> None:
        # not at import of this module: it imports dynamo, which takes long
        self._across = torch.compiler.disable(_across)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_across")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._outside_of_graphs()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, each with its spec, its device and which layers it has."""
        return stages.cut(self.spec, self.devices)

    def _place(self) -> None:
        """Moves each parameter to the device of its stage."""
        with torch.no_grad():
            for stage in self.stages:
                for name in self._names[stage.weights]:
                    parameter = getattr(self, name)
                    if not parameter.is_meta and parameter.device != stage.device:
                        parameter.data = parameter.data.to(stage.device)
                        if parameter.grad is not None:
                            parameter.grad.data = parameter.grad.data.to(stage.device)
        self.flatten_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> "Pipeline":
        super()._apply(fn, recurse)
        self._place()
        return self

    def flatten_parameters(self) -> None:
        """Lays the parameters of each stage side by side, as `Layer.flatten_parameters` does."""
        for stage in self.stages:
            names = self._names[stage.weights]
            own: dict[str, Any] = {
                slot.name: self._parameters.get(name)
                for slot, name in zip(module_slots(stage.spec), names)
            }
            if flat.addresses([*own.values()]):
                flat.lay(stage.spec, own)

    def stepper(self, batch: int | None = None) -> Stepper:
        """Refused: a single step cannot keep more than one stage busy."""
        raise ValueError(
            "a Pipeline has no stepper: call step, or stepper of a layer on one device"
        )

    def extra_repr(self) -> str:
        """As the layer's, then the devices and chunks."""
        found = f"{super().extra_repr()}, devices={[*map(str, self.devices)]}"
        return found if self.chunks is None else f"{found}, chunks={self.chunks}"

    def _give(self, states: tuple[Tensor, ...]) -> Any:
        return states[0] if self._one_state else states

    def _remember(self, *_: Any, **__: Any) -> None:
        """Nothing: a layer on one device remembers its calls here, a stage its chunks."""

    def _takes_packed(self, *_: Any) -> bool:
        return False

    def _forward_ragged(self, given: Any, hx: Any, *options: Any) -> Any:
        """On the last device, where the results are."""
        home, states = self.devices[-1], None if hx is None else self._take(hx)
        if isinstance(given, PackedSequence):
            checks.packed(given)
        if states is not None and all(isinstance(state, Tensor) for state in states):
            states = [state.to(home) for state in states]
        return super()._forward_ragged(given.to(home), states, *options)

    def _run(
        self,
        x: Tensor,
        states: list[Tensor] | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        reset_states: list[Tensor] | None,
        return_states: bool,
        generator: torch.Generator | None,
        repeats: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        x, weights, states, reset_states = autocast.applied(x, self.weights(), states, reset_states)
        checks.same_dtype(x, weights[0])
        given = states or (), weights, reset_states or ()
        found = self._across(self, x, given, lengths, reset, return_states, generator)
        count = len(self.spec.states)
        return found[0], tuple(found[1 : 1 + count]), tuple(found[1 + count :])


def _across(
    pipeline: Pipeline,
    x: Tensor,
    given: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    lengths: Tensor | None,
    reset: Tensor | None,
    return_states: bool,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """y, final states, and all states if asked for.

    Args:
        given: states, parameters and reset states.
    """
    spec, cut, training = pipeline.spec, pipeline.stages, pipeline.training
    masks = [mask for mask in (lengths, reset) if isinstance(mask, Tensor)]  # they may be lists
    every = (x, *chain(*given), *masks)
    if problem_key.transformed() or op.tracing() or op.watched(*every):
        raise ValueError(
            "a Pipeline runs outside of torch.func, torch.jit.trace and dispatch modes, on plain "
            "tensors: call the layer that it was made of on one device"
        )
    x = x.to(cut[0].device, non_blocking=True)
    steps, batch = x.shape[:2]
    groups, grads = _groups(cut, x, *given)
    dropping = spec.drops(training)
    generators = _generators(cut, generator if dropping else None)
    found = _routes(
        pipeline, cut, x, grads, generators, lengths is not None, reset is not None, return_states
    )
    # by default chunks are for "fused" alone: with other backends the host launches each step
    fused = all(route.constants.backend == "fused" for route in found)
    number = pipeline.chunks or (chunks_for(cut, steps) if fused else 1)
    size = max(1, -(-steps // number))
    chunks = [slice(begin, min(begin + size, steps)) for begin in range(0, max(steps, 1), size)]
    if lengths is not None:
        lengths = functional.check_lengths(lengths, x)
        begins = torch.arange(0, max(steps, 1), size, device=x.device)[:, None]
        lengths = (lengths - begins).clamp(0, size)  # of each chunk
    reset = None if reset is None else functional.check_reset(reset, x)
    masks_of_stages: list[list[tuple[Any, ...]]] = []
    known: list[dict[Any, Any] | None] = []
    # calls that no `PreparedCall` is made for
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
    odd = return_states or lengths is not None or reset is not None or bool(given[2])
    odd = odd or not x.numel() or hooks(False) is not None
    for index, (stage, group, own, route) in enumerate(zip(cut, groups, generators, found)):
        if route.constants.backend == "reference" and pipeline.backend == "auto":
            dispatch.warn_if_large(route.problem, steps, batch)
        drops = stage.spec.drops(training)
        seeds = _seeds(route.constants.backend, stage, own, len(chunks)) if drops else None
        masks_of_stages.append(_masks(stage, chunks, lengths, reset, seeds))
        alone = odd or drops or not all(map(Tensor.is_contiguous, (*group.params, *group.states)))
        cache = pipeline._call_cache.module_cache
        known.append(None if alone else cache.setdefault((index, route), {}))
    drop = spec.dropout if dropping else 0.0
    plan = Plan(cut, found, chunks, masks_of_stages, drop, generators, known)
    return stages.run(plan, x, groups)


def _routes(
    pipeline: Pipeline, cut: Sequence[Stage], x: Tensor, grads: Sequence[bool],
    generators: Sequence[torch.Generator | None], lengths: bool, reset: bool, return_states: bool,
) -> list[Route]:  # fmt: skip
    """How each stage runs; lengths, reset: the call has them."""
    asked = [
        ProblemKey(
            stage.spec.text, x.dtype, stage.device,
            precision_of(stage.spec, x.dtype, stage.device.type), grad, drops, lengths, reset,
            return_states, False, drops and own is not None, problem_key.size_class(x),
        )
        for stage, grad, own in zip(cut, grads, generators)
        for drops in [stage.spec.drops(pipeline.training)]
    ]  # fmt: skip
    return [functional.choose(pipeline.backend, each) for each in asked]


def _masks(
    stage: Stage, chunks: Sequence[slice], lengths: Tensor | None, reset: Tensor | None,
    seeds: list[Tensor] | None,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Lengths, resets and seed of each chunk in a stage, on its device.

    Args:
        lengths: of each chunk; reset: of all steps.
    """
    nothing = [None] * len(chunks)
    ends: Any = nothing if lengths is None else lengths.to(stage.device)
    mask = None if reset is None else reset.to(stage.device)
    resets: Any = nothing if mask is None else [mask[chunk] for chunk in chunks]
    return [*zip(ends, resets, seeds or nothing)]


def chunks_for(cut: Sequence[Stage], steps: int) -> int:
    """How many chunks T is cut into: two for each stage, or fewer so that each has `LEAST_STEPS`.

    In eight calls timed on two H200s, T 256 and 512, 4 chunks took at most 6% longer than the best
    of five numbers. On two H100s chunks of fewer than 64 steps took up to 80% longer than 4 chunks.
    """
    if len({stage.device for stage in cut}) == 1:
        return 1  # nothing runs at the same time
    return max(1, min(CHUNKS_PER_STAGE * len(cut), steps // LEAST_STEPS))


def _groups(
    cut: Sequence[Stage], x: Tensor, states: Any, params: Any, resets: Any
) -> tuple[list[Group], list[bool]]:
    """The tensors of each stage, on its device; whether it keeps what backward reads."""
    groups: list[Group] = []
    grads, grad, like = [], False, x
    for stage in cut:
        initial, fresh = (
            [state[stage.layers].to(stage.device, non_blocking=True) for state in given]
            for given in (states, resets)
        )
        if groups:
            like = x.new_empty((0, x.shape[1], stage.spec.input_size), device=stage.device)
        _, *settled, wanted, why = arguments.check_inputs(
            stage.spec, like, params[stage.weights], initial, fresh
        )
        if why:
            raise ValueError(why)
        own, *others = settled
        groups.append(Group(others[0], own, others[1]))
        grad = grad or wanted
        grads.append(grad and torch.is_grad_enabled())
    return groups, grads


def _generators(
    cut: Sequence[Stage], given: torch.Generator | None
) -> list[torch.Generator | None]:
    """Where the dropout masks of each stage come from; None: torch's own generator."""
    if given is None:
        return [None] * len(cut)
    seed = int(torch.randint(2**62, (1,), generator=given, device=given.device))
    return [
        torch.Generator(stage.device).manual_seed(seed + index) for index, stage in enumerate(cut)
    ]


def _seeds(
    backend: str, stage: Stage, generator: torch.Generator | None, chunks: int
) -> list[Tensor]:
    """Seed and offset of the masks inside a stage, an offset for each chunk."""
    seed = philox.draw(dispatch.seed_device(backend, stage.device), generator)
    offsets = torch.arange(chunks, device=seed.device)[:, None]
    return [*(seed + nn.functional.pad(offsets, (1, 0)))]


def _device(given: torch.device | str | int) -> torch.device:
    """A device with its number, as tensors name it."""
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
