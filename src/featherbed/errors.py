"""Every error featherbed raises on purpose.

::

    FeatherbedError
    ├── ArgumentError        (ValueError)    a setting that cannot work
    ├── IdError              (IndexError)    an id outside the table, or no integer at all
    ├── UnknownKeyError      (KeyError)      a key the file does not hold
    ├── DataError            (ValueError)    an input file that is damaged or of another format
    ├── FormatError          (ValueError)    a packed file that breaks its specification
    ├── MissingFileError     (FileNotFoundError)   a file or folder that is not there
    ├── IsFolderError        (IsADirectoryError)   a folder where a file should be
    ├── NotPackable          (TypeError)     a table that has no packed form
    ├── MissingExtra         (ImportError)   an optional dependency is not installed
    └── TrainingError        (RuntimeError)  training that cannot end with a model

``FeatherbedWarning`` (UserWarning) is for results that are valid but probably not intended.
"""

from __future__ import annotations

from collections.abc import Iterable


class FeatherbedError(Exception):
    """The root of all errors raised on purpose."""


class FeatherbedWarning(UserWarning):
    """A result that is valid but probably not the one intended: the message says what happened and
    why."""


class ArgumentError(FeatherbedError, ValueError):
    """A setting that cannot work: the message says what was given, what is accepted and what to
    do."""


class IdError(FeatherbedError, IndexError):
    """An id that is negative, too large or not an integer."""


class UnknownKeyError(FeatherbedError, KeyError):
    """Keys that the packed file does not hold: ``keys`` has all, the message names the first."""

    def __init__(self, message: str = "", keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DataError(FeatherbedError, ValueError):
    """An input file that is missing, empty or not of the expected form."""


class FormatError(FeatherbedError, ValueError):
    """A packed file that is truncated, inconsistent or of an unknown version."""


class MissingFileError(FeatherbedError, FileNotFoundError):
    """A file to be opened, or a member of a folder, that is not there."""


class IsFolderError(FeatherbedError, IsADirectoryError):
    """A folder where a file should be."""


class NotPackable(FeatherbedError, TypeError):  # noqa: N818 - reads as a statement about the table
    """A table that has no packed form."""


class MissingExtra(FeatherbedError, ImportError):  # noqa: N818 - named after the missing package
    """An optional dependency that is not installed; the message holds the command that installs
    it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        how = f'pip install "featherbed[{extra}]"'
        if package == "torchrec":  # its metadata asks for the CUDA build of what it needs
            how += " and then pip install --no-deps torchrec==1.8.0"
        super().__init__(f"{purpose} needs {package}: {how}")


class TrainingError(FeatherbedError, RuntimeError):
    """Training that cannot end with a model: a penalty has set every weight to zero. Commands end
    with exit code 1."""
