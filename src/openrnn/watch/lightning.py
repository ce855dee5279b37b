"""`openrnn.watch` as a callback of Lightning."""

from typing import Any

from openrnn.convert.lightning import LightningCallback
from openrnn.watch.watching import Watch, watch


class WatchCallback(LightningCallback):
    """`openrnn.watch` of the model that a Lightning trainer fits, into its TensorBoard logger.

    It begins when training does and ends with it, in the first process alone. A logger whose
    `experiment` cannot write scalars is passed over. It can be pickled while nothing is fitted.

    Args:
        every, histograms: as in `openrnn.watch`.

    Raises:
        ImportError: Lightning is not installed.
        ValueError: every is less than 1.
    """

    def __init__(self, *, every: int = 100, histograms: bool = True) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every, self.histograms = every, histograms
        self._watches: list[Watch] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook before the first batch, where parameters are in place."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            writer = getattr(logger, "experiment", None)
            if callable(getattr(writer, "add_scalar", None)):
                self._watches.append(
                    watch(pl_module, writer, every=self.every, histograms=self.histograms)
                )

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Lightning's last hook of a run, also of one that failed."""
        while self._watches:
            self._watches.pop().remove()
