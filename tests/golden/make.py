"""Write the golden files of the current format version. Once a version is frozen its files are never made again."""

import json
from pathlib import Path

import torch

import featherbed as fb

HERE = Path(__file__).parent


def seed(number):
    return torch.Generator().manual_seed(number)


def main():
    anchors = fb.AnchorTable(20, 4, anchors=6, generator=seed(0))
    with torch.no_grad():
        anchors.transform *= torch.rand(20, 6, generator=seed(1)) > 0.6
    tables = {
        "ragged": (anchors.pack(layout="ragged"), [f"key {i}" for i in range(20)]),
        "fixed": (anchors.pack(values="int8", dictionary="float16", layout="fixed"), None),
        "every": (fb.LowRankTable(20, 4, rank=2, padding_idx=3, generator=seed(2)).pack(), None),
        "identity": (fb.DenseTable(20, 4, generator=seed(3)).pack(dictionary="float16"), None),
        "levels": (fb.QuantizedTable(20, 5, bits=3, scales="column", generator=seed(4)).pack(), None),
        "hashed": (fb.HashedTable(20, 4, buckets=7, values="learnt", generator=seed(5)).pack(), None),
        "remainder": (fb.RemainderTable(20, 4, divisor=6, generator=seed(6)).pack(), None),
        "bands": (fb.SelectedTable(20, 4, keep=5, rest=2, counts=torch.arange(20) % 7, generator=seed(7)).pack(), None),
    }
    rows = {}
    for name, (packed, keys) in tables.items():
        fb.save(packed, HERE / f"{name}.safetensors", keys=keys)
        rows[name] = packed[:].tolist()
    (HERE / "version0.json").write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
