"""Makes the files beside it: weights of other libraries, and what they computed with them.

    python make.py keras tf_keras tensorflow flax equinox jax onnx xlstm flashrnn
    python make.py mxnet

The first line ran on Python 3.11 with keras 3.15.1, tf_keras 2.21.0, tensorflow-cpu 2.21.0, jax
0.10.2, flax 0.12.8, equinox 0.13.8, onnx 1.23.2, onnxruntime 1.32.0, torch 2.13.0, xlstm 2.0.6 and
flashrnn 1.0.8; the second with mxnet 1.9.1 and numpy 1.23.5. Both need safetensors.

A file has x (T, B, I) and, for each case, CASE:w:NAME for the arrays as the library names them,
CASE:y (T, B, D*H), where the library gives them CASE:h and CASE:c, (L*D, B, H), and CASE:x where it
is another. gru_both.keras is the model of that case in Keras, as Keras saved it.
"""

import os
import sys
import zipfile
from pathlib import Path

import numpy as np

KERAS = ("lstm", "gru", "gru_reset_before", "lstm_no_bias", "rnn_tanh", "rnn_relu")
STEPS, BATCH, INPUT, HIDDEN = 5, 2, 3, 4
GENERATOR = np.random.default_rng(7)
X = np.random.default_rng(8).normal(size=(STEPS, BATCH, INPUT)).astype(np.float32)


def draw(*shape):
    return GENERATOR.normal(size=shape, scale=0.5).astype(np.float32)


def case(name, weights, **results):
    """The entries of one case."""
    made = {f"{name}:w:{key}": np.asarray(value) for key, value in weights.items()}
    return made | {f"{name}:{key}": np.asarray(value) for key, value in results.items()}


def time_major(y):
    return np.swapaxes(np.asarray(y), 0, 1)


def _keras_like(keras, named, names):
    """Stacks of keras or of tf_keras, with every number of the weights drawn."""
    layers = keras.layers
    kinds = {
        "lstm": lambda: layers.LSTM(HIDDEN, return_sequences=True),
        "lstm_no_bias": lambda: layers.LSTM(HIDDEN, return_sequences=True, use_bias=False),
        "gru": lambda: layers.GRU(HIDDEN, return_sequences=True),
        "gru_reset_before": lambda: layers.GRU(HIDDEN, return_sequences=True, reset_after=False),
        "rnn_tanh": lambda: layers.SimpleRNN(HIDDEN, return_sequences=True),
        "rnn_relu": lambda: layers.SimpleRNN(HIDDEN, return_sequences=True, activation="relu"),
    }
    made = {}
    for name in names:
        kind = kinds[name]
        depth = 1 if name in KERAS[3:] or keras.__name__ == "tf_keras" else 2
        both = name != "rnn_tanh"
        stack = [layers.Bidirectional(kind()) if both else kind() for _ in range(depth)]
        model = keras.Sequential([keras.Input((None, INPUT)), *stack])
        model.set_weights([draw(*array.shape) for array in model.get_weights()])
        weights = {named(weight): weight.numpy() for weight in model.weights}
        y = time_major(model(time_major(X)))
        made |= case(name + "_both" * both, weights, y=y)
        if name == "gru" and keras.__name__ == "keras":
            save(model)
    return made, layers


def save(model):
    """The file that Keras writes, compressed."""
    place = Path(__file__).with_name("gru_both.keras")
    model.save(place)
    with zipfile.ZipFile(place) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def keras():
    import keras

    made, layers = _keras_like(keras, lambda weight: weight.path, KERAS)
    layer = layers.LSTM(HIDDEN, return_sequences=True, return_state=True)
    layer.build((BATCH, STEPS, INPUT))
    layer.set_weights([draw(*array.shape) for array in layer.get_weights()])
    mask = np.arange(STEPS) < np.array([[5], [3]])
    y, h, c = layer(time_major(X), mask=mask)
    weights = {weight.path: weight.numpy() for weight in layer.weights}
    made |= case("masked", weights, y=time_major(y), h=h[None], c=c[None])
    layer = layers.GRU(HIDDEN, return_sequences=True, return_state=True, go_backwards=True)
    layer.build((BATCH, STEPS, INPUT))
    layer.set_weights([draw(*array.shape) for array in layer.get_weights()])
    y, h = layer(time_major(X))  # y in the order of its steps
    weights = {weight.path: weight.numpy() for weight in layer.weights}
    return made | case("gru_backwards", weights, y=time_major(y)[::-1], h=h[None])


def tf_keras():
    import tf_keras

    return _keras_like(tf_keras, lambda weight: weight.name, KERAS[:3])[0]


def tensorflow():
    import tensorflow as tf

    kernel, bias, zeros = draw(INPUT + HIDDEN, 4 * HIDDEN), draw(4 * HIDDEN), np.zeros(HIDDEN, "f")
    state = np.zeros((BATCH, HIDDEN), np.float32)
    _, cs, _, _, _, _, h = tf.raw_ops.BlockLSTM(
        seq_len_max=STEPS, x=X, cs_prev=state, h_prev=state, w=kernel, wci=zeros, wcf=zeros,
        wco=zeros, b=bias, forget_bias=0.0, cell_clip=0.0, use_peephole=False,
    )  # fmt: skip
    weights = {"cell_0/cudnn_compatible_lstm_cell/kernel": kernel,
               "cell_0/cudnn_compatible_lstm_cell/bias": bias}  # fmt: skip
    return case("lstm", weights, y=h, h=h[-1:], c=cs[-1:])


def flax():
    import flax
    import jax
    from flax import linen, nnx

    made = {}
    for name, kind in (
        ("lstm", linen.OptimizedLSTMCell),
        ("lstm_plain", linen.LSTMCell),
        ("gru", linen.GRUCell),
        ("rnn_tanh", linen.SimpleCell),
    ):
        both = name in ("lstm", "gru")
        net = linen.RNN(kind(HIDDEN))
        if both:
            net = linen.Bidirectional(net, linen.RNN(kind(HIDDEN)))
        tree = net.init(jax.random.PRNGKey(0), time_major(X))
        tree = jax.tree_util.tree_map(lambda leaf: draw(*leaf.shape), tree)
        weights = {"/".join(k): v for k, v in flax.traverse_util.flatten_dict(tree).items()}
        y = time_major(net.apply(tree, time_major(X)))
        made |= case(name + "_both" * both, weights, y=y)
    for name, kind in (
        ("nnx_lstm", nnx.OptimizedLSTMCell),
        ("nnx_lstm_plain", nnx.LSTMCell),
        ("nnx_gru", nnx.GRUCell),
        ("nnx_rnn_tanh", nnx.SimpleCell),
    ):
        net = nnx.RNN(kind(INPUT, HIDDEN, rngs=nnx.Rngs(0)))
        state = jax.tree_util.tree_map(lambda leaf: draw(*leaf.shape), nnx.state(net, nnx.Param))
        nnx.update(net, state)
        tree = flax.traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(net, nnx.Param)))
        weights = {"/".join(key): value for key, value in tree.items()}
        made |= case(name, weights, y=time_major(net(time_major(X))))
    return made


def equinox():
    import equinox
    import jax

    made = {}
    for kind, cell in (("lstm", equinox.nn.LSTMCell), ("gru", equinox.nn.GRUCell)):
        for bias in (True, False):
            own = cell(INPUT, HIDDEN, use_bias=bias, key=jax.random.PRNGKey(0))
            arrays = equinox.filter(own, equinox.is_array)
            arrays = jax.tree_util.tree_map(lambda leaf: draw(*leaf.shape), arrays)
            own = equinox.combine(arrays, own)
            ys = []
            for batch in range(BATCH):
                h = np.zeros(HIDDEN, np.float32)
                state = (h, h) if kind == "lstm" else h
                for step in range(STEPS):
                    state = own(X[step, batch], state)
                    ys.append(state[0] if kind == "lstm" else state)
            y = time_major(np.array(ys).reshape(BATCH, STEPS, HIDDEN))
            names = ("weight_ih", "weight_hh", "bias", "bias_n")
            weights = {name: getattr(own, name, None) for name in names}
            weights = {name: array for name, array in weights.items() if array is not None}
            made |= case(kind + "_no_bias" * (not bias), weights, y=y)
    return made


def jax():
    from jax.experimental import rnn

    made = {}
    for layers, both in ((1, False), (2, True)):
        sizes = {"input_size": INPUT, "hidden_size": HIDDEN, "num_layers": layers,
                 "bidirectional": both}  # fmt: skip
        params = draw(rnn.get_num_params_in_lstm(**sizes))
        state = np.zeros((layers * (1 + both), BATCH, HIDDEN), np.float32)
        parts = rnn.unpack_lstm_weights(params, **sizes)
        lengths = np.full(BATCH, STEPS, np.int32)
        y, h, c = rnn.lstm_ref(time_major(X), state, state, *parts, lengths, **sizes, dropout=0.0)
        made |= case("lstm" + "_both" * both, {"params": params}, y=time_major(y), h=h, c=c)
    return made


def onnx():
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    made = {}
    rows = [
        ("lstm", "LSTM", 4, {}),
        ("peephole_lstm", "LSTM", 4, {}),
        ("gru", "GRU", 3, {"linear_before_reset": 1}),
        ("gru_reset_before", "GRU", 3, {}),
        ("rnn_tanh", "RNN", 1, {}),
        ("rnn_relu", "RNN", 1, {}),
    ]
    for name, kind, gates, options in rows:
        for both in (False, True) if name == "lstm" else (True,):
            directions = 1 + both
            wide = gates * HIDDEN
            weights = {"W": draw(directions, wide, INPUT), "R": draw(directions, wide, HIDDEN),
                       "B": draw(directions, 2 * wide)}  # fmt: skip
            names = ["x", "W", "R", "B"]
            if name == "peephole_lstm":
                weights["P"] = draw(directions, 3 * HIDDEN)
                names += ["", "", "", "P"]
            more = {"activations": ["Relu"] * directions} if name == "rnn_relu" else options
            node = helper.make_node(
                kind, names, ["y"], hidden_size=HIDDEN,
                direction="bidirectional" if both else "forward", **more,
            )  # fmt: skip
            graph = helper.make_graph(
                [node], "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
                [onnx.numpy_helper.from_array(array, key) for key, array in weights.items()],
            )  # fmt: skip
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)],
                                      ir_version=10)  # fmt: skip
            session = onnxruntime.InferenceSession(model.SerializeToString())
            (y,) = session.run(None, {"x": X})  # (T, D, B, H)
            y = np.moveaxis(y, 1, 2).reshape(STEPS, BATCH, -1)
            made |= case(name + "_both" * both, weights, y=y)
    return made


def xlstm():
    import torch
    from xlstm.blocks.slstm.cell import sLSTMCell_cuda, sLSTMCellConfig
    from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig

    made = {}
    for heads in (1, 2):
        layer = sLSTMLayer(sLSTMLayerConfig(
            embedding_dim=HIDDEN, num_heads=heads, backend="vanilla", conv1d_kernel_size=0,
        ))  # fmt: skip
        x = torch.from_numpy(draw(BATCH, STEPS, HIDDEN))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.from_numpy(draw(*parameter.shape)))
            gates = torch.cat(
                [gate(x) for gate in (layer.igate, layer.fgate, layer.zgate, layer.ogate)], -1
            )
            y, _ = layer.slstm_cell(gates)  # (B, heads, T, H / heads)
        weights = {key: value.detach().numpy() for key, value in layer.state_dict().items()
                   if "group_norm" not in key}  # fmt: skip
        y = y.permute(2, 0, 1, 3).reshape(STEPS, BATCH, HIDDEN)
        results = {"x": x.permute(1, 0, 2).contiguous(), "y": y}
        made |= case(f"slstm_{heads}", weights, **results)
        # the other backend keeps the same numbers in another order; to run it needs a GPU
        cuda = sLSTMCell_cuda(
            sLSTMCellConfig(hidden_size=HIDDEN, num_heads=heads), skip_backend_init=True
        )
        cell, prefix = layer.slstm_cell, "slstm_cell."
        kernel = cell._recurrent_kernel_int2ext(cell._recurrent_kernel_).detach()
        bias = cell._bias_int2ext(cell._bias_).detach()
        kernel, bias = cuda._recurrent_kernel_ext2int(kernel), cuda._bias_ext2int(bias)
        weights |= {f"{prefix}_recurrent_kernel_": kernel, f"{prefix}_bias_": bias}
        made |= case(f"slstm_cuda_{heads}", weights, **results)
    return made


def flashrnn():
    import torch
    from flashrnn import flashrnn as run

    made = {}
    for heads in (1, 2):
        for kind, gates in (("lstm", 4), ("gru", 3), ("elman", 1), ("slstm", 4)):
            wide = HIDDEN // heads
            weights = {"W": draw(gates * HIDDEN, INPUT), "R": draw(gates, heads, wide, wide),
                       "b": draw(4 if kind == "gru" else gates, heads, wide)}  # fmt: skip
            product = time_major(X @ weights["W"].T).reshape(BATCH, STEPS, gates, heads, wide)
            states, _ = run(
                torch.from_numpy(np.ascontiguousarray(product)), torch.from_numpy(weights["R"]),
                torch.from_numpy(weights["b"]), function=kind, backend="vanilla", dtype="float32",
            )  # fmt: skip
            y = states[0].detach().numpy().reshape(BATCH, STEPS, HIDDEN)
            name = {"elman": "rnn_tanh"}.get(kind, kind)
            made |= case(f"{name}_{heads}", weights, y=time_major(y))
    return made


def mxnet():
    import mxnet as mx

    made = {}
    rnn = mx.gluon.rnn
    kinds = {
        "lstm": lambda **more: rnn.LSTM(HIDDEN, 2, input_size=INPUT, **more),
        "gru": lambda **more: rnn.GRU(HIDDEN, 1, input_size=INPUT, **more),
        "rnn_relu": lambda **more: rnn.RNN(HIDDEN, 1, "relu", input_size=INPUT, **more),
        "rnn_tanh": lambda **more: rnn.RNN(HIDDEN, 2, "tanh", input_size=INPUT, **more),
        "projected": lambda **more: rnn.LSTM(
            HIDDEN, 2, input_size=INPUT, projection_size=2, **more
        ),
    }
    for name, kind in kinds.items():
        both = name[:3] != "rnn"
        layer = kind(bidirectional=both)
        layer.initialize()
        for parameter in layer.collect_params().values():
            parameter.set_data(mx.nd.array(draw(*parameter.shape)))
        weights = {k: v.data().asnumpy() for k, v in layer.collect_params().items()}
        made |= case("gluon_" + name + "_both" * both, weights, y=layer(mx.nd.array(X)).asnumpy())
    for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        both = mode == "lstm"
        depth = 2 if mode == "rnn_relu" else 1
        cell = mx.rnn.FusedRNNCell(HIDDEN, depth, mode, bidirectional=both, prefix=f"{mode}_")
        size = mx.sym.RNN(
            mx.sym.var("x"), mx.sym.var("w"), mx.sym.var("h"),
            *([mx.sym.var("c")] if mode == "lstm" else []), state_size=HIDDEN, num_layers=depth,
            bidirectional=both, mode=mode,
        ).infer_shape(x=X.shape)[0][1][0]  # fmt: skip
        flat = mx.nd.array(draw(size))
        state = mx.nd.zeros((depth * (1 + both), BATCH, HIDDEN))
        states = [state, state] if mode == "lstm" else [state]
        y = mx.nd.RNN(mx.nd.array(X), flat, *states, state_size=HIDDEN, num_layers=depth,
                      bidirectional=both, mode=mode)  # fmt: skip
        made |= case(f"fused_{mode}" + "_both" * both, {"parameters": flat.asnumpy()},
                     y=y.asnumpy())  # fmt: skip
        gates = cell.unpack_weights({f"{mode}_parameters": flat})
        weights = {key: value.asnumpy() for key, value in gates.items()}
        made |= case(f"cells_{mode}" + "_both" * both, weights, y=y.asnumpy())
    return made


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from safetensors.numpy import save_file

    for library in sys.argv[1:]:
        GENERATOR = np.random.default_rng(7)
        cases = {key: np.ascontiguousarray(value) for key, value in globals()[library]().items()}
        save_file({"x": X, **cases}, Path(__file__).with_name(f"{library}.safetensors"))
