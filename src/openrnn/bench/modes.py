"""What of a call is timed: its modes, by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One kind of call.

    Args:
        gradients: the call also returns the gradients of x and of every parameter.
        penalty: these are the gradients of the sum of squares of the gradient of x.
        host: the time until the call returns, and not until the device has ended.
        stepwise: T calls of one step each, and not one of T steps.
    """

    gradients: bool = False
    penalty: bool = False
    host: bool = False
    stepwise: bool = False


MODES = {
    "forward": Mode(),
    "training": Mode(gradients=True),
    # each step from the states of the one before, as of policies, decoders and samplers
    "steps": Mode(stepwise=True),
    # a second derivative, as critics of generative networks and meta-learning have it
    "gradient-penalty": Mode(gradients=True, penalty=True),
    "host-forward": Mode(host=True),
    # forward that autograd records
    "host-recorded": Mode(host=True),
    "host-training": Mode(gradients=True, host=True),
    # training with autograd in the caller's thread
    "host-one-thread": Mode(gradients=True, host=True),
    # the gradients of one forward call, again and again, so that autograd's thread is awake
    "host-backward": Mode(gradients=True, host=True),
}
USUAL_MODES = ("forward", "training")
HOST_MODES = tuple(name for name, mode in MODES.items() if mode.host)
