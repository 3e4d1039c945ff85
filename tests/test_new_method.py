"""A new method touches four files: its table, its codec, one line of the public list, its page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = '''
"""Half: every row is stored in half precision."""

import torch

from featherbed.codecs.half import HalfCodec
from featherbed.packed.band import Band
from featherbed.packed.band import Identity
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import codec_job
from featherbed.tables.rows import empty_parameter, encode
from featherbed.tables.table import Table


class HalfTable(Table):
    """row(i) = scale E[i]."""

    example = {"scale": 2.0}

    def __init__(self, num_embeddings, embedding_dim, *, scale=1.0, padding_idx=None, generator=None,
                 dtype=None, device=None):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.scale = scale
        self.atoms = empty_parameter((num_embeddings, embedding_dim), dtype, device)
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator=None):
        self.atoms.normal_(generator=generator)

    def codes(self, ids):
        return Codes(ids[..., None], None, self.scale * self.atoms)

    def bands(self, values, dictionary, layout):
        rows = encode(self.scale * self.atoms, dictionary)
        return [Band(self.num_embeddings, Identity(), dictionary=rows)]

    def parameter_count(self):
        return self.atoms.numel()

    def fit_dense(self, matrix, weights=None):
        fit = HalfCodec().fit(codec_job(matrix, weights, "HalfTable.from_dense"))
        self.atoms.copy_(torch.from_numpy(fit.bands()[0].dictionary.dense()) / self.scale)
'''
CODEC = '''
"""Half: every row in half precision."""

import numpy as np

from featherbed.codecs.codec import Codec, FinalFit, matrix_size
from featherbed.packed.band import Band
from featherbed.packed.band import Identity
from featherbed.packed.matrix import Matrix


class HalfCodec(Codec):
    """Rows as float16."""

    name = "half"

    def size(self, rows, dim, **settings):
        return matrix_size("float16", rows, dim)

    def settings(self, rows, dim, budget, rank):
        return [{}] if self.size(rows, dim) <= budget else []

    def fit(self, job, **settings):
        rows = np.concatenate([block for _, block in job.rows.blocks()])
        return FinalFit([Band(len(rows), Identity(), dictionary=Matrix.encode(rows, "float16"))])


CODECS = (HalfCodec(),)
'''
PAGE = """
# Half precision: `fb.HalfTable`

## What

Every row is stored in half precision.

## Formula

```text
row(i) = scale E[i]
```

## When

A first step before anything else is tried.

## Example

```python
import torch
import featherbed as fb

assert fb.HalfTable(100, 8, scale=2.0)(torch.tensor([3])).shape == (1, 8)
```

## Size

V d numbers.

## Reference

None: a method that tests the house.
"""
USE = """
import numpy as np, torch
import featherbed as fb
from featherbed.tables import HalfTable
from featherbed.tables.spec import METHODS
from featherbed.testing import check_table

assert "HalfTable" in fb.__all__ and fb.HalfTable is HalfTable and HalfTable in METHODS
check_table(lambda **settings: HalfTable(50, 8, scale=2.0, **settings))
assert fb.make_table("half:scale=3.0", 50, 8).scale == 3.0
matrix = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
packed = fb.compress(matrix, ratio=1.5, method="half")
np.testing.assert_allclose(packed[np.arange(2000)], matrix, atol=2e-3)
assert packed.made_by["method"] == "half", packed.made_by
near = HalfTable.from_dense(torch.from_numpy(matrix)).weight.detach().numpy()
np.testing.assert_allclose(near, matrix, atol=2e-3)
model = torch.nn.Sequential(torch.nn.Embedding(50, 8))
fb.replace_embeddings(model, "half")
assert isinstance(model[0], HalfTable)
try:
    fb.compress(matrix, ratio=2, method="third")
except fb.ArgumentError as error:
    assert "use auto" in str(error)
"""


def test_a_new_method_touches_four_files(tmp_path):
    for part in ("src/featherbed", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.nb*")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    pages = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    for part in (*pages, "tests/test_docs.py"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, tmp_path / part)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    package = tmp_path / "src" / "featherbed"
    (package / "tables" / "half.py").write_text(TABLE.lstrip())
    (package / "codecs" / "half.py").write_text(CODEC.lstrip())
    (tmp_path / "docs" / "tables" / "half.md").write_text(PAGE.lstrip())
    with (package / "tables" / "__init__.pyi").open("a") as public:
        public.write("from featherbed.tables.half import HalfTable as HalfTable\n")
    after = {path for path in tmp_path.rglob("*.*") if path.is_file()}
    changed = {str(p.relative_to(tmp_path)) for p in after if p.read_bytes() != before.get(p)}
    assert changed == {
        "src/featherbed/tables/half.py",
        "src/featherbed/codecs/half.py",
        "src/featherbed/tables/__init__.pyi",
        "docs/tables/half.md",
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "FEATHERBED_KERNELS": "numpy"}
    pages = ["tests/test_docs.py", "-k", "half or behavior or public_name"]
    for command in (["-c", USE], ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir=.", *pages]):
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
