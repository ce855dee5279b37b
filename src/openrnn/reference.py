"""The meaning of every call, in plain differentiable torch: any device, any dtype, every feature.

It is the oracle of the tests and the backend of last resort. Being ordinary autograd code it has
second derivatives, forward-mode derivatives and vmap.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from openrnn import fresh, philox
from openrnn.backends.base import (
    Backend,
    Call,
    Capabilities,
    Cotangents,
    Gradients,
    Needs,
    Outputs,
    TensorShape,
)
from openrnn.cells import Cell, clip_of, lookup
from openrnn.memo import memo
from openrnn.params import Chain, chains
from openrnn.spec import BIAS_MODES, INPUT_MODES, Problem, Spec
from openrnn.time_reversed import flip_time

Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def stepper(spec: Spec, cell: Cell, weights: Chain) -> Step:
    """One step of one chain: (x-side pre-activations (B, G*H), states) -> new states."""
    clip, gates = clip_of(spec), len(spec.gates)
    rows = [spec.hidden_size] * gates  # of sizes, because ONNX has that since opset 13

    def step(x_gates: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = x_gates.split(rows, -1)
        r: object
        if cell.dependent_product:
            matrices = dict(zip(spec.gates, weights.w_hh.split(rows)))
            parts = weights.b_hh.split(rows) if weights.b_hh is not None else (None,) * gates
            biases = dict(zip(spec.gates, parts))

            def r(gate: str, h: Tensor) -> Tensor:
                return linear(h, matrices[gate], biases[gate])
        else:
            r = linear(states[0], weights.w_hh, weights.b_hh).split(rows, -1)
        emitted, *others = cell.step(x, r, states, weights.unit, clip)
        if weights.w_hr is not None:
            emitted = linear(emitted, weights.w_hr)
        # a cell may promote, as torch.where(mask, 0.5, 2) does in 16 bits: states keep their dtype
        return tuple(new.to(old.dtype) for new, old in zip((emitted, *others), states))

    return step


def input_side(spec: Spec, weights: Chain, x: Tensor) -> Tensor:
    """The x-side pre-activations of all steps: (T, B, G*H)."""
    if weights.w_ih is not None:
        return linear(x, weights.w_ih, weights.b_ih)
    gates = x if spec.input_mode == "gates" else x.repeat(1, 1, len(spec.gates))
    return gates if weights.b_ih is None else gates + weights.b_ih


def _run_chain(
    call: Call, step: Step, x_gates: Tensor, chain: int, reverse: bool
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """One layer and direction: (final states, the states of all steps, each (T, B, O or H))."""
    spec, batch = call.problem.spec, x_gates.shape[1]
    states = tuple(
        call.states[k][chain] if call.states else x_gates.new_zeros(batch, width)
        for k, width in enumerate(spec.state_sizes)
    )
    reset_states = tuple(
        call.reset_states[k][chain] if call.reset_states else torch.zeros_like(state)
        for k, state in enumerate(states)
    )
    steps = range(x_gates.shape[0])
    # apart, because the gradient of x_gates[t] is as large as that of all steps
    parts = x_gates.unbind(0)
    after: list[tuple[Tensor, ...]] = []
    for t in reversed(steps) if reverse else steps:
        active = None if call.lengths is None else (t < call.lengths)[:, None]  # (B, 1)
        boundary = None if call.reset is None else call.reset[t][:, None]  # (B, 1)
        if boundary is not None and active is not None:
            boundary = boundary & active
        if boundary is not None and not reverse:
            states = choose(boundary, reset_states, states)
        if active is None:
            new = step(parts[t], states)
            after.append(new)
        else:
            # infinite states of rows that have ended would make gradients nan
            new = step(parts[t], _where(active, states))
            after.append(_where(active, new))
            new = choose(active, new, states)
        if boundary is not None and reverse:
            new = choose(boundary, reset_states, new)
        states = new
    if reverse:
        after.reverse()
    all_states = [
        torch.stack([now[k] for now in after]) if after else x_gates.new_zeros(0, batch, width)
        for k, width in enumerate(spec.state_sizes)
    ]
    return states, all_states


def _where(active: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The states of active rows, zeros in others."""
    return tuple(torch.where(active, state, 0) for state in states)


def choose(where: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensor by tensor, `a` where the mask is set and `b` elsewhere."""
    return tuple(torch.where(where, first, second) for first, second in zip(a, b))


def run(call: Call) -> Outputs:
    """Runs a call as written; autograd differentiates it."""
    if call.x.dim() == 2:
        return _run_packed(call)
    spec = call.problem.spec
    cell = lookup(spec.cell)
    layers = chains(spec, call.params)
    x = call.x
    if call.lengths is not None:
        steps = torch.arange(x.shape[0], device=x.device)[:, None]
        x = torch.where((steps < call.lengths)[..., None], x, 0)  # padding may hold anything
    finals: list[tuple[Tensor, ...]] = []
    history: list[list[Tensor]] = []
    for layer in range(spec.num_layers):
        outputs = []
        for direction in range(spec.directions):
            chain = layer * spec.directions + direction
            weights = layers[chain]
            last, of_steps = _run_chain(
                call, stepper(spec, cell, weights), input_side(spec, weights, x), chain,
                reverse=direction == 1 or spec.reverse,
            )  # fmt: skip
            finals.append(last)
            history.append(of_steps)
            outputs.append(of_steps[0])
        x = torch.cat(outputs, dim=-1) if spec.bidirectional else outputs[0]
        if call.problem.drops and layer < spec.num_layers - 1:
            if call.seed is None:
                raise ValueError("dropout needs a seed")
            mask = philox.mask(call.seed, layer, spec.dropout, (*x.shape,), x)
            x = x * (flip_time(mask, call.lengths) if spec.reverse else mask)
    all_states = (
        [torch.stack(parts) for parts in zip(*history)] if call.problem.return_states else []
    )
    y, ends = x, [torch.stack(parts) for parts in zip(*finals)]
    if call.problem.grad and not _reached(call, cell):
        y, ends, all_states = _tied(call, y, ends, all_states)
    return Outputs(y, ends, all_states, [])


def _reached(call: Call, cell: Cell) -> bool:
    """Whether every output has every input in its graph by itself, as in an LSTM or a GRU."""
    if torch.compiler.is_compiling() or call.problem.spec.proj_size or cell.dependent_product:
        return False  # a compiler sees no cache, and ties for nothing cost little there
    if call.reset_states:
        return False  # of a single step in reverse they are in the graph of final states alone
    return call.x.shape[0] > 0 and _reaches(cell)


@memo(256)
def _reaches(cell: Cell) -> bool:
    """Whether each new state depends on x, on r, on each state (the first by r) and vector."""
    return fresh.run(_depends, cell)


def _depends(cell: Cell) -> bool:
    """By autograd, on one element each. False where autograd cannot say.

    Then outputs are tied to the inputs, which is harmless where they are already.
    """
    count = 2 + len(cell.states) + len(cell.unit_params)
    x, r, *rest = (torch.full((1, 1), 0.5, requires_grad=True, device="cpu") for _ in range(count))
    h, *others = rest[: len(cell.states)]
    gates = (x * 1,) * len(cell.gates), (r + h,) * len(cell.gates)
    try:
        new = cell.step(*gates, (h, *others), tuple(rest[len(cell.states) :]))
        return all(
            value.requires_grad
            and None not in torch.autograd.grad(value, (x, r, *rest), torch.ones_like(value),
                                                retain_graph=True, allow_unused=True)
            for value in new
        )  # fmt: skip
    except RuntimeError:  # as of an operator without a derivative: the user's backward will say so
        return False


def _tied(
    call: Call, y: Tensor, finals: list[Tensor], all_states: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The outputs, tied to all inputs: one that they do not depend on has a gradient of zeros."""
    inputs = [call.x, *call.states, *call.params, *call.reset_states]
    zeros = [tensor[:0].sum() for tensor in inputs if tensor.requires_grad]
    if not zeros:
        return y, finals, all_states
    zero = torch.stack(zeros).sum()
    return y + zero, [state + zero for state in finals], [states + zero for states in all_states]


def _run_packed(call: Call) -> Outputs:
    """Runs a call of a packed x (N, I): only second derivatives come here."""
    if call.lengths is None:
        raise ValueError("a packed call needs lengths")
    lengths = call.lengths.to(call.x.device)
    steps, batch = int(lengths.max()), lengths.numel()
    present = torch.arange(steps, device=lengths.device)[:, None] < lengths  # (T, B)
    rows = present.flatten().nonzero().squeeze(1)
    flat = call.x.new_zeros(steps * batch, call.x.shape[1]).index_copy(0, rows, call.x)
    out = run(replace(call, x=flat.view(steps, batch, -1), lengths=lengths))
    return replace(out, y=out.y.flatten(0, 1).index_select(0, rows))


class Reference(Backend):
    """Plain torch operators, step by step: takes everything, fuses nothing."""

    name = "reference"
    reverses = True
    can = Capabilities(
        devices=frozenset({"cpu", "cuda", "meta", "mps", "xpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        bias_modes=frozenset(BIAS_MODES),
        input_modes=frozenset(INPUT_MODES),
        grad=True,
        layers=True,
        bidirectional=True,
        projection=True,
        clip=True,
        dropout=True,
        lengths=True,
        reset=True,
        return_states=True,
        dependent_product=True,
        transform=True,
        opaque=True,
        empty=True,
    )

    def absent(self) -> str | None:
        return None

    def reserve(self, problem: Problem, steps: int, batch: int) -> list[TensorShape]:
        return []

    def forward(self, call: Call) -> Outputs:
        return run(call)

    def backward(
        self, call: Call, y: Tensor, reserve: list[Tensor], grads: Cotangents, needs: Needs
    ) -> Gradients:
        """Runs forward again and differentiates it; differentiable itself."""
        flat = differentiate(call, grads, needs, create_graph=torch.is_grad_enabled())
        found = iter(flat)

        def take(wanted: tuple[bool, ...]) -> list[Tensor | None]:
            return [next(found) for _ in wanted]

        return Gradients(
            take((needs.x,))[0], take(needs.states), take(needs.params), take(needs.reset_states)
        )


def differentiate(
    call: Call,
    grads: Cotangents,
    needs: Needs,
    create_graph: bool,
    forward: Callable[[Call], Outputs] = run,
) -> list[Tensor | None]:
    """The gradients by running forward again, in the order of `Needs.flat`; None where not needed.

    Args:
        create_graph: they are linked to the tensors of the call and can be differentiated again.
        forward: what runs the call, differentiably.
    """
    inputs = [call.x, *call.states, *call.params, *call.reset_states]
    with torch.enable_grad():
        if create_graph:
            # other names, as one may be made of another, whose own gradient that is not
            inputs = [tensor.view_as(tensor) for tensor in inputs]
            wanted = [tensor for tensor, need in zip(inputs, needs.flat) if need]
        else:
            inputs = [
                tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs.flat)
            ]
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
        parts = iter(inputs)
        again = replace(
            call, x=next(parts), states=[next(parts) for _ in call.states],
            params=[next(parts) for _ in call.params],
            reset_states=[next(parts) for _ in call.reset_states],
        )  # fmt: skip
        out = forward(again)
        pairs = [
            (value, grad)
            for value, grad in zip(
                [out.y, *out.finals, *out.all_states], [grads.y, *grads.finals, *grads.all_states]
            )
            if grad is not None and value.requires_grad
        ]
    found: list[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        found = list(
            torch.autograd.grad(
                [value for value, _ in pairs], wanted, [grad for _, grad in pairs],
                create_graph=create_graph, allow_unused=True,
            )
        )  # fmt: skip
    filled = iter([torch.zeros_like(t) if grad is None else grad for t, grad in zip(wanted, found)])
    return [next(filled) if need else None for need in needs.flat]
