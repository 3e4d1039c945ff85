"""Build wheel and sdist, check them, install the wheel into clean environments, try each of them.

    python release/check.py [--pythons python3.11,python3.13] [--extras base,fast,train,compress,hf]

The newest Python is the newest of python3.14, 3.13 and 3.12 that runs here. Versions are those of
constraints.txt. Leaves the files of the release in dist/.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
EXTRAS = ("base", "fast", "train", "compress", "hf")
NEWEST = ("python3.14", "python3.13", "python3.12")
MOST_MB, MOST_MS = 60, 220  # base install besides numpy; featherbed lookup, the whole process
TABLE = ROOT / "tests" / "golden" / "version1"


def run(*command, **options):
    """Run a command and return its output; stop with it if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def pythons():
    """Return Python 3.11 and the newest Python that runs here."""

    def runs(name):
        if shutil.which(name) is None:
            return False
        return subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0

    newest = next((name for name in NEWEST if runs(name)), None)
    if newest is None:
        print(
            f"none of {', '.join(NEWEST)} runs here: only python3.11 is checked; name another "
            "by PYTHONS=python3.11,/path/to/python3.13"
        )
    return [name for name in ("python3.11", newest) if name is not None and runs(name)]


def build():
    """Build into dist/ and check metadata and contents; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    files = sorted(DIST.iterdir())
    print(run(sys.executable, "-m", "twine", "check", "--strict", *files).strip())
    (wheel,) = (path for path in files if path.suffix == ".whl")
    names = zipfile.ZipFile(wheel).namelist()
    source = (ROOT / "src" / "featherbed" / "version.py").read_text(encoding="utf-8")
    version = source.split('__version__ = "')[1].split('"')[0]
    if f"featherbed-{version}" not in wheel.name or "featherbed/py.typed" not in names:
        sys.exit(f"{wheel.name}: not version {version}, or without py.typed")
    outside = [name for name in names if not name.startswith(("featherbed/", "featherbed-"))]
    if outside:
        sys.exit(f"{wheel.name} brings more than the package: {outside[:5]}")
    for path in files:
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    return wheel


def megabytes(folder):
    """Return the size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def lookup_time(program, table):
    """Return the median milliseconds of a whole look-up process: CPU time, and wall time.

    The machine may do other things, so that the limit is one of CPU time.
    """
    times = []
    for _ in range(9):
        begin, before = time.perf_counter(), os.times()
        run(program, "lookup", table, "0")
        after = os.times()
        spent = after.children_user + after.children_system
        spent -= before.children_user + before.children_system
        times.append((1e3 * spent, 1e3 * (time.perf_counter() - begin)))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def try_environment(python, extra, wheel, folder):
    """Install the wheel with one extra into a clean environment and run its smoke test."""
    run(python, "-m", "venv", folder)
    bins = folder / "bin"
    what = str(wheel) if extra == "base" else f"{wheel}[{extra}]"
    pip = [bins / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, "-c", ROOT / "constraints.txt", what)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    rest = sum(megabytes(packages / name) for name in ("pip", "numpy", "numpy.libs"))
    size = megabytes(packages)
    run(bins / "python", ROOT / "release" / "smoke.py", extra, cwd=folder)
    line = f"{python:<12} {extra:<9} {size:>7.0f} MB, {size - rest:>6.0f} besides pip and numpy"
    faults = []
    if extra == "base":
        table = sorted(TABLE.glob("*.safetensors"))[0]
        took, wall = lookup_time(bins / "featherbed", table)
        line += f"; featherbed lookup {took:.0f} ms of CPU time, {wall:.0f} ms in all"
        if size - rest > MOST_MB:
            faults.append(f"{python}: the base install has more than {MOST_MB} MB besides numpy")
        if took > MOST_MS:
            faults.append(
                f"{python}: featherbed lookup takes {took:.0f} ms of CPU, {MOST_MS} at most"
            )
    if extra == "train":
        checked = ["--strict", "--config-file", "", "--python-executable", bins / "python"]
        run(sys.executable, "-m", "mypy", *checked, ROOT / "tests" / "typing" / "public_api.py")
        line += "; mypy --strict from outside"
    print(line, flush=True)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default=None, help="such as python3.11,python3.13")
    parser.add_argument("--extras", default=",".join(EXTRAS))
    given = parser.parse_args()
    wheel, faults = build(), []
    for python in given.pythons.split(",") if given.pythons else pythons():
        for extra in given.extras.split(","):
            with tempfile.TemporaryDirectory() as folder:
                faults += try_environment(python, extra, wheel, Path(folder))
    if faults:
        sys.exit("\n".join(faults))
    print("ready:", *sorted(path.name for path in DIST.iterdir()))


if __name__ == "__main__":
    main()
