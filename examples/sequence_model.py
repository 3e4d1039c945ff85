"""The next item of a user: a transformer over a small item table, served by numpy.

python examples/sequence_model.py                       generated plays of songs
python examples/sequence_model.py events.csv            a file with columns user, item and time
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from featherbed.apps.sequences import SequenceRecommender, train_sequences

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("file", type=Path, nargs="?")
parser.add_argument("--users", type=int, default=600, help="number of generated users")
parser.add_argument("--epochs", type=int, default=6)
given = parser.parse_args()


def write_plays(path, songs=100):
    """After each song one of three others follows; one play in five is of any song."""
    rng, lines = np.random.default_rng(0), ["user,song,time"]
    nexts = rng.integers(songs, size=(songs, 3))
    for user in range(given.users):
        song = rng.integers(songs)
        for _ in range(rng.integers(5, 30)):
            lines.append(f"u{user},s{song},{len(lines)}")
            song = rng.choice(nexts[song]) if rng.random() < 0.8 else rng.integers(songs)
    path.write_text("\n".join(lines))
    return {f"s{song}": [f"s{one}" for one in row] for song, row in enumerate(nexts)}


with tempfile.TemporaryDirectory() as folder:
    source, out = given.file or Path(folder) / "plays.csv", Path(folder) / "model"
    if given.file is None:
        following = write_plays(source)
    values = {
        "table.dim": 32,
        "model.length": 20,
        "training.epochs": given.epochs,
        "training.lr": 0.005,
    }
    outcome = train_sequences(source, out, values, progress=False)
    print(*outcome.summary[:3], sep="\n")
    model = SequenceRecommender.open(out)  # from here on numpy alone
    history = [model.items.keys[id_] for id_ in range(3)]
    for item in model.recommend_history(history, k=3):
        print(f"after {', '.join(history)}: {item.key}, probability {item.score:.2f}")
    if given.file is None:
        print(f"in the generator {history[-1]} is followed by", *following[history[-1]])
