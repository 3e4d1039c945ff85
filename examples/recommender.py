"""A recommender in 12 KB: from a file of ratings to recommendations without torch.

python examples/recommender.py                          generated ratings
python examples/recommender.py ratings.csv --budget 40KB
"""

import argparse
import tempfile
from pathlib import Path

from featherbed.apps.recommender import Recommender, train_recommender
from featherbed.io.records import make_ratings

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("file", type=Path, nargs="?")
parser.add_argument("--budget", default="12KB")
parser.add_argument("--ratings", type=int, default=60_000, help="number of generated ratings")
given = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    source, out = given.file or Path(folder) / "ratings.csv", Path(folder) / "recommender"
    if given.file is None:
        made = make_ratings(1000, 500, given.ratings)
        triples = made.users, made.items, made.values
        lines = (f"{u},{i},{r:.2f}" for u, i, r in zip(*triples, strict=True))
        source.write_text("\n".join(["user,item,rating", *lines]))
    outcome = train_recommender(source, out, {"table.budget": given.budget}, progress=False)
    print(*outcome.summary[:3], sep="\n")
    recommender = Recommender.open(out)  # from here on numpy alone
    user = recommender.users.keys[0]
    for item in recommender.recommend(user, k=3):
        print(f"user {user}: item {item.key}, {item.score:.2f}")
    print(
        "a new user:",
        *(item.key for item in recommender.recommend_history([("3", 5.0), ("7", 1.0)], k=3)),
    )
