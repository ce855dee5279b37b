"""Silero's voice detector over a whole recording: one call of a layer in place of 1,875 steps.

The model is TorchScript, which `convert` leaves as it is, and has an `LSTMCell` that is called
once for each 32 ms. Its weights become those of a layer; what stands before and behind it is
independent of time, and runs on all pieces at once. Weights are Silero's, sound is synthetic.

    make example NAME=silero_vad_offline
"""

import torch
from compare import compare
from silero_vad import load_silero_vad
from torch import Tensor, nn

import openrnn

RATE, PIECE, CONTEXT, SECONDS = 16_000, 512, 64, 60


def sound() -> Tensor:
    """Noise, and a buzz that comes and goes like syllables."""
    t = torch.arange(RATE * SECONDS) / RATE
    voiced = (torch.sin(2 * torch.pi * 3 * t) > 0) & (t % 10 > 4)
    buzz = sum(torch.sin(2 * torch.pi * 120 * k * t) / k for k in range(1, 20))
    return 0.01 * torch.randn(len(t)) + 0.2 * buzz * voiced


def layer_of(cell: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A layer with the weights of a cell."""
    made = kind(cell.weight_ih.shape[1], cell.weight_hh.shape[1])
    made.load_state_dict({f"{name}_l0": weight for name, weight in cell.named_parameters()})
    return made


def piece_by_piece(model: nn.Module, audio: Tensor) -> Tensor:
    """As it is used: the model keeps its states and the end of the last piece."""
    model.reset_states()
    return torch.cat([model(piece[None], RATE) for piece in audio.split(PIECE)]).flatten()


def at_once(model: nn.Module, layer: nn.Module, audio: Tensor) -> Tensor:
    """All pieces, each with the end of the one before."""
    parts = model._model  # of 16 kHz
    pieces = nn.functional.pad(audio, (CONTEXT, 0)).unfold(0, CONTEXT + PIECE, PIECE)
    features = parts.encoder(parts.stft(pieces))  # (T, 128, 1)
    h, _ = layer(features.squeeze(-1))
    return parts.decoder.decoder(h.unsqueeze(-1)).flatten()


@torch.no_grad()
def main() -> None:
    """Compares the chance of speech in each piece."""
    torch.manual_seed(0)
    model, audio = load_silero_vad(), sound()
    audio = audio[: len(audio) // PIECE * PIECE]
    cell = model._model.decoder.rnn
    ours, theirs = layer_of(cell, openrnn.LSTM), layer_of(cell, nn.LSTM)
    found = at_once(model, ours, audio)
    print(f"{len(found)} pieces, {(found > 0.5).sum()} with speech, {found.max():.2f} at most")
    ways = {
        "piece by piece": lambda: piece_by_piece(model, audio),
        "at once, torch.nn.LSTM": lambda: at_once(model, theirs, audio),
        "at once, openrnn.LSTM": lambda: at_once(model, ours, audio),
    }
    compare(f"{SECONDS} s of sound", ways, within=1e-4)
    features = torch.randn(len(found), 128)
    layers = {"torch.nn.LSTM": theirs, "openrnn.LSTM": ours}
    calls = {name: lambda layer=layer: layer(features)[0] for name, layer in layers.items()}
    compare(f"the layer alone, T {len(found)}, B 1, H 128", calls)


if __name__ == "__main__":
    main()
