"""An LSTM for audio in a C program: exported, linked with `native.c`, and timed beside plain loops.

    python examples/native.py --units 40

Needs a C compiler. Prints samples a second of both, and how far their results are apart.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import openrnn

HERE = Path(__file__).parent
PLAIN = """
#include <math.h>
enum {{ I = 1, H = {units} }};
static const float w_ih[4 * H][I] = {{{w_ih}}};
static const float w_hh[4 * H][H] = {{{w_hh}}};
static const float bias[4 * H] = {{{bias}}};

static float sigmoid(float z) {{ return 1 / (1 + expf(-z)); }}

static void plain_lstm(const float *x, float *y, long steps) {{
    float h[H] = {{0}}, c[H] = {{0}}, g[4 * H];
    for (long t = 0; t < steps; ++t, x += I, y += H) {{
        for (int row = 0; row < 4 * H; ++row) {{
            g[row] = bias[row];
            for (int k = 0; k < I; ++k) g[row] += w_ih[row][k] * x[k];
            for (int k = 0; k < H; ++k) g[row] += w_hh[row][k] * h[k];
        }}
        for (int u = 0; u < H; ++u) {{
            c[u] = sigmoid(g[H + u]) * c[u] + sigmoid(g[u]) * tanhf(g[2 * H + u]);
            y[u] = h[u] = sigmoid(g[3 * H + u]) * tanhf(c[u]);
        }}
    }}
}}
"""


def plain(layer: openrnn.LSTM) -> str:
    """The layer as a reader of its equations would write it in C."""
    w_ih, w_hh, b_ih, b_hh = (parameter.detach().flatten() for parameter in layer.parameters())

    def numbers(values: torch.Tensor) -> str:
        return ", ".join(f"{value:.9g}f" if "." in f"{value:.9g}" or "e" in f"{value:.9g}"
                         else f"{value:.1f}f" for value in values.tolist())  # fmt: skip

    return PLAIN.format(
        units=layer.hidden_size, w_ih=numbers(w_ih), w_hh=numbers(w_hh), bias=numbers(b_ih + b_hh)
    )


def main() -> None:
    """Exports, compiles, runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=40)
    options = parser.parse_args()
    if shutil.which("cc") is None:
        print("native.py needs a C compiler: cc is not here")
        return
    torch.manual_seed(0)
    layer = openrnn.LSTM(1, options.units)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        openrnn.export_native(layer, folder / "amp")
        (folder / "plain_lstm.h").write_text(plain(layer))
        program = folder / "native"
        subprocess.run(
            ["cc", "-O3", "-ffast-math", "-march=native", "-I", folder,
             HERE / "native.c", folder / "amp.o", "-o", program, "-lm"], check=True,
        )  # fmt: skip
        print(f"LSTM with {options.units} units, float32, one core", flush=True)
        subprocess.run([program], check=True)


if __name__ == "__main__":
    main()
