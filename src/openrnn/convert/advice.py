"""Errors that name arguments to give, so that a command can name its own options instead."""


class Argument(str):
    """How a message names an argument of `from_weights` or `to_weights`, such as "cell="."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name alone."""
        return self.partition("=")[0]


class AdviceError(ValueError):
    """Its message is its `args`, joined: text, and each `Argument` that it names."""

    def __str__(self) -> str:
        return "".join(self.args)


def parts_of(error: ValueError) -> tuple[str, ...]:
    """The message of an error as text and arguments."""
    return error.args if isinstance(error, AdviceError) else (str(error),)
