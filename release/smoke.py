"""A smoke test of an installed featherbed: python release/smoke.py base|fast|train|compress|hf."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import featherbed as fb

ROOT = Path(__file__).resolve().parent.parent


def command(*words):
    program = Path(sys.executable).parent / "featherbed"
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def base():
    assert command("--version").split()[1] == fb.__version__ == version("featherbed")
    assert str(ROOT) not in fb.__file__, "not the installed package"
    for path in sorted((ROOT / "tests" / "golden" / "version1").glob("*.safetensors")):
        packed = fb.load(path)
        assert packed[[0, len(packed) - 1]].shape == (2, packed.dim)
        fb.check(path)
    command("inspect", path)
    assert "torch" not in sys.modules
    try:
        _ = fb.AnchorTable
    except fb.MissingExtra as error:
        assert 'pip install "featherbed[train]"' in str(error)


def fast():
    base()
    path = next((ROOT / "tests" / "golden" / "version1").glob("*.safetensors"))
    packed = fb.load(path)
    packed[np.zeros(10_000, np.int64)]
    assert "numba" in sys.modules


def train():
    import torch

    table = fb.AnchorTable(1000, 16, anchors=8, slots=2)
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-5)})
    table(torch.arange(100)).square().mean().backward()
    optimizer.step()
    fb.save(table, "table.safetensors")
    assert np.allclose(fb.load("table.safetensors")[:], table.weight.detach().numpy(), atol=1e-6)
    command("search", "table.safetensors", 3)


def compress():
    rows = np.random.default_rng(0).normal(size=(500, 16)).astype(np.float32)
    np.save("rows.npy", rows)
    command("compress", "rows.npy", "--ratio", 4, "--out", "rows.safetensors", "--effort", "quick")
    command("gate", "rows.safetensors", "--against", "rows.npy", "--recall", 0.3)


def hf():
    import transformers

    sizes = {"vocab_size": 500, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    fb.compress_model(model, ratio=4, method="int4")
    model.save_pretrained("small")
    assert fb.load_model("small").num_parameters() > 0


if __name__ == "__main__":
    {"base": base, "fast": fast, "train": train, "compress": compress, "hf": hf}[sys.argv[1]]()
