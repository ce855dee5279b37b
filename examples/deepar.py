"""pytorch-forecasting's DeepAR: classes derived from `torch.nn.LSTM`, converted with their methods.

Its LSTM takes sequences of length 0 by a `forward` around torch's, and has helpers of its own.
`convert` puts our code under that class. The dataset is made of sines, the sizes are those of
hourly forecasts: a week is seen, a day is forecast.

    make example NAME=deepar
"""

import logging
import warnings

import numpy as np
import pandas as pd
import torch
from compare import compare
from converted import converted, passes
from pytorch_forecasting import DeepAR, TimeSeriesDataSet
from torch import Tensor, nn

SERIES, SEEN, FORECAST, HIDDEN = 64, 168, 24, 64


def hours() -> TimeSeriesDataSet:
    """Noisy sines with a period of a day."""
    hour = np.arange(SEEN + FORECAST + 40)
    noise = np.random.default_rng(0).normal(0, 0.1, (SERIES, len(hour)))
    value = np.sin(hour * 2 * np.pi / 24 + np.arange(SERIES)[:, None]) + noise
    frame = pd.DataFrame({
        "value": value.ravel().astype("float32"),
        "hour": np.tile(hour, SERIES),
        "series": np.repeat(np.arange(SERIES), len(hour)).astype(str),
    })  # fmt: skip
    return TimeSeriesDataSet(
        frame, time_idx="hour", target="value", group_ids=["series"],
        max_encoder_length=SEEN, max_prediction_length=FORECAST,
        static_categoricals=["series"], time_varying_known_reals=["hour"],
        time_varying_unknown_reals=["value"],
    )  # fmt: skip


def main() -> None:
    """Compares the whole model, in training and in sampling."""
    torch.manual_seed(0)
    data = hours()
    model = DeepAR.from_dataset(data, hidden_size=HIDDEN, rnn_layers=2, dropout=0.0)
    x, y = next(iter(data.to_dataloader(train=True, batch_size=SERIES, num_workers=0)))

    def run(model: nn.Module) -> Tensor:
        return model.train()(x)["prediction"]  # in eval mode it samples

    def loss(model: nn.Module) -> Tensor:
        return model.loss(model(x)["prediction"], y)

    ways = converted(model)
    sizes = f"T {SEEN} + {FORECAST}, B {SERIES}, H {HIDDEN}, 2 layers"
    passes(f"DeepAR, {sizes}", ways, run, loss)

    def paths(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return model.eval()(x, n_samples=20)["prediction"]

    calls = {name: lambda model=model: paths(model) for name, model in ways.items()}
    compare("20 sampled paths of a day", calls, within=1e-3)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    main()
