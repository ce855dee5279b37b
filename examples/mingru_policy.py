"""A policy on a MinGRU, as PufferLib trains them: a cell of your own in place of scans and loops.

    z = sigmoid(W_z x)   h_t = (1 - z) h_{t-1} + z g(W_h x)   g(v) = v + 0.5; below 0 sigmoid(v)
    y_t = p h_t + (1 - p) x, p = sigmoid(W_p x)

No gate sees the state, so that training may take a scan in log space in place of a loop, where no
episode starts on the way. The cell does both with one call, with `reset=` too, and steps.

    make example NAME=mingru_policy
"""

import torch
from compare import compare
from torch import Tensor, nn
from torch.nn import functional as F

import openrnn

B, T, HIDDEN = 32, 64, 128


@openrnn.cell(gates="h z", states="h")
def mingru(x, r, s):
    z = torch.sigmoid(x.z)
    return (1 - z) * s.h + z * torch.where(x.h >= 0, x.h + 0.5, torch.sigmoid(x.h))


class Block(nn.Module):
    """A MinGRU and its way around: x (T, B, H) and h (B, H) -> y (T, B, H), h."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)  # of h, z and p

    def around(self, x: Tensor, h: Tensor) -> Tensor:
        p = torch.sigmoid(F.linear(x, self.gates.weight[2 * HIDDEN :]))
        return p * h + (1 - p) * x


class Loop(Block):
    """Step after step."""

    def forward(self, x: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        every = []
        for new, gate, start in zip(*F.linear(x, self.gates.weight).chunk(3, -1)[:2], starts):
            z = torch.sigmoid(gate)
            g = torch.where(new >= 0, new + 0.5, torch.sigmoid(new))
            h = (1 - z) * h * ~start[:, None] + z * g
            every.append(h)
        return self.around(x, torch.stack(every))


class Scan(Block):
    """All steps at once, in logarithms; for states above 0 and without `starts`."""

    def forward(self, x: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        new, gate, _ = F.linear(x, self.gates.weight).chunk(3, -1)
        decay = -F.softplus(gate).cumsum(0)  # log of (1 - z) up to each step
        g = torch.where(new >= 0, (F.relu(new) + 0.5).log(), -F.softplus(-new))
        terms = torch.cat([h.log()[None], g - F.softplus(-gate) - decay])
        return self.around(x, (decay + terms.logcumsumexp(0)[1:]).exp())


class Cell(Block):
    """The cell above, with the weights of `gates`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = openrnn.Recurrent(mingru, HIDDEN, HIDDEN, bias_mode="none")
        self.layer.weight_hh_l0.requires_grad_(False)  # no gate reads it

    def forward(self, x: Tensor, h: Tensor, starts: Tensor | None) -> Tensor:
        y, _ = self.layer(x, (h[None],), reset=starts)
        return self.around(x, y)


def gradients(block: Block, x: Tensor, h: Tensor, starts: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs, and the gradient of the weights of all gates."""
    y = block(x, h, starts)
    loss = y.square().mean()
    if isinstance(block, Cell):
        ours, others = torch.autograd.grad(loss, [block.layer.weight_ih_l0, block.gates.weight])
        return y, torch.cat([ours, others[2 * HIDDEN :]])
    return y, *torch.autograd.grad(loss, [block.gates.weight])


def main() -> None:
    """Training with and without starts of episodes; then steps of a policy that acts."""
    torch.manual_seed(0)
    loop, scan, cell = Loop(), Scan(), Cell()
    for block in (scan, cell):
        block.gates.load_state_dict(loop.gates.state_dict())
    with torch.no_grad():
        cell.layer.weight_ih_l0.copy_(loop.gates.weight[: 2 * HIDDEN])
    x, h = torch.randn(T, B, HIDDEN), torch.rand(B, HIDDEN)
    none, starts = torch.zeros(T, B, dtype=torch.bool), torch.rand(T, B) < 0.03
    compare(
        f"training, T {T}, B {B}, H {HIDDEN}, episodes start anywhere",
        {
            "loop": lambda: gradients(loop, x, h, starts),
            "cell": lambda: gradients(cell, x, h, starts),
        },
    )
    compare(
        "training, no episode starts",
        {
            "scan": lambda: gradients(scan, x, h, none),
            "loop": lambda: gradients(loop, x, h, none),
            "cell": lambda: gradients(cell, x, h, None),
        },
    )
    stepper = cell.layer.stepper(B)

    @torch.no_grad()
    def act(step) -> Tensor:
        return torch.stack([step(x_t).clone() for x_t in x])

    def by_cell(x_t: Tensor) -> Tensor:
        return cell.around(x_t, stepper(x_t))

    def from_start(step) -> Tensor:
        stepper.state = (h[None],)
        state[0] = h
        return act(step)

    state = [h]

    def by_hand(x_t: Tensor) -> Tensor:
        new, gate, _ = F.linear(x_t, loop.gates.weight).chunk(3, -1)
        z = torch.sigmoid(gate)
        g = torch.where(new >= 0, new + 0.5, torch.sigmoid(new))
        state[0] = (1 - z) * state[0] + z * g
        return loop.around(x_t, state[0])

    compare(
        f"{T} steps of acting",
        {"by hand": lambda: from_start(by_hand), "stepper": lambda: from_start(by_cell)},
    )


if __name__ == "__main__":
    main()
