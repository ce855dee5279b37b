"""What the commands share: options with a help text, words between commas, a line on stderr.

No module of this package imports torch or openrnn before a command runs. Names and defaults that
belong to the package therefore stand here as text; `tests/test_command.py` compares them.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from openrnn_command import INTERRUPTED

Body = TypeVar("Body", bound=Callable[..., int])

BACKENDS = "auto, cpu, fused, cudnn or reference"
CELLS = (
    "The cell: lstm, gru, rnn_tanh, rnn_relu, another one of openrnn.cells, or one of your own as "
    "path.py:name"
)


def option(text: str, default: object = None, **more: Any) -> Any:
    """An option that is None where it is not given; `default` says what that means."""
    text = text if default is None else f"{text} [default: {default}]"
    return typer.Option(help=text, show_default=False, **more)


Device = Annotated[str, typer.Option(help="Where to run: auto, cpu or cuda")]
Backend = Annotated[str, typer.Option(help=f"The backend: {BACKENDS}")]


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def say(text: str) -> None:
    """One line on stderr, once for all processes of a machine."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None:
        from openrnn.lm import workers

        if workers.launched() and distributed.get_node_local_rank(0):
            return
    typer.echo(text, err=True)


def interruptible(body: Body) -> Body:
    """A command that Ctrl-C ends with one line; typer would end it without a word."""

    @wraps(body)
    def wrapped(*args: Any, **options: Any) -> int:
        try:
            return body(*args, **options)
        except KeyboardInterrupt:
            say("openrnn: interrupted")
            return INTERRUPTED

    return wrapped  # type: ignore[return-value]  # the same signature
