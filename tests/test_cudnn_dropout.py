"""cuDNN's dropout: its own masks, kept from call to call or begun anew, right gradients."""

import pytest
import torch
from cases import require

import openrnn
from openrnn import ops

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    require("cudnn")


def layer(**options):
    torch.manual_seed(0)
    return openrnn.LSTM(
        8, 64, 2, dropout=0.4, device="cuda", dtype=torch.float64, backend="cudnn", **options
    )


def test_states_go_on_from_call_to_call():
    lstm, x = layer(), torch.randn(5, 3, 8, device="cuda", dtype=torch.float64)
    assert not torch.equal(lstm(x)[0], lstm(x)[0])
    lstm.eval()
    assert torch.equal(lstm(x)[0], lstm(x)[0])


def test_reset_repeats_with_the_generator():
    lstm, x = layer(reset_dropout_state=True), torch.randn(5, 3, 8, device="cuda").double()
    torch.manual_seed(3)
    first, second = lstm(x)[0], lstm(x)[0]
    torch.manual_seed(3)
    assert torch.equal(lstm(x)[0], first)
    assert torch.equal(lstm(x)[0], second)
    assert not torch.equal(first, second)


def test_a_seed_has_states_of_its_own():
    """As TensorFlow kept them: the same seed goes on, another begins, reset begins again."""
    x = torch.randn(5, 3, 8, device="cuda")
    outs = {}
    for reset in (False, True):
        spec = ops.spec("gru", 8, 32, 2, dropout=0.5, reset_dropout_state=reset)
        flat = torch.ones(ops.params_size(spec), device="cuda") / 10
        outs[reset] = [
            ops.forward(x, flat, spec, seed=seed, backend="cudnn").y for seed in (11, 11, 12)
        ]
    kept, begun = outs[False], outs[True]
    assert torch.equal(kept[0], begun[0])
    assert torch.equal(begun[0], begun[1])
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(begun[0], begun[2])


@pytest.mark.parametrize("lengths", [None, [5, 0, 2]])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_belong_to_the_masks(bidirectional, lengths):
    """With the masks held, numerical and analytical gradients are the same."""
    torch.manual_seed(0)
    rnn = openrnn.GRU(
        3, 4, 2, dropout=0.5, bidirectional=bidirectional, device="cuda", dtype=torch.float64,
        backend="cudnn", reset_dropout_state=True,
    )  # fmt: skip
    x = torch.randn(5, 3, 3, device="cuda", dtype=torch.float64, requires_grad=True)
    ends = None if lengths is None else torch.tensor(lengths)

    def call(x, *_):
        torch.manual_seed(5)
        return rnn(x, lengths=ends)

    assert torch.autograd.gradcheck(call, (x, *rnn.parameters()))


def test_a_share_falls_and_the_rest_is_scaled():
    """With a relu network of identity matrices, y counts what was kept."""
    rnn = openrnn.RNN(
        1, 1, 2, nonlinearity="relu", bias=False, dropout=0.25, device="cuda", backend="cudnn",
        dtype=torch.float64,
    )  # fmt: skip
    for name, weight in rnn.named_parameters():
        torch.nn.init.constant_(weight, float("ih" in name))
    y = rnn(torch.ones(100, 1000, 1, device="cuda", dtype=torch.float64))[0]
    values, counts = y.unique(return_counts=True)
    torch.testing.assert_close(values.cpu(), torch.tensor([0, 4 / 3], dtype=torch.float64))
    assert abs(counts[0].item() / y.numel() - 0.25) < 0.01


def test_without_gradients_training_drops_too():
    lstm, x = layer(), torch.ones(5, 3, 8, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        assert not torch.equal(lstm(x)[0], lstm(x)[0])
