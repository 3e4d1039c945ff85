"""Text files as strings: decompressed, decoded, with unified line ends."""

from __future__ import annotations

from pathlib import Path

from featherbed.errors import ArgumentError, DataError
from featherbed.io.opening import READ_ERRORS, open_compressed

BLOCK = 1 << 20  # bytes read at once
MAX_BYTES = 1 << 28  # bytes that any compressed file may expand to
MAX_RATIO = 200  # larger files may expand to this many times their size

_BINARY = {
    b"\xff\xfe": "UTF-16 text: give --set data.encoding=utf-16, or save it as UTF-8",
    b"\xfe\xff": "UTF-16 text: give --set data.encoding=utf-16, or save it as UTF-8",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file: write it as CSV or JSON lines",
}


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file, decompressed and decoded; all line ends become newlines.

    >>> import gzip
    >>> path = getfixture("tmp_path") / "a.txt.gz"
    >>> _ = path.write_bytes(gzip.compress(b"one\\r\\ntwo\\n"))
    >>> read_text(path)
    'one\\ntwo\\n'
    """
    try:
        return _decode(path, _read_bytes(path), encoding)
    except MemoryError:
        raise DataError(
            f"{path} does not fit into memory: give a smaller file, or parts of it"
        ) from None


def _decode(path: Path, data: bytearray, encoding: str | None) -> str:
    kind = next((kind for magic, kind in _BINARY.items() if data.startswith(magic)), "")
    if kind and encoding is None:
        raise DataError(f"{path} is {kind}")
    try:
        text = data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} at offset {error.start:,} is not "
            f"{encoding or 'UTF-8'} text: give --set data.encoding=NAME, such as latin-1"
        ) from None
    except LookupError:
        raise ArgumentError(
            f"encoding={encoding!r} is not known: give a name such as utf-8 or latin-1"
        ) from None
    if "\0" in text:
        line = 1 + text.count("\n", 0, text.index("\0"))
        raise DataError(
            f"{path}, line {line}: a zero byte; this is not text: give a text file, or its encoding"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(path: Path) -> bytearray:
    data, compression = bytearray(), ""
    try:
        with path.open("rb") as raw:
            stream, compression = open_compressed(raw)
            limit = max(MAX_BYTES, MAX_RATIO * path.stat().st_size)
            while block := stream.read(BLOCK):
                data += block
                if compression and len(data) > limit:
                    raise DataError(
                        f"{path} decompresses to more than {limit:,} bytes, {MAX_RATIO} times its "
                        "size, as no text does: decompress it first if it is text"
                    )
    except DataError:
        raise
    except READ_ERRORS as error:
        problem = f"is not a complete {compression} file" if compression else "cannot be read"
        raise DataError(f"{path} {problem} ({str(error)[:100]}): get it again") from None
    return data
