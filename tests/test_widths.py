"""The CPU backend with narrower vectors than this machine has, in processes told to compile so."""

import os
import platform
import subprocess
import sys

import pytest
import torch

import openrnn
from openrnn.kernels.cpu import host

# of each width: a processor that has it and no more, and what it lacks of this machine's features
LESSER = {
    32: ("haswell", ("avx512", "avx10", "evex")),
    16: (
        "nehalem",
        ("avx", "evex", "fma", "vaes", "vpclmul", "gfni", "f16c", "xop", "sha512", "sm"),
    ),
}
# a process that begins so believes to be on that processor, and tells those that compile for it
BEGIN = """
import llvmlite.binding as llvm
features = llvm.get_host_cpu_features()
features.update((name, False) for name in features if name.startswith({lacks}))
llvm.get_host_cpu_features, llvm.get_host_cpu_name = (lambda: features), (lambda: {name!r})
"""
# H, T, B, threads: no whole vector; several; tiles that threads share; with lengths and with resets
CALLS = ((5, 4, 3, 1), (37, 6, 9, 2), (256, 3, 1, 2))


def told(width, home, program):
    """What a program prints in a process with vectors of so many bytes."""
    if width >= host.WIDTH:
        pytest.skip(f"this machine has vectors of {host.WIDTH} bytes: all other tests run them")
    name, lacks = LESSER[width]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(name=name, lacks=lacks) + program],
        cwd=os.path.dirname(__file__),
        env={
            **os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare():
    """Runs the calls on both backends, gradients included; what a child process does."""
    for hidden, steps, batch, threads in CALLS:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        ours, plain = (openrnn.RNN(7, hidden, 2, backend=name) for name in ("cpu", "reference"))
        plain.load_state_dict(ours.state_dict())
        x = torch.randn(steps, batch, 7)
        h = torch.randn(2, batch, hidden)
        lengths = torch.arange(batch) % (steps + 1)
        reset = torch.rand(steps, batch) < 0.3
        for more in ({}, {"lengths": lengths}, {"reset": reset}):
            found, wanted = (outcome(layer, x, h, more) for layer in (ours, plain))
            for have, want in zip(found, wanted):
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def outcome(layer, x, h, more):
    leaves = [x.clone().requires_grad_(), h.clone().requires_grad_()]
    y, final = layer(*leaves, **more)
    weights = [torch.linspace(-1, 1, each.numel()).view(each.shape) for each in (y, final)]
    total = (y * weights[0]).sum() + (final * weights[1]).sum()
    return [y, final, *torch.autograd.grad(total, [*leaves, *layer.parameters()])]


x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="other processors have vectors of 16 bytes",
)


@x86
@pytest.mark.slow
@pytest.mark.parametrize("width", LESSER)
def test_a_network_and_products_in_narrower_vectors(width, tmp_path):
    program = (
        "import test_widths as t; t.compare(); print(t.host.WIDTH, t.host.LANES);"
        "import test_bf16 as t; t.check_narrower();"
        "import test_pairs as t; t.check_narrower();"
        "import test_call_16bit as t; t.check_narrower();"
        "import test_kernels as t; t.check_narrower(); print(t.LANES['float32'])"
    )
    lanes = {"float32": width // 4, "float64": width // 8}
    assert told(width, tmp_path, program) == f"{width} {lanes}\n{width // 4}\n"
