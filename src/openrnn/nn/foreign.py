"""Inputs that are no tensors: those of `torch.fx`, and other objects with `__torch_function__`."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from openrnn.spec import number


def call(module: nn.Module, input: Any, **options: Any) -> Any:
    """What a module returns for an input that is no tensor; `options` that are None are left out.

    `torch.fx` gets one node, as it does of `torch.nn`'s own layers. Other objects are asked by
    `torch.overrides`: `__torch_function__(forward, types, (module, input, ...), options)`.

    Raises:
        TypeError: the object knows nothing of torch.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    from torch.fx import Proxy

    if isinstance(input, Proxy) and isinstance(tracer := input.tracer, torch.fx.Tracer):
        target = tracer.path_of_module(module)
        return tracer.create_proxy("call_module", target, (input,), given)
    relevant = (input, *given.values(), *_states(given.get("hx")))
    if torch.overrides.has_torch_function(relevant):
        forward: Any = type(module).forward
        return torch.overrides.handle_torch_function(forward, relevant, module, input, **given)
    raise TypeError(f"{type(module).__name__}: input must be a Tensor, got {type(input).__name__}")


def padding(value: Any) -> float:
    """A padding value that is neither a float nor an int, as a float.

    Raises:
        TypeError: it is no number, as where `torch.fx` traces the layer itself.
    """
    from torch.fx import Proxy

    if isinstance(value, Proxy):
        raise TypeError(
            "torch.fx.symbolic_trace has no inside of a layer to trace: give it a module that has "
            "the layer, such as torch.nn.Sequential(layer)"
        )
    return number("padding_value", value)


def answers(hx: Any) -> bool:
    """Whether some state is no tensor but an object with `__torch_function__`."""
    states = _states(hx)
    if torch.compiler.is_compiling() or not torch.overrides.has_torch_function(states):
        return False
    return not all(isinstance(state, Tensor) for state in states)


def _states(hx: Any) -> Sequence[Any]:
    return hx if isinstance(hx, tuple | list) else (hx,)


def refuse_script(module: nn.Module) -> NoReturn:
    """Says what to do in place of `torch.jit.script`, which reads no cell's source."""
    raise NotImplementedError(
        f"torch.jit.script cannot compile {type(module).__name__} of openrnn: use torch.jit.trace "
        "or torch.export, or convert it to torch.nn with openrnn.convert(module, to='torch') first"
    )


def refuse_packed_export(module: nn.Module) -> None:
    """Raises NotImplementedError where torch.export records: a packed sequence has no sizes there.

    torch's own layers fail with a guard on numbers that are not known.
    """
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"{type(module).__name__} of openrnn cannot be exported with a PackedSequence: write "
            "y, state = layer(x, lengths=lengths) in place of pack_padded_sequence, the call and "
            "pad_packed_sequence; lengths may have any order"
        )
