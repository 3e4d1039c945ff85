"""Write the folder of hostile files: python tests/hostile/make.py (from the cases in tests/test_packed.py).

Each is a small file that breaks the specification in one way; ``test_packed.py`` refuses them all. They are kept so that other
readers of the format can be tried on them too.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import test_packed as cases  # noqa: E402


def name_of(words):
    return "".join(c if c.isalnum() else "-" for c in words) + ".safetensors"


def main():
    for old in HERE.glob("*.safetensors"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        sources = {path.stem: path for path in cases.files(Path(folder))}
        for name, (which, way, value, _) in cases.HOSTILE_META.items():
            cases.rewritten(
                sources[which], HERE / name_of(name), change_meta=cases.meta(way, value)
            )
        for name, (which, array, change, _) in cases.HOSTILE_ARRAYS.items():
            shrink = cases.fewer_atoms if array.endswith("dictionary") else None
            cases.rewritten(sources[which], HERE / name_of(name), shrink, cases.put(array, change))
        for name, (which, change, array, _) in cases.HOSTILE_BOTH.items():
            changes = array and cases.put(*array)
            cases.rewritten(sources[which], HERE / name_of(name), change, changes)
        for name, (which, *cell, _) in cases.HOSTILE_CELLS.items():
            cases.rewritten(sources[which], HERE / name_of(name), *cases.claim_cell(*cell))
        for name, data in cases.HOSTILE_BYTES.items():
            if len(data) < 100_000:
                (HERE / name_of(name)).write_bytes(data)
        whole = sources["ragged"].read_bytes()
        (HERE / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])


if __name__ == "__main__":
    main()
