r"""
A policy that remembers, with resets
====================================

Reinforcement learning collects steps of many environments side by side, and episodes end anywhere
in them. A recurrent policy must begin each episode with a fresh state, in acting and in training.
Most libraries do that by a loop over time. Here it is one argument: ``reset=``.

The task needs memory: at the first step of an episode the agent sees a cue, some steps later it is
asked, and only then it is rewarded for naming the cue.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import Categorical

import openrnn

torch.manual_seed(0)
torch.set_num_threads(1)  # layers this small are no work for two
CUES, ENVIRONMENTS, STEPS, HIDDEN = 4, 32, 40, 48

# %%
# The environments
# ----------------


class Recall:
    """32 environments side by side. They see the cue at the first step, and a 1 when asked."""

    def __init__(self):
        self.age = torch.zeros(ENVIRONMENTS, dtype=torch.long)
        self.cue = torch.randint(CUES, (ENVIRONMENTS,))
        self.last = torch.randint(3, 9, (ENVIRONMENTS,))

    def look(self):
        """What is seen (B, 5), and whether an episode starts here (B,)."""
        starts, asked = self.age == 0, self.age == self.last
        cue = nn.functional.one_hot(self.cue, CUES) * starts[:, None]
        return torch.cat([cue, asked[:, None]], 1).float(), starts

    def act(self, action):
        """Rewards (B,), and whether an episode was over (B,). A new one begins at the next look."""
        over = self.age == self.last
        reward = (over & (action == self.cue)).float()
        self.age = torch.where(over, 0, self.age + 1)
        self.cue = torch.where(over, torch.randint_like(self.cue, CUES), self.cue)
        self.last = torch.where(over, torch.randint_like(self.last, 3, 9), self.last)
        return reward, over


# %%
# The mask
# --------
#
# ``reset`` is set where an episode *starts*: the state is replaced before that step. It is not
# ``done``, which most environments return. ``done[t]`` says that step t was the last; so ``reset[t
# + 1]`` is ``done[t]``. A mask that is off by one is a common bug of recurrent policies: the first
# observation of an episode is then read with the state of the one before, and thrown away.


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = openrnn.LSTM(CUES + 1, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, CUES), nn.Linear(HIDDEN, 1)

    def judge(self, y):
        return Categorical(logits=self.actor(y)), self.critic(y)[..., 0]


@torch.no_grad()
def rollout(policy, world, state, resets):
    """STEPS steps of all environments, each tensor (STEPS, ENVIRONMENTS, ...); the state after."""
    rows = []
    for _ in range(STEPS):
        seen, starts = world.look()
        y, state = policy.lstm.step(seen, state, reset=starts if resets else None)
        action = policy.judge(y)[0].sample()
        rows.append((seen, starts, action, *world.act(action)))
    return [torch.stack(column) for column in zip(*rows, strict=True)], state


# %%
# Training
# --------
#
# The rollout is judged again, now with gradients: one call over all 40 steps of all environments,
# from the state in which the rollout began. The mask keeps the episodes in it apart, and no
# gradient passes from one into the one before. The loss is that of an actor and a critic.


def returns(reward, over, last_value, discount=0.9):
    total, found = last_value, []
    for step in reversed(range(STEPS)):
        total = reward[step] + discount * total * ~over[step]
        found.append(total)
    return torch.stack(found[::-1])


def train(resets, updates=120):
    torch.manual_seed(1)
    policy, world = Policy(), Recall()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    state = (torch.zeros(1, ENVIRONMENTS, HIDDEN), torch.zeros(1, ENVIRONMENTS, HIDDEN))
    right = []
    for _ in range(updates):
        before = state
        (seen, starts, action, reward, over), state = rollout(policy, world, before, resets)
        y, _ = policy.lstm(seen, before, reset=starts if resets else None)
        chances, value = policy.judge(y)
        gain = returns(reward, over, value[-1].detach())
        better = gain - value
        actor = -(chances.log_prob(action) * better.detach()).mean()
        loss = actor + 0.5 * better.square().mean() - 0.02 * chances.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        right.append((reward.sum() / over.sum()).item())
    return policy, (seen, starts, before), right


policy, kept, right = train(True)
_, _, leaking = train(False)

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for curve, label in ((right, "with resets"), (leaking, "without: states leak")):
    smooth = torch.tensor(curve).unfold(0, 10, 1).mean(1)
    axes.plot(smooth, label=label)
axes.axhline(1 / CUES, color="0.7", lw=1)
axes.set(xlabel="update", ylabel="right answers", ylim=(0, 1.02))
axes.legend(loc="lower right")
plt.show()

# %%
# The grey line is chance. Without the mask the policy has to learn to forget by itself.
#
# The loop that it replaces
# -------------------------
#
# Without ``reset=`` one walks over time and multiplies the state by 0 where an episode starts. The
# results are the same, the time is not.

seen, starts, before = kept
theirs = nn.LSTM(CUES + 1, HIDDEN)
theirs.load_state_dict(policy.lstm.state_dict())


def walk():
    state, outputs = before, []
    for x_t, start in zip(seen, starts, strict=True):
        keep = (~start).float()[None, :, None]
        y_t, state = theirs(x_t[None], (keep * state[0], keep * state[1]))
        outputs.append(y_t)
    return torch.cat(outputs)


def milliseconds(run):
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        run().sum().backward()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def at_once():
    return policy.lstm(seen, before, reset=starts)[0]


assert torch.allclose(walk(), at_once(), atol=1e-5)
print(f"torch.nn.LSTM in a loop: {milliseconds(walk):.1f} ms for a forward and backward pass")
print(f"openrnn.LSTM, reset=:    {milliseconds(at_once):.1f} ms")

# %%
# In your library
# ---------------
#
# * A state that is learned in place of zeros: ``reset_state=(h0, c0)``; gradients reach it.
# * Rollouts are cut into minibatches by environment, never inside time, and each has its state at
#   its beginning. Keep it detached, as here.
# * Acting without gradients: ``stepper = policy.lstm.stepper(batch=32)``,
#   ``stepper.reset(starts)``.
# * ``openrnn.convert(policy)`` swaps the layers of a policy that a library made.
# * A recurrent PPO in one file: ``examples/recurrent_ppo_reset.py`` of the repository.
