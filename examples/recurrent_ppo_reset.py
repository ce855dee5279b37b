"""Recurrent PPO without a loop over time: `reset=` in place of a step at each episode start.

A policy sees a cue at the first step of an episode and must name it at the last one, 4 to 12 steps
later. A rollout has many episodes, which begin anywhere in it. So that no state leaks from one to
the next, updates of recurrent policies usually walk over time and multiply the states by 1 - start
at each step (`walk`). One call with `reset=` does the same (`at_once`).

    python examples/recurrent_ppo_reset.py  # trains for ten seconds on a CPU, then compares
"""

import argparse
import copy

import torch
from compare import Comparison, compare
from torch import Tensor, nn

import openrnn

CUES, STEPS, ENVIRONMENTS, HIDDEN = 3, 64, 32, 64
States = tuple[Tensor, Tensor]


class Recall:
    """Environments side by side: (B, CUES + 1) is the cue, at the first step, and "answer now"."""

    def __init__(self) -> None:
        self.age = torch.zeros(ENVIRONMENTS, dtype=torch.long)
        self.cue = torch.randint(CUES, (ENVIRONMENTS,))
        self.end = torch.randint(4, 13, (ENVIRONMENTS,))

    def look(self) -> tuple[Tensor, Tensor]:
        """What is seen, and where an episode starts."""
        start, asked = self.age == 0, self.age == self.end
        cue = nn.functional.one_hot(self.cue, CUES) * start[:, None]
        return torch.cat([cue, asked[:, None]], 1).float(), start

    def act(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and which episodes are over; these begin anew."""
        over = self.age == self.end
        reward = (over & (action == self.cue)).float()
        self.age = torch.where(over, 0, self.age + 1)
        self.cue = torch.where(over, torch.randint_like(self.cue, CUES), self.cue)
        self.end = torch.where(over, torch.randint_like(self.end, 4, 13), self.end)
        return reward, over


class Policy(nn.Module):
    """One LSTM under an actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = openrnn.LSTM(CUES + 1, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, CUES), nn.Linear(HIDDEN, 1)

    def judge(self, y: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        return torch.distributions.Categorical(logits=self.actor(y)), self.critic(y).squeeze(-1)


def walk(lstm: nn.Module, seen: Tensor, starts: Tensor, state: States) -> Tensor:
    """The loop that is usual: one call a step, states set to 0 where an episode starts."""
    outputs = []
    for x, start in zip(seen, starts):
        keep = 1 - start.float()[None, :, None]
        y, state = lstm(x[None], (keep * state[0], keep * state[1]))
        outputs.append(y)
    return torch.cat(outputs)


def at_once(lstm: nn.Module, seen: Tensor, starts: Tensor, state: States) -> Tensor:
    """The same, in one call."""
    return lstm(seen, state, reset=starts)[0]


@torch.no_grad()
def rollout(policy: Policy, world: Recall, state: States) -> tuple[dict[str, Tensor], States]:
    """STEPS steps of all environments, and the states behind them; acting steps reset, too."""
    kept: dict[str, list[Tensor]] = {}
    for _ in range(STEPS):
        seen, start = world.look()
        y, state = policy.lstm.step(seen, state, reset=start)
        actions, value = policy.judge(y)
        action = actions.sample()
        reward, over = world.act(action)
        row = {"seen": seen, "starts": start, "action": action, "value": value, "reward": reward,
               "over": over, "before": actions.log_prob(action)}  # fmt: skip
        for name, tensor in row.items():
            kept.setdefault(name, []).append(tensor)
    return {name: torch.stack(rows) for name, rows in kept.items()}, state


def returns(rows: dict[str, Tensor], discount: float = 0.95) -> Tensor:
    """Discounted rewards to the end of each episode; of the last one, to the end of the rollout."""
    total, found = rows["value"][-1], []
    for reward, over in zip(reversed(rows["reward"]), reversed(rows["over"])):
        total = reward + discount * total * ~over
        found.append(total)
    return torch.stack(found[::-1])


def loss(policy: Policy, rows: dict[str, Tensor], state: States, run=at_once) -> Tensor:
    """PPO's clipped loss, of the critic and for exploration."""
    actions, value = policy.judge(run(policy.lstm, rows["seen"], rows["starts"], state))
    gain = returns(rows)
    better = gain - rows["value"]
    better = (better - better.mean()) / (better.std() + 1e-6)
    ratio = (actions.log_prob(rows["action"]) - rows["before"]).exp()
    clipped = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better)
    return -clipped.mean() + 0.5 * (value - gain).square().mean() - 0.01 * actions.entropy().mean()


def train(updates: int) -> tuple[Policy, dict[str, Tensor], States, float]:
    """The policy, a last rollout with the states before it, and its share of right answers."""
    policy, world = Policy(), Recall()
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    state = (torch.zeros(1, ENVIRONMENTS, HIDDEN), torch.zeros(1, ENVIRONMENTS, HIDDEN))
    for update in range(updates):
        before = state
        rows, state = rollout(policy, world, state)
        right = (rows["reward"].sum() / rows["over"].sum()).item()
        if update % 20 == 0 or update == updates - 1:
            print(f"update {update:4}  right answers {right:.2f}")
        for _ in range(4):
            optimizer.zero_grad()
            loss(policy, rows, before).backward()
            optimizer.step()
    return policy, rows, before, right


def compare_ways(policy: Policy, rows: dict[str, Tensor], state: States) -> Comparison:
    """A loss and its gradients by both ways; the loop is that of torch.nn.LSTM."""
    usual = copy.deepcopy(policy)
    openrnn.convert(usual, to="torch", quiet=True)

    def gradients(model: Policy, run) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(model, rows, state, run), list(model.parameters()))

    return compare(
        f"loss and gradients, T {STEPS}, B {ENVIRONMENTS}, H {HIDDEN}",
        {
            "a loop over torch.nn.LSTM": lambda: gradients(usual, walk),
            "openrnn.LSTM with reset=": lambda: gradients(policy, at_once),
        },
        within=1e-4,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    torch.manual_seed(0)
    policy, rows, state, _ = train(parser.parse_args().updates)
    compare_ways(policy, rows, state)
