"""RecurrentPPO of sb3-contrib without its loop over time: `reset=` where an episode starts.

The policy's LSTMs step through time in Python where states are to be set to 0 on the way. Four
lines in place of that loop, and `openrnn.convert`, are all that changes; a trained model's weights
stay as they are. The task is a cart-pole that does not show its speeds.

    make example NAME=recurrent_ppo
"""

import argparse
import copy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from compare import compare
from gymnasium.wrappers import TransformObservation
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy as Usual
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from torch import Tensor

import openrnn

ENVIRONMENTS, STEPS, HIDDEN = 8, 128, 256


class Policy(Usual):
    """sb3-contrib's policy, for LSTMs of openrnn."""

    @staticmethod
    def _process_sequence(features, lstm_states, episode_starts, lstm):
        B = lstm_states[0].shape[1]
        x = features.unflatten(0, (B, -1)).transpose(0, 1)  # (T, B, I)
        reset = episode_starts.reshape(B, -1).T > 0  # (T, B)
        y, states = lstm(x, lstm_states, reset=reset)
        return y.transpose(0, 1).flatten(0, 1), states


def cart_pole() -> gymnasium.Env:
    """Position and angle; their speeds must be remembered."""
    full = gymnasium.make("CartPole-v1")
    seen = gymnasium.spaces.Box(full.observation_space.low[::2], full.observation_space.high[::2])
    return TransformObservation(full, lambda observation: observation[::2], seen)


def learner(policy: type) -> RecurrentPPO:
    """The same weights whichever the policy."""
    return RecurrentPPO(
        policy, make_vec_env(cart_pole, ENVIRONMENTS, seed=1), n_steps=STEPS, batch_size=256,
        n_epochs=1, learning_rate=1e-3, device="cpu", seed=1,
        policy_kwargs={"lstm_hidden_size": HIDDEN},
    )  # fmt: skip


def trained(model: RecurrentPPO, start: dict[str, Any]) -> list[Tensor]:
    """The parameters after one pass over the rollout, from the same start each time."""
    model.policy.load_state_dict(start["policy"])
    model.policy.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
    np.random.seed(0)  # the order of minibatches
    model.train()
    return list(model.policy.parameters())


def main() -> None:
    """Trains; then gives three learners the same weights and the same rollout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=5)
    now = learner(Policy)
    openrnn.convert(now.policy)
    for update in range(1, parser.parse_args().updates + 1):
        now.learn(STEPS * ENVIRONMENTS, reset_num_timesteps=update == 1)
        steps = np.mean([episode["l"] for episode in now.ep_info_buffer])
        print(f"update {update}: the pole stands {steps:.1f} steps", flush=True)
    as_it_is, converted = learner(Usual), learner(Usual)
    openrnn.convert(converted.policy, quiet=True)
    ways = {
        "sb3-contrib": as_it_is,
        "the same, converted": converted,
        "with reset= for its loop": now,
    }
    start = copy.deepcopy(
        {"policy": now.policy.state_dict(), "optimizer": now.policy.optimizer.state_dict()}
    )
    for model in ways.values():
        model.rollout_buffer = now.rollout_buffer
        model.set_logger(configure(None, []))
    compare(
        f"train() on {STEPS} steps of {ENVIRONMENTS} environments, LSTMs with {HIDDEN} units",
        {name: partial(trained, model, start) for name, model in ways.items()},
        within=1e-4, seconds=20, repeats=(3, 20),
    )  # fmt: skip


if __name__ == "__main__":
    main()
