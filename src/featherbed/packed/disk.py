"""A packed table whose rows are read from the file when asked for: for tables of hundreds of gigabytes.

``fb.load`` maps a file: the pages of all rows it has read stay in the process, with their neighbours if those are cached.
Here the bytes of rows (values, codes, scales, lengths) are read into a small buffer instead: each row once, in the order of
the file, with many reads under way at a time, since a fast disk is fast only then. What rows share (dictionaries, networks,
the bitmaps of bands) stays mapped. The rows are those of ``fb.load``, bit for bit.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import FormatError, MissingFileError
from featherbed.packed import bits, engine
from featherbed.packed.band import Band, keeps_decoded
from featherbed.packed.codes import DIRECTORY_STEP, Codes, Fixed, Identity, Ids, Ragged
from featherbed.packed.file import load
from featherbed.packed.graded import Graded
from featherbed.packed.matrix import CACHE_BYTES, Floats, Matrix
from featherbed.packed.table import PackedTable

WINDOW = 1024  # reads under way at a time
Piece = tuple[int, int, int]  # place in the file, begin and end in the buffer


class RowFile:
    """An open file and where its mapping lies in memory, so that the bytes of a mapped array can be read from the file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise MissingFileError(f"{path}: no such file")
        self.path, self.base = path, 0
        self.descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def rows(
        self, array: NDArray[Any], positions: Ids
    ) -> NDArray[Any]:  # [n, ...], [B] ascending -> [B, ...]
        """Read rows of a mapped array."""
        length = array[:1].nbytes
        flat = self.read(array, positions * length, np.full(len(positions), length))
        return flat.view(array.dtype).reshape(len(positions), *array.shape[1:])

    def bit_ranges(
        self, stream: bits.Words, starts: Ids, counts: Ids
    ) -> bits.Words:  # [B], [B] ascending -> words
        """Read ranges of bits and join them to one stream."""
        first, last = starts >> 3, -(-(starts + counts) // 8)
        raw = self.read(stream, first, last - first)
        if np.any((starts | counts) & 7):
            shift = (
                (np.cumsum(last - first) - (last - first)) * 8
                + (starts & 7)
                - (np.cumsum(counts) - counts)
            )
            wanted = np.repeat(shift, counts) + np.arange(int(counts.sum()))
            raw = np.packbits(np.unpackbits(raw, bitorder="little")[wanted], bitorder="little")
        joined = np.zeros(bits.word_count(int(counts.sum()), 1), dtype="<u4")
        joined.view(np.uint8)[: len(raw)] = raw
        return joined

    def read(self, array: NDArray[Any], starts: Ids, lengths: Ids) -> NDArray[np.uint8]:
        """Read the bytes of a mapped array from each start on, one after the other; neighbours are read as one."""
        ends = np.cumsum(lengths)
        buffer = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
        if not len(buffer):
            return buffer
        apart = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
        begins = (ends - lengths)[apart]
        places = starts[apart] + (array.ctypes.data - self.base)
        self._fill(
            buffer.data,
            [
                *zip(
                    places.tolist(),
                    begins.tolist(),
                    [*begins[1:].tolist(), len(buffer)],
                    strict=True,
                )
            ],
        )
        return buffer

    def _fill(self, view: memoryview, pieces: list[Piece]) -> None:
        """Read what is in memory up to the first piece that is not; then announce each piece well before it is waited for."""
        left = pieces[self._cached(view, pieces) :]
        if hasattr(os, "posix_fadvise"):
            for place, begin, end in left[:WINDOW]:
                os.posix_fadvise(self.descriptor, place, end - begin, os.POSIX_FADV_WILLNEED)
            for (place, begin, end), (later, first, last) in zip(left, left[WINDOW:], strict=False):
                os.posix_fadvise(self.descriptor, later, last - first, os.POSIX_FADV_WILLNEED)
                self._wait_for(view[begin:end], place)
            left = left[-WINDOW:]
        for place, begin, end in left:
            self._wait_for(view[begin:end], place)

    def _cached(self, view: memoryview, pieces: list[Piece]) -> int:
        """Read pieces that the system holds in memory; return how many were read before the first that it does not hold."""
        if not hasattr(os, "RWF_NOWAIT"):
            return 0
        for number, (place, begin, end) in enumerate(pieces):
            try:
                if (
                    os.preadv(self.descriptor, [view[begin:end]], place, os.RWF_NOWAIT)
                    < end - begin
                ):
                    return number
            except OSError:  # it would have to wait, or the file system cannot tell
                return number
        return len(pieces)

    def _wait_for(self, view: memoryview, place: int) -> None:
        while len(view):
            found = os.preadv(self.descriptor, [view], place)
            if found == 0:
                raise FormatError(
                    f"{self.path.name} ends at byte {place:,}: it was cut short after it was opened"
                )
            view, place = view[found:], place + found


@dataclass(eq=False)
class DiskBand(Band):
    """A band whose look-ups read the rows they need from the file."""

    source: RowFile | None = None

    def lookup(self, ids: Ids, positions: Ids) -> Floats:  # [B] -> [B, d]
        """Read the rows at ``positions``, each once, and compose them."""
        if not len(positions):
            return super().lookup(ids, positions)
        assert self.source is not None
        wanted, at = np.unique(positions, return_inverse=True)
        with engine.as_loaded():
            return _held(self, wanted, self.source).lookup(ids, at)


def open_rows(path: str | Path) -> PackedTable:
    """Open a packed file as ``fb.load`` does, for look-ups that read their rows from the file and keep none in memory.

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
        if os.path.samestat(
            os.fstat(source.descriptor), path.stat()
        ):  # else another file took its place meanwhile
            break
    source.base = _mapped_at(table)
    for layer in (layer for band in table.bands for layer in band.layers):
        shared = layer.dictionary
        if shared is not None and not isinstance(layer.codes, Identity) and keeps_decoded(shared):
            shared._decoded = engine.on_line(shared.dense(), CACHE_BYTES)
    bands: list[Band] = [
        DiskBand(**{f.name: getattr(band, f.name) for f in fields(Band)}, source=source)
        for band in table.bands
    ]
    return PackedTable(
        bands, table.dim, padding_idx=table.padding_idx, keys=table.keys, made_by=table.made_by
    )


def _mapped_at(table: PackedTable) -> int:
    """Return the address a table's file is mapped at."""
    for array in table.arrays.values():
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if base is not None:
            return int(np.frombuffer(base, dtype=np.uint8).ctypes.data)
    return 0


def _held(band: Band, positions: Ids, source: RowFile) -> Band:  # [B] ascending
    """Return a band of the rows at ``positions``, read into memory, over the same dictionary."""
    identity = isinstance(band.codes, Identity)
    return Band(
        len(positions),
        _codes(band.codes, positions, source),
        _matrix(band.values, positions, source),
        _matrix(band.dictionary, positions, source) if identity else band.dictionary,
        band.combine,
        band.cell,
        band.affine,
        None,
        _matrix(band.norms, positions, source),
        None if band.plus is None else _held(band.plus, positions, source),
    )


def _matrix(matrix: Matrix | Graded | None, positions: Ids, source: RowFile) -> Matrix | None:
    if matrix is None:
        return None
    shape = (len(positions), matrix.shape[1])
    if isinstance(matrix, Graded):  # of a few kilobytes
        return Matrix("float32", shape, matrix.rows(positions))
    scale = (
        matrix.scale
        if matrix.scale is None or matrix.axis == 1
        else source.rows(matrix.scale, positions)
    )
    return Matrix(matrix.kind, shape, source.rows(matrix.data, positions), scale, matrix.axis)


def _codes(codes: Codes, positions: Ids, source: RowFile) -> Codes:
    if isinstance(codes, Ragged):
        return _ragged(codes, positions, source)
    if not isinstance(codes, Fixed):
        return codes
    size = codes.record_bits
    stream = source.bit_ranges(codes.stream, positions * size, np.full(len(positions), size))
    return replace(codes, rows=len(positions), stream=stream)


def _ragged(codes: Ragged, positions: Ids, source: RowFile) -> Ragged:
    """Read first how many codes the rows have and where these begin, then the codes."""
    block, of = np.unique(positions // DIRECTORY_STEP, return_inverse=True)
    last = len(codes.directory) - 1
    begins = source.rows(codes.directory, block).astype(np.int64)
    ends = source.rows(codes.directory, np.minimum(block + 1, last)).astype(np.int64)
    ends[block == last] = codes.entries
    in_block = (
        np.minimum(DIRECTORY_STEP, codes.rows - block * DIRECTORY_STEP) * codes.count_bits
    )  # less in the last one only
    counts = source.bit_ranges(codes.counts, block * DIRECTORY_STEP * codes.count_bits, in_block)
    slot = np.arange(len(block) * DIRECTORY_STEP).reshape(-1, DIRECTORY_STEP)
    inside = block[:, None] * DIRECTORY_STEP + np.arange(DIRECTORY_STEP) < codes.rows
    sizes = (
        bits.unpack(counts, np.where(inside, slot, 0) * codes.count_bits, codes.count_bits).astype(
            np.int64
        )
        * inside
    )
    first, count = codes.placed(positions, sizes[of], begins[of], ends[of])
    size = codes.index_bits + codes.levels.bits
    return replace(
        codes,
        rows=len(positions),
        entries=int(count.sum()),
        counts=bits.pack(count.astype(np.uint32)[:, None], [codes.count_bits]),
        directory=(np.cumsum(count) - count)[::DIRECTORY_STEP].astype(codes.directory.dtype),
        stream=source.bit_ranges(codes.stream, first * size, count * size),
    )
