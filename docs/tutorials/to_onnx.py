r"""
To ONNX, and back
=================

A model with our layers goes to ONNX by torch's own exporter. LSTM, GRU and RNN become ONNX's nodes
of these names, which every runtime knows; other cells become Scans. This tutorial exports a tagger
with lengths, runs it in ONNX Runtime for other sizes, and reads the layer back.

It needs ``pip install '.[onnx]'``.
"""

import tempfile
import warnings
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import torch

import openrnn

torch.manual_seed(0)
warnings.simplefilter("ignore")  # those of torch's exporter
folder = Path(tempfile.mkdtemp())

# %%
# The model
# ---------
#
# Words come in a padded batch with their lengths. The layer is bidirectional, so lengths matter:
# the reverse direction must start at each true end.


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 32)
        self.rnn = openrnn.LSTM(32, 48, bidirectional=True)
        self.head = torch.nn.Linear(96, 7)

    def forward(self, words, lengths):
        y, _ = self.rnn(self.embed(words), lengths=lengths)
        return self.head(y)


model = Tagger().eval()

# %%
# Export
# ------
#
# Nothing of ours has to be registered. ``dynamic_shapes`` says which sizes may change: steps and
# sequences, of both inputs. Put the model into ``eval`` mode first, as dropout is refused.

words, lengths = torch.randint(1000, (20, 3)), torch.tensor([20, 4, 11])
program = torch.onnx.export(
    model,
    (words, lengths),
    dynamo=True,
    dynamic_shapes=({0: "T", 1: "B"}, {0: "B"}),
    verbose=False,
)
program.save(folder / "tagger.onnx")

nodes = Counter(node.op_type for node in onnx.load(folder / "tagger.onnx").graph.node)
print(dict(nodes))

# %%
# There is one LSTM node, with both directions and the lengths, and no loop.
#
# Run it elsewhere
# ----------------

session = onnxruntime.InferenceSession(folder / "tagger.onnx", providers=["CPUExecutionProvider"])
print([(each.name, each.shape) for each in session.get_inputs()])

words, lengths = torch.randint(1000, (50, 8)), torch.randint(1, 51, (8,))
names = [each.name for each in session.get_inputs()]
[found] = session.run(None, dict(zip(names, (words.numpy(), lengths.numpy()), strict=True)))
with torch.no_grad():
    apart = (torch.from_numpy(found) - model(words, lengths)).abs().max()
print(f"50 steps, 8 sequences: ONNX Runtime and our layer differ by at most {apart:.0e}")
assert apart < 1e-5

# %%
# What becomes a Scan
# -------------------
#
# A cell that ONNX does not have, resets, projections and clip are written as a Scan over the steps
# of the cell. It runs everywhere, but operator by operator.


class Resets(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = openrnn.GRU(8, 16)

    def forward(self, x, starts):
        return self.rnn(x, reset=starts)[0]


policy = Resets().eval()
x, starts = torch.randn(12, 2, 8), torch.rand(12, 2) < 0.2
scan = torch.onnx.export(policy, (x, starts), dynamo=True, verbose=False)
print(dict(Counter(node.op_type for node in scan.model_proto.graph.node)))

# %%
# Back
# ----
#
# ``from_onnx`` makes a layer of each LSTM, GRU and RNN node of a file, from whatever tool, and
# finds weights, initial states and lengths that are constants of the graph. The layers can be
# trained.

[(name, imported)] = openrnn.from_onnx(folder / "tagger.onnx").items()
print(name, "->", imported.layer)
for ours, theirs in zip(model.rnn.parameters(), imported.layer.parameters(), strict=True):
    assert torch.equal(ours, theirs)

# %%
# Which cell becomes which node, what differs between runtimes, and what is refused is in
# :doc:`ONNX </onnx>`.
