"""Mutations of packed files: from single flipped bits to files that are consistently something else.

``mutant(sources, seed, number)`` returns the bytes of one mutated file; the same arguments give the
same file.
"""

import contextlib
import json
import random

import numpy as np

from featherbed.errors import FeatherbedError
from featherbed.packed.file import DTYPES
from featherbed.packed.keys import read_keys
from featherbed.packed.schema import rebuild

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 255, 256, 511, 512, 513, 4095, 4096, 4097,
           2**16 - 1, 2**16, 2**16 + 1, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**40 + 1,
           2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -1, -2, -(2**31), -(2**63))  # fmt: skip
OTHERS = (None, True, False, "", "0", "1", "sum", "int8", "\ud800", "é" * 9, [], {}, [1], [[]], {"a": 1},
          0.5, 1.0, -0.0, 1e300, 1e-300, float("inf"), float("nan"))  # fmt: skip
WORDS = ("float32", "float16", "int8", "int4", "int3", "int2", "graded", "sum", "product", "concat", "identity",
         "hash", "remainder", "every", "fixed", "ragged", "mlp", "recurrent", "lstm", "plain", "text", "hashed",
         "integer")  # fmt: skip
CHOICES = (WORDS[:7], WORDS[7:10], WORDS[10:16], WORDS[16:19], WORDS[19:])
FIELDS = ("version", "rows", "dim", "padding_idx", "keys", "bands", "made_by", "members", "codes", "values",
          "dictionary", "combine", "cell", "affine", "norms", "plus", "kind", "columns", "scale", "axis", "layout",
          "seed", "hashes", "divisor", "count", "index_bits", "value", "parts", "entries", "count_bits", "wide",
          "weight", "bias", "input", "grades", "form", "shared", "order", "bits", "exceptions", "low")  # fmt: skip
PLACES = ("counts", "directory", "bitmap", "totals", "ends", "order", "buckets", "blocks")
TEXTS = ("text", "heads", "dictionary")
MOST_BYTES = 1 << 19  # of an array that is made to fit changed metadata
DEEP = 40


class Parts:
    """A file taken apart: metadata, and arrays by name as (dtype, shape, bytes)."""

    def __init__(self, data):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        self.words = header.pop("__metadata__")
        self.meta = json.loads(self.words["featherbed"])
        self.arrays = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            self.arrays[name] = (entry["dtype"], entry["shape"], data[begin:end])

    def header(self, chance):
        """Return the header's entries, the arrays in an order that keeps each aligned."""
        entries = {"__metadata__": self.words | {"featherbed": json.dumps(self.meta)}}
        offset = 0
        for name in _aligned_order(self.arrays, chance):
            dtype, shape, data = self.arrays[name]
            ends = [offset, offset + len(data)]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
            offset += len(data)
        return entries

    def join(self, entries):
        """Return the bytes of a file with this header."""
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        blocks = [self.arrays[name][2] for name in entries if name in self.arrays]
        return len(text).to_bytes(8, "little") + text + b"".join(blocks)


def _aligned_order(arrays, chance):
    """Return names in a random order, so that any array may be the last of the file."""

    def size(name):
        return np.dtype(DTYPES.get(arrays[name][0], np.uint8)).itemsize

    names = list(arrays)
    for _ in range(4):
        chance.shuffle(names)
        offset = 0
        for name in names:
            if offset % size(name):
                break
            offset += len(arrays[name][2])
        else:
            return names
    return sorted(names, key=lambda name: (-size(name), name))


def mutant(sources, seed, number):
    """Return a mutated file and the mutations in words."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(sources))
    parts, done = Parts(sources[name]), [name]
    if chance.random() < 0.03:
        other = chance.choice(sorted(sources))
        _graft(parts, Parts(sources[other]), chance)
        done.append(f"graft of {other}")
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        change = chance.choices(CHANGES, WEIGHTS)[0]
        with contextlib.suppress(IndexError, KeyError, TypeError, ValueError, AttributeError):
            done.append(change(parts, chance) or change.__name__)
    if chance.random() < 0.75:
        with contextlib.suppress(
            KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError
        ):
            settle(parts.meta)
    if chance.random() < 0.85:
        repair(parts)
    entries = parts.header(chance)
    if chance.random() < 0.06:
        done.append(change_container(entries, chance))
    data = parts.join(entries)
    if chance.random() < 0.1:
        data = change_bytes(bytearray(data), chance)
        done.append("bytes")
    return bytes(data), ", ".join(map(str, done))


# --- metadata --------------------------------------------------------------------------------------


def places(value, found=None):
    """Return every (container, key) below a JSON value, but for the settings in made_by."""
    found = [] if found is None else found
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found.append((value, key))
        if key != "made_by":
            places(inner, found)
    return found


def change_number(parts, chance):
    """Give a number of the metadata another value."""
    numbers = [(at, key) for at, key in places(parts.meta) if type(at[key]) is int]
    at, key = chance.choice(numbers)
    old = at[key]
    at[key] = chance.choice((old + 1, old - 1, 2 * old, old // 2, *chance.choices(NUMBERS, k=4)))
    if key == "rows" and chance.random() < 0.8:  # the same rows everywhere
        for other, name in numbers:
            if name == "rows" and other[name] == old:
                other[name] = at[key]
    return f"{key}: {old} -> {at[key]}"


def change_word(parts, chance):
    """Give a word of the metadata another value."""
    texts = [(at, key) for at, key in places(parts.meta) if isinstance(at[key], str)]
    at, key = chance.choice(texts)
    old = at[key]
    if old.isdecimal():  # the bits of graded columns
        place = chance.randrange(len(old))
        at[key] = old[:place] + chance.choice("0123456789x") + old[place + 1 :]
    else:
        likely = next((words for words in CHOICES if old in words), WORDS)
        at[key] = chance.choice(likely if chance.random() < 0.85 else WORDS)
    return f"{key}: {old[:20]} -> {at[key][:20]}"


def change_flag(parts, chance):
    """Turn a truth value of the metadata around."""
    flags = [(at, key) for at, key in places(parts.meta) if isinstance(at[key], bool)]
    at, key = chance.choice(flags)
    at[key] = not at[key]
    return f"{key}: {at[key]}"


def change_type(parts, chance):
    """Put a value of another type in the place of a field."""
    at, key = chance.choice(places(parts.meta))
    at[key] = chance.choice(OTHERS)
    return f"{key}: {str(at[key])[:20]!a}"


def change_fields(parts, chance):
    """Take a field away, add one, or put a copy of one object in the place of another."""
    at, key = chance.choice(places(parts.meta))
    way = chance.random()
    if way < 0.3:
        at.pop(key)
        return f"without {key}"
    other, name = chance.choice(places(parts.meta))
    if way < 0.5:
        objects = [at[key] for at, key in places(parts.meta) if isinstance(at[key], dict)]
        chance.choice([parts.meta, *objects])[chance.choice(FIELDS)] = chance.choice(
            (None, False, 0)
        )
        return "another field"
    at[key] = json.loads(json.dumps(other[name]))
    return f"{key} from {name}"


def change_bands(parts, chance):
    """Repeat, reverse or drop bands; nest a layer."""
    bands = parts.meta["bands"]
    way = chance.random()
    if way < 0.25:
        bands.reverse()
    elif way < 0.5:
        bands.append(json.loads(json.dumps(chance.choice(bands))))
    elif way < 0.75:
        bands.pop(chance.randrange(len(bands)))
    else:
        layer = chance.choice(bands)
        layer["plus"] = json.loads(json.dumps(layer)) | {"members": False}
    return "bands"


def change_made_by(parts, chance):
    """Put odd settings into made_by, which is for people."""
    deep = inner = {}
    for _ in range(chance.choice((1, DEEP, 22 * DEEP))):
        inner["a"] = inner = {}
    parts.meta["made_by"] = chance.choice(
        ({}, {"table": None}, {"table": 10**400}, {"table": "MixtureTable", "combine": "softmax",
         "sets": chance.choice((True, -1, 2, 10**9, "2"))}, deep, {"": [1e308, "\ud800", {}]})
    )  # fmt: skip
    return "made_by"


def _graft(parts, other, chance):
    """Take a band, with its arrays, from another file."""
    number = chance.randrange(len(other.meta["bands"]))
    into = chance.randrange(len(parts.meta["bands"]))
    parts.meta["bands"][into] = other.meta["bands"][number]
    parts.meta["dim"] = other.meta["dim"]
    parts.meta["version"] = max(parts.meta["version"], other.meta["version"])
    for name in [name for name in parts.arrays if name.startswith(f"b{into}.")]:
        del parts.arrays[name]
    for name, array in other.arrays.items():
        if name.startswith(f"b{number}."):
            parts.arrays[f"b{into}.{name.partition('.')[2]}"] = array


def settle(meta):
    """Make the fields of the metadata fit each other: a mutated table, but a table."""
    meta["version"] = 3
    rows = meta["rows"]
    for number, band in enumerate(meta["bands"]):
        last = number == len(meta["bands"]) - 1
        band["members"] = not last
        band["rows"] = rows if last else min(band["rows"], rows)
        rows -= band["rows"]
        meta["dim"] = settle_layer(band, band["rows"])


def settle_layer(layer, rows):
    """Make the fields of a layer of ``rows`` rows fit each other; return the width of its rows."""
    layer["rows"] = rows
    count = settle_codes(layer, rows)
    values, dictionary = layer.get("values"), layer.get("dictionary")
    if values and count:
        values["columns"] = count
    if layer["codes"]["layout"] == "every" and values and dictionary:
        dictionary["rows"] = values["columns"]
    if layer["codes"]["layout"] in ("every", "ragged"):
        layer["combine"] = "sum"
    for part in (values, layer.get("norms")):
        if part:
            part["rows"] = rows
    for part in (dictionary, values, layer.get("norms")):
        settle_matrix(part)
    width = dictionary["columns"] if dictionary else values["columns"]
    width *= count if layer["combine"] == "concat" and count else 1
    return settle_stages(layer, rows, width, count)


def settle_codes(layer, rows):
    """Give codes the fields of their layout; return the number of codes of a row, if it is fixed."""
    codes, dictionary = layer["codes"], layer.get("dictionary")
    layout = codes["layout"]
    for name in set(codes) - {"layout", *CODES.get(layout, {})}:
        del codes[name]
    for name, value in CODES.get(layout, {}).items():
        codes.setdefault(name, value)
    graded = (layer.get("values") or {}).get("kind") == "graded"
    if layout in ("fixed", "ragged") or (graded and layout != "every"):
        layer["values"] = None
    if layout == "identity" and dictionary:
        dictionary["rows"] = rows
    counts = {
        "identity": 1,
        "hash": codes.get("hashes"),
        "remainder": 2,
        "fixed": codes.get("count"),
    }
    count, choices = counts.get(layout), dictionary["rows"] if dictionary else 0
    if codes.get("parts"):
        choices = max(1, choices // count)
        dictionary["rows"] = choices * count
    if "index_bits" in codes:
        codes["index_bits"] = max(0, choices - 1).bit_length()
    return count


CODES = {"hash": {"seed": 1, "hashes": 2}, "remainder": {"divisor": 3},
         "fixed": {"count": 2, "index_bits": 0, "value": None, "parts": False},
         "ragged": {"entries": 40, "index_bits": 0, "count_bits": 2, "value": "int4", "wide": True}}  # fmt: skip


def settle_stages(layer, rows, width, count):
    """Make cell, added layer and affine stage fit rows of ``width``; return the new width."""
    cell = layer.get("cell")
    if cell:
        if cell["kind"] == "mlp":
            cell["weight"]["rows"] = width
        else:
            atom = width // count
            out = atom if cell["kind"] == "recurrent" else cell["weight"]["rows"]
            cell["weight"] |= {"rows": out, "columns": 4 * out}
            if cell["kind"] == "lstm":
                cell["input"] = dict(cell["weight"]) | {"rows": atom}
        if cell["kind"] != "lstm":
            cell["input"] = None
        width = cell["weight"]["columns"] if cell["kind"] == "mlp" else cell["weight"]["rows"]
    if layer.get("plus"):
        settle_layer(layer["plus"], rows)
    if layer.get("affine") and layer["affine"].get("weight"):
        layer["affine"]["weight"]["rows"] = width
        width = layer["affine"]["weight"]["columns"]
    return width


def settle_matrix(fields):
    """Give levels a scale, and floats none."""
    if fields and fields["kind"] in ("float32", "float16"):
        fields["scale"] = None
    elif fields and not fields.get("scale"):
        fields["scale"] = {"axis": 0, "kind": "float32"}


def repair(parts):
    """Make the arrays fit the metadata, wherever the metadata make sense so far."""
    found = {}

    def take(name, kind, shape):
        size = int(np.prod(shape, dtype=object)) * np.dtype(DTYPES[kind]).itemsize
        if size > MOST_BYTES:
            raise ValueError("too large")
        old = parts.arrays.get(name, (kind, shape, b"\0\1\2"))
        wide = {("U32", "U64"): np.uint32, ("U64", "U32"): np.uint64}.get((old[0], kind))
        data = (
            old[2] if wide is None else np.frombuffer(old[2], wide).astype(DTYPES[kind]).tobytes()
        )
        data = (data or b"\0") * (-(-size // max(1, len(data or b"\0"))))
        found[name] = (kind, list(shape), data[:size])
        return np.frombuffer(data[:size], DTYPES[kind]).reshape(shape)

    with contextlib.suppress(FeatherbedError, ValueError, TypeError, OverflowError, RecursionError):
        fields = rebuild(parts.meta, take)
        texts = {f"keys.{name}": {"dtype": "U8", "shape": [4]} for name in TEXTS}
        header = {name: {"dtype": old[0], "shape": old[1]} for name, old in parts.arrays.items()}
        read_keys(fields.keys, texts | header, take, fields.rows)
        parts.arrays = found


# --- arrays ----------------------------------------------------------------------------------------


def _pick(parts, chance):
    """Choose an array; those that say where others lie are chosen more often."""
    names = [name for name, (_, _, data) in parts.arrays.items() if data]
    telling = chance.choice((PLACES, PLACES, (*PLACES, "stream", "checksums", "norms")))
    chosen = [name for name in names if name.endswith(telling)]
    return chance.choice(chosen if chosen and chance.random() < 0.6 else names)


def _view(parts, name):
    dtype, _, data = parts.arrays[name]
    return np.frombuffer(bytearray(data), DTYPES.get(dtype, np.uint8)).copy()


def _store(parts, name, array):
    dtype, shape, _ = parts.arrays[name]
    parts.arrays[name] = (dtype, shape, array.tobytes())


def flip_bits(parts, chance):
    """Flip some bits of an array."""
    name = _pick(parts, chance)
    data = bytearray(parts.arrays[name][2])
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    parts.arrays[name] = (*parts.arrays[name][:2], bytes(data))
    return f"bits of {name}"


def write_related(parts, chance):
    """Write special numbers into several arrays that say where the rows of one band, or the keys, lie."""
    name = _pick(parts, chance)
    related = [n for n in parts.arrays if n.rpartition(".")[0] == name.rpartition(".")[0]]
    return ", ".join(write_special(parts, chance, n) for n in related if n.endswith(PLACES))


def write_special(parts, chance, name=None):
    """Write special numbers into an array."""
    name = name or _pick(parts, chance)
    array = _view(parts, name)
    if array.dtype.kind == "f":
        value = chance.choice((0, -0.0, 1, np.nan, np.inf, -np.inf, 65504, 6e-8, 1e-40, 3e38))
    else:
        most = int(np.iinfo(array.dtype).max)
        large = (most, most - 1, most // 2, most // 2 + 1)
        nearby = (int(chance.choice(array)) + 1, int(chance.choice(array)) - 1, len(array))
        small = (0, 1, 2**31, 2**32 - 1, 2**32, 2**40)
        value = chance.choice(chance.choice((large, nearby, small))) % (most + 1)
    with np.errstate(all="ignore"):
        if chance.random() < 0.15:
            array[:] = value
        else:
            for _ in range(chance.choice((1, 1, 2, 5))):
                array[chance.randrange(len(array))] = value
    _store(parts, name, array)
    return f"{value} into {name}"


def move_elements(parts, chance):
    """Reverse, roll, sort or exchange the elements of an array."""
    name = _pick(parts, chance)
    array = _view(parts, name)
    way = chance.randrange(4)
    if way == 0:
        array = array[::-1]
    elif way == 1:
        array = np.roll(array, chance.choice((1, -1, len(array) // 2)))
    elif way == 2:
        array = np.sort(array)
    else:
        i, j = chance.randrange(len(array)), chance.randrange(len(array))
        array[[i, j]] = array[[j, i]]
    _store(parts, name, array)
    return f"moved {name}"


def swap_arrays(parts, chance):
    """Let two arrays change places, as they are or with each other's content only."""
    one, other = chance.choice(sorted(parts.arrays)), chance.choice(sorted(parts.arrays))
    a, b = parts.arrays[one], parts.arrays[other]
    if chance.random() < 0.5:
        parts.arrays[one], parts.arrays[other] = b, a
    else:
        fit = (b[2] * (len(a[2]) // max(1, len(b[2])) + 1))[: len(a[2])]
        parts.arrays[one] = (*a[:2], fit.ljust(len(a[2]), b"\0"))
    return f"{one} and {other}"


def drop_array(parts, chance):
    """Take an array away, or add one."""
    name = chance.choice(sorted(parts.arrays))
    if chance.random() < 0.5:
        del parts.arrays[name]
        return f"without {name}"
    parts.arrays[f"{name}x"] = parts.arrays[name]
    return f"{name} twice"


def change_size(parts, chance):
    """Make an array longer or shorter, with its shape or without."""
    name = _pick(parts, chance)
    dtype, shape, data = parts.arrays[name]
    item = np.dtype(DTYPES.get(dtype, np.uint8)).itemsize
    extra = chance.choice((-1, 1, 2, 16)) * item
    data = data[:extra] if extra < 0 else data + b"\xff" * extra
    if len(shape) == 1:
        shape = [len(data) // item]
    parts.arrays[name] = (dtype, shape, data)
    return f"size of {name}"


def change_dtype(parts, chance):
    """Call an array by another dtype, of as many bytes."""
    name = chance.choice(sorted(parts.arrays))
    dtype, shape, data = parts.arrays[name]
    new = chance.choice((*DTYPES, "I64", "I32", "BF16", "F64", "BOOL", "F8_E4M3", "X"))
    item = np.dtype(DTYPES.get(new, np.uint8)).itemsize
    if len(shape) == 1 and chance.random() < 0.5:
        shape = [len(data) // item]
    parts.arrays[name] = (new, shape, data)
    return f"{name}: {dtype} -> {new}"


# --- the container ---------------------------------------------------------------------------------


def change_container(entries, chance):
    """Change an entry of the header that the arrays know nothing of."""
    name = chance.choice(sorted(entries))
    entry = entries[name]
    if name == "__metadata__":
        entries[name] = chance.choice(({}, None, [], "x", {"featherbed": 1}, entry | {"more": "x"}))
        return "container metadata"
    field = chance.choice(("dtype", "shape", "data_offsets", "extra"))
    odd = chance.choice((*OTHERS, *NUMBERS))
    if field in ("shape", "data_offsets") and entry[field] and chance.random() < 0.8:
        entry[field] = list(entry[field])
        entry[field][chance.randrange(len(entry[field]))] = odd
    else:
        entry[field] = odd
    return f"{field} of {name}: {str(odd)[:20]!a}"


def change_bytes(data, chance):
    """Change bytes anywhere, cut the end off, add to it, or lie about the length of the header."""
    way = chance.random()
    length = int.from_bytes(data[:8], "little")
    if way < 0.6:
        zone = min(8 + length, len(data)) if chance.random() < 0.4 else len(data)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(zone)] = chance.choice((0, 255, 48, 57, chance.randrange(256)))
    elif way < 0.75:
        del data[chance.randrange(len(data)) :]
    elif way < 0.85:
        data += bytes(chance.choice((1, 8, 4096)))
    else:
        data[:8] = chance.choice((length + 8, length - 8, 0, 2**24, 2**63)).to_bytes(8, "little")
    return data


CHANGES = (change_number, change_word, change_flag, change_type, change_fields, change_bands, change_made_by,
           flip_bits, write_special, write_related, move_elements, swap_arrays, drop_array, change_size, change_dtype)  # fmt: skip
WEIGHTS = (14, 6, 3, 3, 3, 2, 1, 20, 18, 8, 8, 5, 1, 2, 2)
