"""Packed tables whose rows are read from the file on each look-up, for hundreds of gigabytes.

``fb.load`` maps a file: the pages of all rows it has read stay in the memory of the process. Here
the bytes of rows (values, codes, scales, norms) are read into a small buffer instead: each row
once, in the order of the file, with many reads in flight, which fast disks need. Everything rows
share (dictionaries, networks, bitmaps of bands) stays mapped. The rows equal those of ``fb.load``,
bit for bit.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError, MissingFileError
from featherbed.packed import bits, engine
from featherbed.packed.band import (
    DIRECTORY_STEP,
    Band,
    Codes,
    Fixed,
    Identity,
    Ids,
    Ragged,
    keeps_decoded,
)
from featherbed.packed.file import load
from featherbed.packed.matrix import CACHE_BYTES, Floats, Graded, Matrix
from featherbed.packed.table import PackedTable

WINDOW = 1024  # reads in flight
Piece = tuple[int, int, int]  # offset in the file, begin and end in the buffer


class RowFile:
    """An open file and the address of its mapping: reads bytes of mapped arrays from the file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise MissingFileError(f"{path}: no such file")
        self.path, self.base = path, 0
        self.descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def rows(self, array: NDArray[Any], positions: Ids) -> NDArray[Any]:
        """Read the rows [B, ...] at ascending positions of a mapped array [n, ...]."""
        length = array[:1].nbytes
        flat = self.read(array, positions * length, np.full(len(positions), length))
        return flat.view(array.dtype).reshape(len(positions), *array.shape[1:])

    def bit_ranges(self, stream: bits.Words, starts: Ids, counts: Ids) -> bits.Words:
        """Read ascending ranges of bits and join them to one stream."""
        first, last = starts >> 3, -(-(starts + counts) // 8)
        raw = self.read(stream, first, last - first)
        if np.any((starts | counts) & 7):
            sources = (np.cumsum(last - first) - (last - first)) * 8 + (starts & 7)
            shift = sources - (np.cumsum(counts) - counts)
            index = np.repeat(shift, counts) + np.arange(int(counts.sum()))
            raw = np.packbits(np.unpackbits(raw, bitorder="little")[index], bitorder="little")
        joined = np.zeros(bits.word_count(int(counts.sum()), 1), dtype="<u4")
        joined.view(np.uint8)[: len(raw)] = raw
        return joined

    def read(self, array: NDArray[Any], starts: Ids, lengths: Ids) -> NDArray[np.uint8]:
        """Read ranges of bytes of a mapped array; adjacent ranges are read at once."""
        ends = np.cumsum(lengths)
        buffer = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
        if not len(buffer):
            return buffer
        apart = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
        begins = (ends - lengths)[apart]
        offsets = starts[apart] + (array.ctypes.data - self.base)
        stops = [*begins[1:].tolist(), len(buffer)]
        self._fill(buffer.data, list(zip(offsets.tolist(), begins.tolist(), stops, strict=True)))
        return buffer

    def _fill(self, view: memoryview, pieces: list[Piece]) -> None:
        """Read cached pieces up to the first that is not; announce the others well before their
        read."""
        left = pieces[self._cached(view, pieces) :]
        if hasattr(os, "posix_fadvise"):
            for place, begin, end in left[:WINDOW]:
                os.posix_fadvise(self.descriptor, place, end - begin, os.POSIX_FADV_WILLNEED)
            for (place, begin, end), (later, first, last) in zip(left, left[WINDOW:], strict=False):
                os.posix_fadvise(self.descriptor, later, last - first, os.POSIX_FADV_WILLNEED)
                self._read_piece(view[begin:end], place)
            left = left[-WINDOW:]
        for place, begin, end in left:
            self._read_piece(view[begin:end], place)

    def _cached(self, view: memoryview, pieces: list[Piece]) -> int:
        """Read pieces from the page cache; return the number read before the first that is not
        there."""
        if not hasattr(os, "RWF_NOWAIT"):
            return 0
        for number, (place, begin, end) in enumerate(pieces):
            try:
                count = os.preadv(self.descriptor, [view[begin:end]], place, os.RWF_NOWAIT)
            except OSError:  # it would have to wait, or the file system cannot tell
                return number
            if count < end - begin:
                return number
        return len(pieces)

    def _read_piece(self, view: memoryview, place: int) -> None:
        while len(view):
            found = os.preadv(self.descriptor, [view], place)
            if found == 0:
                raise FormatError(
                    f"{self.path.name} ends at byte {place:,}: it was truncated after it was opened"
                )
            view, place = view[found:], place + found


class DiskBand(Band):
    """A band whose look-ups read the rows they need from the file."""

    source: RowFile

    def row_reader(self, compiled: bool) -> Callable[[int], Floats]:  # noqa: ARG002
        """Return a function that reads one row."""
        return lambda position: self.lookup(np.array([position]), np.array([position]))[0]

    def lookup(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d]
        """Read the rows at ``positions``, each once, and compose them."""
        if not len(positions):
            return super().lookup(ids, positions)
        distinct, at = np.unique(positions, return_inverse=True)
        with engine.as_loaded():
            return _read_band(self, distinct, self.source).lookup(ids, at)


def open_rows(path: str | Path) -> PackedTable:
    """Open a packed file as ``fb.load`` does, for look-ups that keep no rows in memory.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> bool((open_rows(path)[[4, 0, 4]] == fb.load(path)[[4, 0, 4]]).all())
    True
    """
    path = Path(path).absolute()
    while True:
        source = RowFile(path)
        table = load(path)
        if os.path.samestat(os.fstat(source.descriptor), path.stat()):  # else it was replaced
            break
    source.base = _mapping_address(table)
    for layer in (layer for band in table.bands for layer in band.layers):
        shared = layer.dictionary
        if shared is not None and not isinstance(layer.codes, Identity) and keeps_decoded(shared):
            shared._decoded = engine.on_line(shared.dense(), CACHE_BYTES)
    bands = []
    for band in table.bands:
        bands.append(DiskBand(**{field.name: getattr(band, field.name) for field in fields(Band)}))
        bands[-1].source = source
    return table.replace(bands=bands)


def _mapping_address(table: PackedTable) -> int:
    """Return the address at which the file of a table is mapped."""
    for array in table.arrays.values():
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if base is not None:
            return int(np.frombuffer(base, dtype=np.uint8).ctypes.data)
    return 0


def _read_band(band: Band, positions: Ids, source: RowFile) -> Band:
    """Return a band of the rows at ascending positions, read into memory, on the same
    dictionary."""
    dictionary, affine = band.dictionary, band.affine
    if isinstance(band.codes, Identity):
        dictionary = _read_rows(dictionary, positions, source)
    if affine is not None and affine.norms is not None:
        affine = replace(affine, norms=_read_rows(affine.norms, positions, source))
    return Band(
        len(positions),
        _read_codes(band.codes, positions, source),
        _read_rows(band.values, positions, source),
        dictionary,
        band.combine,
        band.cell,
        affine,
        plus=None if band.plus is None else _read_band(band.plus, positions, source),
    )


def _read_rows(matrix: Matrix | Graded | None, positions: Ids, source: RowFile) -> Matrix | None:
    if matrix is None:
        return None
    shape = (len(positions), matrix.shape[1])
    if isinstance(matrix, Graded):  # of a few kilobytes
        return Matrix("float32", shape, matrix.rows(positions))
    scale = matrix.scale
    if scale is not None and matrix.axis == 0:
        scale = source.rows(scale, positions)
    return Matrix(matrix.kind, shape, source.rows(matrix.data, positions), scale, matrix.axis)


def _read_codes(codes: Codes, positions: Ids, source: RowFile) -> Codes:
    if isinstance(codes, Ragged):
        return _read_ragged(codes, positions, source)
    if not isinstance(codes, Fixed):
        return codes
    size = codes.record_bits
    stream = source.bit_ranges(codes.stream, positions * size, np.full(len(positions), size))
    return replace(codes, rows=len(positions), stream=stream)


def _read_ragged(codes: Ragged, positions: Ids, source: RowFile) -> Ragged:
    """Read the number of codes of rows and where they begin, then the codes."""
    block, of = np.unique(positions // DIRECTORY_STEP, return_inverse=True)
    last = len(codes.directory) - 1
    begins = source.rows(codes.directory, block).astype(np.int64)
    ends = source.rows(codes.directory, np.minimum(block + 1, last)).astype(np.int64)
    ends[block == last] = codes.entries
    starts = block * DIRECTORY_STEP
    in_block = np.minimum(DIRECTORY_STEP, codes.rows - starts)  # fewer in the last block
    counts = source.bit_ranges(codes.counts, starts * codes.count_bits, in_block * codes.count_bits)
    slot = np.arange(len(block) * DIRECTORY_STEP).reshape(-1, DIRECTORY_STEP)
    inside = np.arange(DIRECTORY_STEP) < in_block[:, None]
    sizes = replace(codes, counts=counts).read_counts(np.where(inside, slot, 0)) * inside
    first, count = codes.spans_in_blocks(positions, sizes[of], begins[of], ends[of])
    size = codes.index_bits + codes.levels.bits
    return replace(
        codes,
        rows=len(positions),
        entries=int(count.sum()),
        counts=bits.pack(count.astype(np.uint32)[:, None], [codes.count_bits]),
        directory=(np.cumsum(count) - count)[::DIRECTORY_STEP].astype(codes.directory.dtype),
        stream=source.bit_ranges(codes.stream, first * size, count * size),
    )
