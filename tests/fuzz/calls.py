"""One call of a plan: its outputs and gradients, however it is made and differentiated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from openrnn import ops

from . import judge
from .building import Given, made, packed, required
from .plans import MODULES, Plan
from .tensors import plain, twisted
from .verdict import Unfit

FUNCTIONAL = ("func_grad", "vmap", "ensemble", "jvp", "dual")
Answer = list[tuple[str, Any]]


def outputs(found: Any) -> list[Any]:
    """The tensors of nested results, in order."""
    if isinstance(found, PackedSequence):
        return [found.data]
    if isinstance(found, (tuple, list)):
        return [tensor for part in found for tensor in outputs(part)]
    if isinstance(found, Tensor) and found.is_nested:
        return [torch.nested.to_padded_tensor(found, 0.0)]
    return [found]


def _arguments(plan: Plan, given: Given, ours: bool) -> tuple[list[Any], dict[str, Any]]:
    inputs = given.inputs
    states = [inputs[name] for name in sorted(inputs) if name.startswith("state")]
    fresh = [inputs[name] for name in sorted(inputs) if name.startswith("reset_state")]
    x = inputs["x"]
    if plan.way == "packed" and isinstance(x, Tensor):
        x = packed(plan, x)
    args, more = [x], {}
    if states:
        args.append(tuple(states) if len(states) > 1 else states[0])
    if fresh:
        more["reset_state"] = tuple(fresh) if len(fresh) > 1 else fresh[0]
    more |= {name: inputs[name] for name in ("lengths", "reset") if name in inputs}
    if ours and plan.face not in MODULES and plan.way != "step":
        more["return_states"] = plan.return_states
        if plan.padding_value and "lengths" in inputs:
            more["padding_value"] = plan.padding_value
        more |= _randomness(plan)
    if plan.way == "packed":
        more.pop("return_states", None)
    return args, more


def _randomness(plan: Plan) -> dict[str, Any]:
    """A generator, or torch's own from a seed: the same dropout masks at each call of a plan."""
    if not plan.drops:
        return {}
    if plan.seed % 2:
        return {"generator": torch.Generator(plan.device).manual_seed(plan.seed)}
    torch.manual_seed(plan.seed)
    return {}


def _cotangents(plan: Plan, values: list[Any], odd: bool) -> list[Any]:
    dice = torch.Generator().manual_seed(plan.seed % 2**30 + 1)
    twist = dict(plan.twists).get("cotangent")
    found = []
    for value in values:
        grad = torch.randn(value.shape, generator=dice, dtype=torch.float64)
        grad = grad.to(plan.dtype).to(value.device, value.dtype)
        if twist:
            grad = twisted(twist, grad)[0 if odd else 1]
        found.append(grad)
    return found


def evaluate(plan: Plan, module: Any, given: Given, ours: bool, odd: bool) -> Answer:
    """Outputs and gradients by name of one call."""
    if plan.face.startswith("ops"):
        return _explicit(plan, module, given, odd)
    differentiates = plan.way not in (*FUNCTIONAL, "no_grad", "inference")
    leaves = required(given) if differentiates else []
    args, more = _arguments(plan, given, ours)
    run: Callable[..., Any] = module
    if plan.way == "step":  # the method of a module, whose parameters are its own
        run = module.step
    by_name = {name: value for name, value in given.params.items() if value is not None}
    if plan.by == "data" and plan.way not in FUNCTIONAL:
        _set(module, by_name, given.needs)
    else:

        def run(*args: Any, **more: Any) -> Any:
            return torch.func.functional_call(module, by_name, args, more)

    if plan.way in FUNCTIONAL:
        return _transformed(plan, module, by_name, args, more)
    if plan.way in ("no_grad", "inference"):
        with torch.no_grad() if plan.way == "no_grad" else torch.inference_mode():
            return _named(outputs(run(*args, **more)))
    if plan.by == "data":
        own = dict(module.named_parameters())
        leaves = [own.get(n, leaf) for n, leaf in zip(sorted(given.needs), leaves)]
    if plan.way == "checkpoint":
        found = checkpoint(run, *args, use_reentrant=False, **more)
    else:
        found = run(*args, **more)
    values = outputs(found)
    answer = _named(values)
    pairs = [
        (value, grad)
        for value, grad in zip(values, _cotangents(plan, values, odd))
        if isinstance(value, Tensor) and value.requires_grad
    ]
    return answer + _gradients(plan, leaves, sorted(given.needs), pairs)


def _named(values: list[Any]) -> Answer:
    return [(f"out{place}", value) for place, value in enumerate(values)]


def _set(module: nn.Module, values: dict[str, Any], needs: frozenset[str]) -> None:
    for name, parameter in module.named_parameters():
        try:
            parameter.data = values[name].detach()
        except (RuntimeError, TypeError, AttributeError, KeyError) as error:
            raise Unfit("torch puts no such tensor into a parameter") from error
        parameter.requires_grad_(name in needs)


def _gradients(plan: Plan, leaves: list[Tensor], names: list[str], pairs: list[Any]) -> Answer:
    if not pairs or not leaves:
        found = [torch.zeros_like(leaf) for leaf in leaves]
        if plan.way == "batched_grads":
            found = [torch.stack([grad, grad]) for grad in found]
        return [(f"d{name}", grad) for name, grad in zip(names, found)]
    values, grads = (list(each) for each in zip(*pairs))
    if plan.way == "batched_grads":
        grads = [torch.stack([grad, 0.5 * grad]) for grad in grads]
    found = torch.autograd.grad(
        values, leaves, grads, allow_unused=True, create_graph=plan.way == "twice",
        is_grads_batched=plan.way == "batched_grads",
    )  # fmt: skip
    shape = (2,) if plan.way == "batched_grads" else ()
    answer = [
        (f"d{name}", leaf.new_zeros((*shape, *leaf.shape)) if grad is None else grad)
        for name, leaf, grad in zip(names, leaves, found)
    ]
    if plan.way == "twice":
        firsts = [grad for grad in found if grad is not None and grad.requires_grad]
        if firsts:
            total = sum((grad.square().sum() for grad in firsts), firsts[0].new_zeros(()))
            again = torch.autograd.grad(total, leaves, allow_unused=True)
            answer += [
                (f"dd{name}", torch.zeros_like(leaf) if grad is None else grad)
                for name, leaf, grad in zip(names, leaves, again)
            ]
    return answer


def _transformed(
    plan: Plan, module: nn.Module, params: dict[str, Any], args: list[Any], more: dict[str, Any]
) -> Answer:
    """The same through torch.func."""
    x, *rest = args

    def values(params: dict[str, Any], x: Tensor) -> tuple[Tensor, ...]:
        again = _randomness(plan) if "generator" in more else {}
        return tuple(
            outputs(torch.func.functional_call(module, params, (x, *rest), {**more, **again}))
        )

    if plan.way == "func_grad":

        def loss(params: dict[str, Any], x: Tensor) -> Tensor:
            found = values(params, x)
            return sum((v * g).sum() for v, g in zip(found, _cotangents(plan, [*found], False)))

        d_params, dx = torch.func.grad(loss, argnums=(0, 1))(params, x)
        return [("dx", dx), *((f"d{name}", grad) for name, grad in d_params.items())]
    if plan.way == "vmap":
        found = torch.func.vmap(lambda x: values(params, x))(torch.stack([x, 0.5 * x]))
        return _named([*found])
    if plan.way == "ensemble":
        several = {name: torch.stack([value, 0.5 * value]) for name, value in params.items()}
        return _named([*torch.func.vmap(values, in_dims=(0, None))(several, x)])
    tangent = _cotangents(plan, [x], False)[0]
    if plan.way == "jvp":
        out, tangents = torch.func.jvp(lambda x: values(params, x), (x,), (tangent,))
        return _named([*out, *tangents])
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        found = values(params, forward_ad.make_dual(x, tangent))
        both = [part for value in found for part in forward_ad.unpack_dual(value)]
        return _named([torch.zeros(()) if part is None else part for part in both])


def _explicit(plan: Plan, spec: Any, given: Given, odd: bool) -> Answer:
    """The same through `openrnn.ops`; `plan.backend` is the one that runs it."""
    inputs = given.inputs
    states = [inputs[name] for name in sorted(inputs) if name.startswith("state")] or None
    fresh = [inputs[name] for name in sorted(inputs) if name.startswith("reset_state")] or None
    out = ops.forward(
        inputs["x"], inputs["params"], spec, states=states, lengths=inputs.get("lengths"),
        reset=inputs.get("reset"), reset_states=fresh, is_training=plan.way == "grad",
        seed=plan.seed, return_states=plan.return_states,
        backend=plan.backend,
    )  # fmt: skip
    values = [out.y, *out.states, *out.all_states]
    answer = _named(values)
    if out.reserve is None:
        return answer
    dy, *others = _cotangents(plan, values, odd)
    count = len(out.states)
    grads = ops.backward(
        out.reserve, dy, dstates=others[:count],
        dall_states=others[count:] if plan.return_states else None,
    )  # fmt: skip
    return answer + [(f"d{name}", grad) for name, grad in grads.items() if grad is not None]


def ran(plan: Plan, backend: str, dtype: torch.dtype, given: Given, odd: bool) -> Answer:
    """Ours, with a backend."""
    fake = plan.ambient == "fake_mode" and odd
    if fake:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            given = Given(*({k: mode.from_tensor(v) if isinstance(v, Tensor) else v
                             for k, v in each.items()} for each in (given.inputs, given.params)),
                          given.needs)  # fmt: skip
            module = made(plan, backend, dtype)
            return evaluate(replace(plan, by="functional_call"), module, given, True, odd)
    module = made(plan if odd else replace(plan, argument=""), backend, dtype)
    if not plan.face.startswith("ops"):
        module.train(plan.training)
    return evaluate(replace(plan, backend=backend), module, given, ours=True, odd=odd)


def plains(answer: Answer) -> judge.Found | None:
    """The numbers of an answer; None where it has none, as that of fake tensors."""
    found = {}
    for name, value in answer:
        numbers = plain(value)
        if numbers is None:
            return None
        found[name] = numbers.cpu()
    return found
