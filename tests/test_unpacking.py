"""Packed files that unpack to far more than they hold are refused, in bounded memory."""

import bz2
import gzip
import importlib
import lzma
import tarfile
import zipfile

import pytest

import featherbed as fb
from featherbed.graphs import edges
from featherbed.io import opening as files

nets = importlib.import_module(
    "featherbed.graphs.wordnet"
)  # the package has a function of that name

PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("packer", PACKERS)
def test_a_text_that_unpacks_to_too_much_is_refused(packer, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(PACKERS[packer](b"a " * (10 << 20)))
    unpacked, real = [], files.open_compressed

    class Watched:
        def __init__(self, stream):
            self.stream = stream

        def read(self, size):
            unpacked.append(self.stream.read(size))
            return unpacked[-1]

    def watch(raw):
        stream, name = real(raw)
        return Watched(stream), name

    monkeypatch.setattr(files, "open_compressed", watch)
    with pytest.raises(fb.DataError, match="decompresses to more than") as error:
        files.read_text(path)
    assert "\n" not in str(error.value)
    assert sum(map(len, unpacked)) < 10 << 20, "it stopped before all was unpacked"


@pytest.mark.parametrize("packer", PACKERS)
def test_texts_that_pack_well_are_read(packer, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(PACKERS[packer](b"the cat sat\n" * 100_000))
    assert files.read_text(path) == "the cat sat\n" * 100_000


def test_a_text_that_does_not_fit_into_memory_is_a_named_error(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    (tmp_path / "text").write_text("the cat sat")
    monkeypatch.setattr(files, "_read_bytes", fail)
    with pytest.raises(fb.DataError, match="does not fit into memory"):
        files.read_text(tmp_path / "text")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_of_wordnet_is_read_in_bounded_memory(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "MOST_BYTES", 1 << 16)
    (tmp_path / "data.noun").write_bytes(b"\n" * (1 << 20))
    path = tmp_path / f"net.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(tmp_path / "data.noun", "dict/data.noun")
    else:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "data.noun", "dict/data.noun")
    with pytest.raises(fb.DataError, match="more than 65,536 bytes"):
        fb.wordnet(["cat"], path)


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(edges, "MOST_LINE", 1 << 12)
    path = tmp_path / "edges.gz"
    path.write_bytes(gzip.compress(b"cat dog\n" + b"a" * (1 << 20)))
    with pytest.raises(fb.DataError, match="line 2: longer than 4,096 letters"):
        fb.edge_file(path, ["cat", "dog"])
