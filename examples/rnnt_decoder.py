"""Greedy decoding of an RNN transducer: its prediction network in a CUDA graph, or by a stepper.

One symbol is one step of a small LSTM and of a joint network, thousands of times, and each waits
for the last: what a call costs beside its work counts most. On a GPU the whole step is recorded
once in a CUDA graph. On a CPU `lstm.stepper` keeps its states and allocates nothing.

    make example NAME=rnnt_decoder
"""

import copy
from collections.abc import Callable

import torch
from compare import compare
from torch import Tensor, nn

import openrnn

SYMBOLS, BLANK, HIDDEN, FRAMES, MOST = 128, 0, 320, 120, 3  # MOST symbols of a frame


class Transducer(nn.Module):
    """Prediction network and joint network; encoded frames come from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.joint = nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, SYMBOLS))
        # an untrained network would hardly ever say that a frame has no symbol
        nn.init.constant_(self.joint[1].bias[BLANK : BLANK + 1], 0.35)


Step = Callable[[Tensor], Tensor]  # the last symbol (1,) -> the prediction (1, H)


def called(model: Transducer) -> tuple[Step, Callable[[], None]]:
    """A step as it is usually written, and what sets its states back."""
    state: list[tuple[Tensor, Tensor] | None] = [None]

    def step(symbol: Tensor) -> Tensor:
        y, state[0] = model.lstm(model.embed(symbol)[None], state[0])
        return y[0]

    return step, lambda: state.__setitem__(0, None)


def by_stepper(model: Transducer) -> tuple[Step, Callable[[], None]]:
    """States stay inside the stepper."""
    stepper = model.lstm.stepper(1)
    return lambda symbol: stepper(model.embed(symbol)), stepper.reset


def in_graph(model: Transducer) -> tuple[Step, Callable[[], None]]:
    """A CUDA graph that reads a symbol, and moves the states on in their memory."""
    device = model.embed.weight.device
    symbol = torch.zeros(1, dtype=torch.long, device=device)
    states = [torch.zeros(1, 1, HIDDEN, device=device) for _ in range(2)]

    def move_on() -> Tensor:
        y, after = model.lstm.step(model.embed(symbol), tuple(states))
        for state, new in zip(states, after):
            state.copy_(new)
        return y

    stream = torch.cuda.Stream()  # what runs for the first time must not be recorded
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            move_on()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = move_on()

    def step(last: Tensor) -> Tensor:
        symbol.copy_(last)
        graph.replay()
        return y

    return step, lambda: [state.zero_() for state in states]


@torch.no_grad()
def decode(model: Transducer, frames: Tensor, step: Step, restart: Callable[[], None]) -> Tensor:
    """The symbols of frames (T, H), greedily."""
    restart()
    found = [torch.zeros(1, dtype=torch.long, device=frames.device)]
    predicted = step(found[0])
    for frame in frames:
        for _ in range(MOST):
            symbol = model.joint(frame + predicted).argmax(-1)
            if symbol.item() == BLANK:
                break
            found.append(symbol)
            predicted = step(symbol)
    return torch.cat(found)


def main() -> None:
    """Decodes the same frames by each way."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs, frames = Transducer().to(device).eval(), torch.randn(FRAMES, HIDDEN, device=device)
    ours = copy.deepcopy(theirs)
    openrnn.convert(ours)
    ways = {"torch.nn, called": (theirs, called), "openrnn, called": (ours, called),
            "openrnn, stepper": (ours, by_stepper)}  # fmt: skip
    if device == "cuda":
        ways["openrnn, CUDA graph"] = ours, in_graph
    with torch.no_grad():
        made = {name: (model, *way(model)) for name, (model, way) in ways.items()}
    count = len(decode(theirs, frames, *made["torch.nn, called"][1:]))
    compare(
        f"{count} symbols of {FRAMES} frames on a {device.upper().replace('CUDA', 'GPU')}, "
        f"H {HIDDEN}",
        {name: lambda way=way: decode(way[0], frames, *way[1:]) for name, way in made.items()},
        within=0.0,
    )


if __name__ == "__main__":
    main()
