"""Where each shipped cell was published: title and link."""

_GRU = (
    "Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder",
    "https://arxiv.org/abs/1406.1078",
)
_LSTM = (
    "Hochreiter and Schmidhuber 1997, Long Short-Term Memory",
    "https://doi.org/10.1162/neco.1997.9.8.1735",
)

PAPERS = {
    "rnn_tanh": [
        ("Elman 1990, Finding Structure in Time", "https://doi.org/10.1207/s15516709cog1402_1")
    ],
    "rnn_relu": [
        (
            "Le, Jaitly and Hinton 2015, A Simple Way to Initialize Recurrent Networks of "
            "Rectified Linear Units",
            "https://arxiv.org/abs/1504.00941",
        )
    ],
    "lstm": [
        _LSTM,
        (
            "Gers, Schmidhuber and Cummins 2000, Learning to Forget",
            "https://doi.org/10.1162/089976600300015015",
        ),
    ],
    "gru": [_GRU],
    "gru_reset_before": [_GRU],
    "peephole_lstm": [
        (
            "Gers, Schraudolph and Schmidhuber 2002, Learning Precise Timing with LSTM Recurrent "
            "Networks",
            "https://www.jmlr.org/papers/v3/gers02a.html",
        )
    ],
    "coupled_lstm": [
        ("Greff et al. 2017, LSTM: A Search Space Odyssey", "https://arxiv.org/abs/1503.04069")
    ],
    "slstm": [
        (
            "Beck et al. 2024, xLSTM: Extended Long Short-Term Memory",
            "https://arxiv.org/abs/2405.04517",
        )
    ],
    "mgu": [
        (
            "Zhou et al. 2016, Minimal Gated Unit for Recurrent Neural Networks",
            "https://arxiv.org/abs/1603.09420",
        ),
        (
            "Heck and Salem 2017, Simplified Minimal Gated Unit Variations for Recurrent Neural "
            "Networks",
            "https://arxiv.org/abs/1701.03452",
        ),
    ],
}
