"""stanza's part-of-speech tagger: packed characters of words, and packed words of sentences.

The tagger has two recurrent parts, an LSTM over the characters of each word and a bidirectional
highway LSTM over words. Both get `PackedSequence`s, which our layers take as torch's do. Sizes
are stanza's defaults; sentences and weights are random.

    make example NAME=stanza_tagger
"""

import torch
from converted import converted, passes
from stanza.models.pos.model import Tagger
from torch import Tensor, nn

SENTENCES = 10  # about 250 words, as in stanza's training
SIZES = {"word": 5000, "char": 100, "upos": 18, "xpos": 50, "feats": 40}
DEFAULTS = {
    "hidden_dim": 200, "char_hidden_dim": 400, "deep_biaff_hidden_dim": 400,
    "composite_deep_biaff_hidden_dim": 100, "word_emb_dim": 75, "char_emb_dim": 100,
    "tag_emb_dim": 50, "transformed_dim": 125, "num_layers": 2, "char_num_layers": 1,
    "word_dropout": 0.33, "dropout": 0.5, "rec_dropout": 0, "char_rec_dropout": 0,
    "char": True, "pretrain": False,
}  # fmt: skip


def numbers(lengths: list[int], most: int) -> Tensor:
    """Rows of random numbers, zeros behind the end of each."""
    rows = [torch.randint(2, most, (length,)) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def batch() -> dict[str, object]:
    """Sentences of 5 to 40 words of 1 to 14 letters, the longest first, as stanza's loader does."""
    words = torch.randint(5, 41, (SENTENCES,)).sort(descending=True)[0].tolist()
    letters, order = torch.randint(1, 15, (sum(words),)).sort(descending=True)
    characters = numbers(letters.tolist(), SIZES["char"])
    return {
        "word": numbers(words, SIZES["word"]), "word_mask": None,
        "wordchars": characters, "wordchars_mask": characters == 0,
        "tags": [numbers(words, SIZES[column]) for column in ("upos", "xpos", "feats")],
        "pretrained": None, "word_orig_idx": order.tolist(), "sentlens": words,
        "wordlens": letters.tolist(), "text": None,
    }  # fmt: skip


def main() -> None:
    """Compares the whole tagger."""
    torch.manual_seed(0)
    model = Tagger(DEFAULTS, {name: range(size) for name, size in SIZES.items()})
    for weight in model.parameters():
        if not weight.any():  # classifiers begin at 0, and so would their gradients
            nn.init.normal_(weight, std=0.1)
    data = batch()

    def run(model: nn.Module) -> Tensor:
        return model(**data)[0]

    title = f"{SENTENCES} sentences, {sum(data['sentlens'])} words"
    passes(f"stanza's tagger, {title}", converted(model), run, run)


if __name__ == "__main__":
    main()
