"""darts makes its network inside `fit`: `openrnn.ConvertCallback` converts it there.

Two years of daily sales of several shops give the next four weeks. Both forecasters are trained
from the same seed; one has the callback. What it saves has names and tensors, and no classes: a
forecaster without the callback loads it.

    make example NAME=darts_fit
"""

import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from compare import compare
from darts import TimeSeries
from darts.models import BlockRNNModel
from darts.utils.serialization import add_safe_globals

import openrnn

SHOPS, DAYS, SEEN, FORECAST, HIDDEN = 8, 730, 112, 28, 64


def sales() -> list[TimeSeries]:
    """Noisy weeks, one level for each shop."""
    day, noise = np.arange(DAYS), np.random.default_rng(0)
    dates = pd.date_range("2024-01-01", periods=DAYS)
    return [
        TimeSeries.from_times_and_values(
            dates,
            (np.sin(day * 2 * np.pi / 7 + shop) + noise.normal(0, 0.1, DAYS)).astype("float32"),
        )
        for shop in range(SHOPS)
    ]


def forecaster(*callbacks: object) -> BlockRNNModel:
    """One epoch of an LSTM with two layers."""
    return BlockRNNModel(
        SEEN, FORECAST, model="LSTM", hidden_dim=HIDDEN, n_rnn_layers=2, n_epochs=1,
        batch_size=64, random_state=0, pl_trainer_kwargs={
            "accelerator": "cpu", "callbacks": list(callbacks), "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False,
            "enable_checkpointing": False, "limit_train_batches": 20,
        },
    )  # fmt: skip


def values(model: BlockRNNModel, series: Sequence[TimeSeries]) -> torch.Tensor:
    return torch.tensor(np.stack([s.values() for s in model.predict(FORECAST, series=series)]))


def main() -> None:
    """Compares training and forecasts, then saves and loads."""
    series = sales()
    callback = openrnn.ConvertCallback()
    makers = {"darts": forecaster, "with ConvertCallback": lambda: forecaster(callback)}

    def fit(make) -> dict[str, torch.Tensor]:
        model = make().fit(series)
        return dict(model.model.named_parameters())

    calls = {name: lambda make=make: fit(make) for name, make in makers.items()}
    sizes = f"T {SEEN}, B 64, H {HIDDEN}, 2 layers"
    compare(f"fit, 20 batches, {sizes}", calls, within=1e-3, seconds=20, repeats=(2, 20))

    fitted = {name: make().fit(series) for name, make in makers.items()}
    calls = {name: lambda model=model: values(model, series) for name, model in fitted.items()}
    compare("forecasts of all shops", calls, within=1e-3)

    add_safe_globals([openrnn.ConvertCallback])  # darts saves its trainer's callbacks as well
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "forecaster.pt")
        fitted["with ConvertCallback"].save(place)
        loaded = BlockRNNModel.load(place)
        print("loaded:", type(loaded.model.rnn), end=", ")
        again = values(loaded, series)
        print("after predict:", type(loaded.model.rnn))
    torch.testing.assert_close(again, values(fitted["darts"], series), rtol=0, atol=1e-3)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    main()
