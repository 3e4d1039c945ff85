"""Fuzz folders of models: python tests/fuzz/folders.py --files 2000 --seed 0 --jobs 2

Recommenders, sequence models, classifiers, language models and ``transformers`` folders with corrupted or hostile
members are opened and used in worker processes. A crash, a hang and an exception that is not
featherbed's own are findings: the exit code is 1 if there is any, and ``--again NUMBER`` repeats one.
"""

import argparse
import json
import lzma
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import featherbed as fb
from featherbed.apps.classifier.serve import Classifier, check_classifier, write_classifier
from featherbed.apps.language.serve import LanguageModel, check_language, write_language
from featherbed.apps.recommender.serve import (
    Recommender,
    check_recommender,
    collect_rated,
    write_recommender,
)
from featherbed.apps.sequences.serve import (
    SequenceRecommender,
    SequenceShape,
    check_sequences,
    write_sequences,
)
from featherbed.errors import FeatherbedError
from fuzz.workers import describe, run_cases

try:
    import transformers

    from featherbed.interop.pretrained import load_model
    from featherbed.interop.swap import compress_model
except ImportError:  # the other folders are fuzzed without it
    transformers = None

SECONDS = 10.0
MEMORY = 2 << 30
EVERY = 15.0  # seconds between two lines of progress
WORDS = ["<pad>", "<unk>", *(f"word{i}" for i in range(58))]
NUMBERS = (-1, 0, 1, 2, 7, 255, 65_537, 2**31, 2**32 + 1, 2**40, 2**63, 10**30, -(2**63), 1.5)
VALUES = (*NUMBERS, None, True, False, "", "x", "x" * 5000, [], [[]], {}, {"a": 1}, [1, "b", None])
TEXTS = ("[" * 100_000, '{"a":' * 50_000, "", "null", "[1]", "\ufeff{}", '{"a": 1e999}', "NaN")
FLOATS = ("nan", "inf", "-inf", "3e38", "1e-45")


# The corpus


def write_folders(root):
    """Write one sound folder of every kind; return their names."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    makers = {
        "recommender-column": write_column,
        "recommender-apart": write_apart,
        "classifier-bag": write_bag,
        "classifier-cnn": write_cnn,
        "classifier-pieces": write_pieces,
        "language-tied": write_tied,
        "language-untied": write_untied,
        "sequences-items": write_items,
        "sequences-users": write_users,
    }
    if transformers is not None:
        transformers.utils.logging.disable_progress_bar()
        makers |= {"transformers-bert": write_bert, "transformers-gpt2": write_gpt2}
    for name, make in makers.items():
        make(Path(root) / name, rng)
    return sorted(makers)


def write_column(folder, rng):
    users, items = (fb.AnchorTable(n, 6, anchors=4).pack() for n in (40, 30))
    seen = collect_rated(rng.integers(0, 40, 200), rng.integers(0, 30, 200), 40, 30)
    titles = [f"title {i}" if i % 3 else None for i in range(30)]
    write_tables(folder, users, items, biases="column", seen=seen, titles=titles)


def write_apart(folder, rng):
    users, items = (
        fb.compress(rng.standard_normal((n, 8)).astype(np.float32), ratio=2, method="int8")
        for n in (600, 300)
    )
    seen = collect_rated(rng.integers(0, 600, 900), rng.integers(0, 300, 900), 600, 300)
    biases = {"user_bias": rng.standard_normal(600), "item_bias": rng.standard_normal(300)}
    write_tables(folder, users, items, biases="apart", seen=seen, **biases)


def write_tables(folder, users, items, **settings):
    folder.mkdir(parents=True)
    for side, table in (("users", users), ("items", items)):
        path = folder / f"{side}.safetensors"
        fb.save(table, path, keys=[f"{side[0]}{i}" for i in range(len(table))])
    paths = (folder / "users.safetensors", folder / "items.safetensors")
    write_recommender(folder, *paths, mean=3.5, about={"settings": {"dim": 6}}, **settings)


def words_table(rng, padding=0):
    rows = rng.standard_normal((len(WORDS), 8)).astype(np.float32)
    rows[0] = 0
    return fb.DenseTable.from_dense(torch.from_numpy(rows), padding_idx=padding).pack()


def write_bag(folder, rng):
    weights = {"norm.scale": rng.standard_normal(8), "norm.shift": rng.standard_normal(8)}
    weights |= {"layer0.weight": rng.standard_normal((5, 8)), "layer0.bias": np.zeros(5)}
    weights |= {"layer1.weight": rng.standard_normal((3, 5)), "layer1.bias": np.zeros(3)}
    settings = {"kind": "bag", "classes": "abc", "words": WORDS, "weights": "int8"}
    write_classifier(folder, words_table(rng), weights, **settings)


def write_cnn(folder, rng):
    weights = {"width2.weight": rng.standard_normal((4, 16)), "width2.bias": np.zeros(4)}
    weights |= {"width3.weight": rng.standard_normal((4, 24)), "width3.bias": np.zeros(4)}
    weights |= {"layer0.weight": rng.standard_normal((2, 8)), "layer0.bias": np.zeros(2)}
    folder.mkdir(parents=True)
    table = fb.save(words_table(rng), folder / "words.safetensors", keys=WORDS)
    settings = {"kind": "cnn", "widths": (2, 3), "classes": ["yes", "no"], "length": 20}
    write_classifier(folder, table, weights, **settings)


def write_pieces(folder, rng):
    from featherbed.io.texts import open_tokenizer, train_subwords

    text = train_subwords([" ".join(WORDS[2:])] * 3, 40)
    size = open_tokenizer(text).get_vocab_size()
    rows = rng.standard_normal((size, 8)).astype(np.float32)
    rows[0] = 0
    table = fb.DenseTable.from_dense(torch.from_numpy(rows), padding_idx=0).pack()
    weights = {"layer0.weight": rng.standard_normal((2, 8)), "layer0.bias": np.zeros(2)}
    write_classifier(folder, table, weights, kind="bag", classes=["yes", "no"], tokenizer=text)


def cells_of(rng, *widths):
    return [
        (rng.standard_normal((4 * b, a)), rng.standard_normal((4 * b, b)), *np.zeros((2, 4 * b)))
        for a, b in pairwise(widths)
    ]


def write_tied(folder, rng):
    words, bias = ["<eos>", "<unk>", *WORDS[2:]], np.zeros(len(WORDS))
    table = fb.AnchorTable(len(WORDS), 8, anchors=5).pack()
    write_language(folder, table, cells_of(rng, 8, 6, 8), bias, words=words)


def write_untied(folder, rng):
    words, bias = ["<eos>", "<unk>", *WORDS[2:]], np.zeros(len(WORDS))
    folder.mkdir(parents=True)
    table = fb.save(words_table(rng, None), folder / "words.safetensors", keys=words)
    settings = {"output": rng.standard_normal((len(WORDS), 6)), "weights": "float16"}
    write_language(folder, table, cells_of(rng, 8, 6), bias, **settings)


def write_items(folder, rng, users=None, **settings):
    width = 0 if users is None else users.dim
    shape = SequenceShape(30, 6, width, length=5, layers=2, heads=2, inner=4)
    keys = fb.Keys.of([f"i{i}" for i in range(30)])
    items = fb.AnchorTable(30, 6, anchors=4).pack().replace(keys=keys)
    weights = {name: rng.standard_normal(size) for name, size in shape.arrays().items()}
    write_sequences(folder, items, weights, shape, repeats=False, users=users, **settings)


def write_users(folder, rng):
    keys = fb.Keys.of([f"u{i}" for i in range(20)])
    users = fb.QuantizedTable(20, 2, bits=4).pack().replace(keys=keys)
    write_items(folder, rng, users, titles=[f"title {i}" for i in range(30)], precision="int8")


def write_bert(folder, rng):
    sizes = {"vocab_size": 600, "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    save_compressed(transformers.BertModel(transformers.BertConfig(**sizes)), folder)


def write_gpt2(folder, rng):
    sizes = {"vocab_size": 600, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    save_compressed(model, folder, max_shard_size="10KB")


def save_compressed(model, folder, **settings):
    compress_model(model, ratio=3, method="int4")
    model.save_pretrained(folder, **settings)


# Mutations


def mutate(folder, others, chance):
    """Change one to three members of a folder; return what was done."""
    changes = [flip, flip, truncate, remove, overwrite, exchange, edit_json, edit_json, edit_json]
    changes += [edit_text, edit_header, edit_header, replace, bomb, add, *[edit_data] * 8]
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = chance.choice(changes)
        try:
            path = chance.choice(files_of(folder))
            done.append(f"{change.__name__} {path.name}: {change(path, others, chance)}"[:300])
        except (ValueError, KeyError, TypeError, OSError, IndexError, RecursionError):
            done.append(f"{change.__name__}: not possible")
    return done


def files_of(folder, pattern="*"):
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def flip(path, others, chance):
    data = bytearray(path.read_bytes())
    places = [chance.randrange(8 * len(data)) for _ in range(chance.choice((1, 1, 2, 8, 50)))]
    for place in places:
        data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return places[:8]


def truncate(path, others, chance):
    data = path.read_bytes()
    end = chance.choice((0, 1, 7, 8, len(data) - 1, chance.randrange(len(data))))
    path.write_bytes(data[:end])
    return end


def remove(path, others, chance):
    path.unlink()


def overwrite(path, others, chance):
    data = chance.choice(
        (b"", b"\0" * 64, b"\xff" * 1000, chance.randbytes(4096), b"{}", b"PK\x03\x04")
    )
    path.write_bytes(data)
    return data[:8]


def exchange(path, others, chance):
    """Take the bytes of another member, of this folder or of another one."""
    source = chance.choice(files_of(chance.choice([path.parent, *others])))
    path.write_bytes(source.read_bytes())
    return source.name


def places_of(value, place=()):
    """Yield every place in a JSON value."""
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_of(value[key], (*place, key))


def edit(value, chance):
    """Change a JSON value at a random place; return it and what was done."""
    place = chance.choice([place for place in places_of(value) if place] or [()])
    if not place:
        return chance.choice(VALUES), "all of it"
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    action = chance.choice(("set", "set", "set", "delete", "double", "nest", "nudge", "nudge"))
    if action == "delete":
        del parent[place[-1]]
    elif action == "double" and isinstance(parent[place[-1]], int | float | str | list):
        parent[place[-1]] *= 2
    elif action == "nudge" and isinstance(parent[place[-1]], int | float):
        parent[place[-1]] += chance.choice((-1, 1))
    elif action == "nest":
        parent[place[-1]] = {"a": [parent[place[-1]]]}
    else:
        parent[place[-1]] = chance.choice(VALUES)
    return value, f"{action} {place}"


def edit_json(path, others, chance):
    path = chance.choice(files_of(path.parent, "*.json"))
    value, done = edit(json.loads(path.read_text()), chance)
    path.write_text(json.dumps(value))
    return f"{path.name} {done}"


def edit_text(path, others, chance):
    """Change the text of a JSON file in ways that no JSON writer would."""
    path = chance.choice(files_of(path.parent, "*.json"))
    text = path.read_text()
    number = chance.choice((*FLOATS, "1e999", "9" * 5000, "-0", "NaN", "Infinity", "1e5", "0.5"))
    digits = [i for i, letter in enumerate(text) if letter.isdigit()]
    at = chance.choice(digits)
    made = chance.choice((chance.choice(TEXTS), text[:at] + number + text[at + 1 :], text + text))
    path.write_text(made)
    return f"{path.name} {made[max(0, at - 20) : at + 20]}"


def edit_header(path, others, chance):
    """Change the header of a safetensors file, or the metadata within it."""
    path = chance.choice(files_of(path.parent, "*.safetensors"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = header.get("__metadata__", {})
    if "featherbed" in about and chance.random() < 0.7:
        value, done = edit(json.loads(about["featherbed"]), chance)
        about["featherbed"] = json.dumps(value)
    else:
        header, done = edit(header, chance)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{path.name} {done}"


def edit_data(path, others, chance):
    """Write extreme numbers into the arrays of a safetensors file."""
    path = chance.choice(files_of(path.parent, "*.safetensors"))
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    width = chance.choice((1, 2, 4, 8))
    spots = (len(data) - start) // width
    chosen = [start + width * chance.randrange(spots) for _ in range(chance.choice((1, 4, 64)))]
    whole = [b"\xff" * width, b"\x80" + b"\0" * (width - 1), b"\0" * (width - 1) + b"\x80"]
    extreme = [np.float32(text).tobytes()[:width].ljust(width, b"\0") for text in FLOATS]
    for place in chosen:
        data[place : place + width] = chance.choice(whole + extreme)
    path.write_bytes(data)
    return f"{path.name} {chosen[:4]} of {width} bytes"


def replace(path, others, chance):
    """Put a link, a folder or a pipe where a member was."""
    path.unlink()
    kind = chance.choice(("nowhere", "itself", "a folder", "zeros", "link to folder", "pipe"))
    targets = {
        "nowhere": "nothing",
        "itself": path.name,
        "zeros": "/dev/zero",
        "link to folder": ".",
    }
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    return kind


def bomb(path, others, chance):
    """Put in a list of far more words than are allowed, or one that asks for 4 GB to be unpacked."""
    data = chance.choice((BOMB, hungry()))
    path.with_name("words.txt.xz").write_bytes(data)
    return len(data)


BOMB = lzma.compress(b"\0" * ((1 << 26) + 1), preset=0)


def hungry():
    """Return a packed list of words whose header asks for a dictionary of 4 GB."""
    data = bytearray(lzma.compress("\n".join(WORDS).encode(), check=lzma.CHECK_CRC32))
    size = (data[12] + 1) * 4  # of the block header, which ends with its checksum
    data[16] = 40
    data[12 + size - 4 : 12 + size] = zlib.crc32(data[12 : 12 + size - 4]).to_bytes(4, "little")
    return bytes(data)


def add(path, others, chance):
    """Add a member that other programs would read."""
    named = {"weight_map": {"a": chance.choice(("../../x", "/etc/passwd", "nothing", path.name))}}
    extra = {
        "model.safetensors.index.json": json.dumps(named),
        "adapter_config.json": json.dumps({"base_model_name_or_path": "/nowhere"}),
        "generation_config.json": chance.choice(TEXTS),
        "pytorch_model.bin": "no pickle",
        "tokenizer.json": chance.choice(TEXTS),
        "words.txt.xz": "no list",
        "titles.safetensors": "no arrays",
    }
    name = chance.choice(sorted(extra))
    if not path.with_name(name).exists():
        path.with_name(name).write_text(extra[name])
    return name


# Use


def use(folder, kind):
    """Open a folder and use it; yield one pair for each way: its name and the work to do."""
    makers = {"recommender": use_recommender, "classifier": use_classifier}
    makers |= {"language": use_language, "transformers": use_model, "sequences": use_sequences}
    yield from makers[kind](folder)


def use_recommender(folder):
    yield "check", lambda: check_recommender(folder)
    found = Recommender.open(folder)
    keys = [[table.keys[i] for i in (0, len(table) // 2)] for table in (found.users, found.items)]
    for user in ("u0", "u7", *keys[0]):
        yield "recommend", partial(found.recommend, user, 5)
        yield "recommend all", partial(found.recommend, user, 10**6, include_rated=True)
        yield "score", partial(found.score, user, ["i0", "i3"])
    for item in ("i0", *keys[1]):
        yield "similar", partial(found.similar, item, 3)


def use_classifier(folder):
    yield "check", lambda: check_classifier(folder)
    found = Classifier.open(folder)
    for text in ("word1 word2 nothing", "word3", "word7 " * 300):
        yield "classify", partial(found.classify, text)
        yield "unknown", partial(found.unknown, text)


def use_language(folder):
    yield "check", lambda: check_language(folder)
    found = LanguageModel.open(folder)
    for temperature in (0.0, 0.8):
        yield "continue", partial(found.continue_text, "word1 word2", 4, 0, temperature)
    yield "perplexity", partial(found.perplexity, np.arange(20) % 50, batch=2)


def use_sequences(folder):
    yield "check", lambda: check_sequences(folder)
    found = SequenceRecommender.open(folder)
    for history in (["i0", "nothing"], [f"i{i}" for i in range(30)] * 3, [found.items.keys[1]]):
        yield "recommend", partial(found.recommend_history, history, 5)
        yield "recommend all", partial(found.recommend_history, history, 99, include_history=True)
    if found.users is not None:
        yield "for a user", partial(found.recommend_history, ["i3"], 5, user="u7")


def use_model(folder):
    model = load_model(folder).eval()
    for ids in ([[3, 17, 42]], [[0]]):
        yield "forward", partial(forward, model, torch.tensor(ids))


@torch.no_grad()
def forward(model, ids):
    table = model.get_input_embeddings()
    rows = table(ids)
    if rows.shape != (*ids.shape, 16):
        raise AssertionError(f"rows of shape {tuple(rows.shape)}")
    model(ids)


def exercise(folder, kind):
    """Use a folder in every way; return whether it opened, and exceptions that are not featherbed's own."""
    opened, reasons = False, []
    ways = use(folder, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                name, work = next(ways)
                opened = opened or name != "check"
                work()
            except StopIteration:
                return opened, reasons
            except FeatherbedError as error:
                if "\n" in str(error) or len(str(error)) > 1500:
                    reasons.append(f"message: {str(error)[:200]!r}")
            except Exception as error:
                reasons.append(f"exception: {describe(error)}")


def exercise_number(number, root, seed):
    """Make the mutant of a number and use it; return whether it opened, the findings and the changes."""
    if transformers is not None:
        transformers.utils.logging.set_verbosity(50)
        transformers.utils.logging.disable_progress_bar()
    names = sorted(path.name for path in Path(root).iterdir())
    chance = random.Random(f"{seed} {number}")
    name = chance.choice(names)
    others = [Path(root) / other for other in names]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        shutil.copytree(Path(root) / name, folder)
        changes = mutate(folder, others, chance)
        opened, reasons = exercise(folder, name.partition("-")[0])
    return opened, reasons, [name, *changes]


def fuzz(root, numbers, seed, jobs, tell=lambda text: None):
    """Use the mutants of these numbers; return counts and the findings in words."""
    counts, found = Counter(), []
    told = time.monotonic()
    work = partial(exercise_number, root=str(root), seed=seed)
    for outcome in run_cases(numbers, work, jobs, SECONDS, MEMORY):
        opened, reasons, changes = outcome.result or (True, [], [])
        if outcome.kind != "done":
            kind = "exception" if outcome.kind == "error" else outcome.kind
            reasons = [f"{kind}: {outcome.detail}"]
        counts.update({"folders", "opened" if opened else "refused"})
        counts.update({reason.partition(":")[0] for reason in reasons})
        found += [f"folder {outcome.case} {changes}: {reason}" for reason in reasons[:1]]
        for line in found[-1:] if reasons else []:
            tell(line)
        now = time.monotonic()
        if now - told >= EVERY:
            told = now
            tell(f"{counts['folders']:,} of {len(numbers):,} folders, {len(found)} findings")
    return counts, found


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--files", type=int, default=2000, help="number of folders")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--again", type=int, help="use one folder again, in this process")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_folders(scratch)
        if given.again is not None:
            print(*exercise_number(given.again, scratch, given.seed), sep="\n")
            return 0
        numbers = range(given.files)
        counts, found = fuzz(scratch, numbers, given.seed, given.jobs, partial(print, flush=True))
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
