"""TorchRL's LSTMModule and GRUModule in one call over a batch of rollouts: `reset=` for `is_init`.

TorchRL cuts rollouts into episodes, pads these, and puts the results together again. A class with
another `forward` does without, and gives the states of every step where TorchRL has zeros. It is
put in place as `openrnn.convert` does it: modules change their class and keep their parameters.

    make example NAME=torchrl_modules
"""

import torch
from compare import compare
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

import openrnn

B, T, FEATURES, HIDDEN = 32, 128, 32, 128


class ResetLSTM(LSTMModule):
    """`recurrent_mode` by one call; for tensordicts (B, T)."""

    def forward(self, data):
        if not self.recurrent_mode:
            return super().forward(data)
        x, h, c, start = (data.get(key, None) for key in self.in_keys)
        state = None if h is None else (h[:, 0].transpose(0, 1), c[:, 0].transpose(0, 1))
        y, _, states = self.lstm(x, state, reset=start.squeeze(-1), return_states=True)
        h, c = (state.movedim(0, 2) for state in states)  # (L, B, T, H) -> (B, T, L, H)
        return data.update(dict(zip(self.out_keys, (y, h, c))))


class ResetGRU(GRUModule):
    """The same of a GRU."""

    def forward(self, data):
        if not self.recurrent_mode:
            return super().forward(data)
        x, h, start = (data.get(key, None) for key in self.in_keys)
        state = None if h is None else h[:, 0].transpose(0, 1)
        y, _, states = self.gru(x, state, reset=start.squeeze(-1), return_states=True)
        return data.update(dict(zip(self.out_keys, (y, states.movedim(0, 2)))))


def convert(policy: nn.Module) -> None:
    """All layers to openrnn's, and the modules around them to those above."""
    openrnn.convert(policy)
    for module in policy.modules():
        for theirs, ours in ((LSTMModule, ResetLSTM), (GRUModule, ResetGRU)):
            if type(module) is theirs:
                module.__class__ = ours


def policy_of(kind: type, names: list[str]) -> TensorDictSequential:
    """Features, the recurrent module, a linear head."""
    rnn = kind(
        input_size=FEATURES, hidden_size=HIDDEN, in_keys=["features", *names],
        out_keys=["hidden", *(("next", name) for name in names)],
    )  # fmt: skip
    embed = TensorDictModule(nn.Linear(4, FEATURES), in_keys=["seen"], out_keys=["features"])
    head = TensorDictModule(nn.Linear(HIDDEN, 2), in_keys=["hidden"], out_keys=["logits"])
    return TensorDictSequential(embed, rnn, head)


def rollouts(names: list[str]) -> TensorDict:
    """As a collector gives them: states of all steps, 0 where an episode starts."""
    start = torch.rand(B, T, 1) < 0.03
    data = {"seen": torch.randn(B, T, 4), "is_init": start}
    for name in names:
        data[name] = 0.1 * torch.randn(B, T, 1, HIDDEN) * ~start[..., None]
    return TensorDict(data, [B, T])


def gradients(policy: TensorDictSequential, data: TensorDict) -> tuple[Tensor, ...]:
    """The policy's outputs over all rollouts, and the gradients of a loss."""
    with set_recurrent_mode(True):
        logits = policy(data.copy())["logits"]
    return (logits, *torch.autograd.grad(logits.square().mean(), list(policy.parameters())))


@torch.no_grad()
def acting(policy: TensorDictSequential, data: TensorDict) -> Tensor:
    """The outputs of steps, one at a time, from the states of the step before."""
    outputs, keys = [], [key for key in data.keys() if key.startswith("state")]  # noqa: SIM118
    step = data[:, 0].copy()
    for t in range(16):
        step["seen"], step["is_init"] = data["seen"][:, t], data["is_init"][:, t]
        step = policy(step)
        outputs.append(step["logits"])
        for key in keys:
            step[key] = step["next", key]
    return torch.stack(outputs)


def main() -> None:
    """Both modules, in training and step by step."""
    torch.manual_seed(0)
    for kind, names in ((LSTMModule, ["state_h", "state_c"]), (GRUModule, ["state_h"])):
        theirs, ours, data = policy_of(kind, names), policy_of(kind, names), rollouts(names)
        ours.load_state_dict(theirs.state_dict())
        convert(ours)
        ways = {"torchrl": theirs, "with reset=": ours}
        for title, run in ((f"training, T {T}", gradients), ("16 steps of acting", acting)):
            compare(
                f"{kind.__name__}, {title}, B {B}, H {HIDDEN}",
                {name: lambda run=run, p=p, d=data: run(p, d) for name, p in ways.items()},
            )


if __name__ == "__main__":
    main()
