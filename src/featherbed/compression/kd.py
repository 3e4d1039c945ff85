"""K-way D-dimensional codes of an existing matrix, by auto-encoding: additive codes, then any composer of ``KDTable``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.coding import Codes, Encoder, learn_additive, least_squares
from featherbed.compression.method import Fit, Job, Method, Settings, matrix_size, stream_size
from featherbed.compression.rows import Floats
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.packed.band import Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix

if TYPE_CHECKING:
    from featherbed.tables.kd import KDTable

COMPOSERS = ("linear", "mlp", "recurrent", "lstm")
GATES = {"linear": 0, "mlp": 1, "recurrent": 4, "lstm": 8}  # matrices [d, d] of the cell


class KDCodes(Method):
    """``parts`` codes of ``bits`` bits over code vectors of full width, turned into rows by ``composer`` (see fb.KDTable)."""

    name = "kd"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        parts, bits, composer = settings["parts"], settings["bits"], settings["composer"]
        total = stream_size(rows, parts * bits) + matrix_size(settings["kind"], parts << bits, dim)
        if composer == "linear":
            return total
        biases = 5 if composer != "mlp" else 2
        return total + (GATES[composer] + 1) * matrix_size("float16", dim, dim) + 4 * biases * dim

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002 - one signature
        """Return the most parts that fit, for each composer and number of bits; the most bits of code first."""
        found: list[Settings] = []
        for composer in COMPOSERS:
            for bits in (8, 7, 6, 5, 4):
                fixed: Settings = {"bits": bits, "kind": "int8", "composer": composer}
                fitting = [
                    n for n in range(1, 33) if self.size(rows, dim, parts=n, **fixed) <= budget
                ]
                found += [{"parts": fitting[-1], **fixed}] if fitting and rows >= 2 << bits else []
        return sorted(
            found,
            key=lambda s: (
                COMPOSERS.index(s["composer"]),
                -s["parts"] * (s["bits"] + 0.02 * s["bits"] ** 2),
            ),
        )

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row."""
        return float(8 * (settings["parts"] << settings["bits"]) * (dim + 12 * settings["parts"]))

    def unless_asked(self) -> Settings:
        """Return the composer that is best for its bytes."""
        return {"composer": "linear"}

    def fit(self, job: Job, **settings: Any) -> Fit:
        """Compress the matrix."""
        if settings["composer"] not in COMPOSERS:
            raise ArgumentError(
                f"kd: composer={settings['composer']!r}: use one of {', '.join(COMPOSERS)}"
            )
        return KDFit(job, settings)


class KDFit(Fit):
    """The state of a fit: the mean, additive atoms and codes of the sample; the composer is fitted when bands are asked for."""

    refinable = True

    def __init__(self, job: Job, settings: Settings) -> None:
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtra("torch", "train", "method 'kd'") from None
        self.job, self.settings = job, settings
        self.parts, self.choices = settings["parts"], 1 << settings["bits"]
        self.ids = job.rows.draw(job.learn, job.generator)
        self.weights, rows = job.importance[self.ids], job.rows.take(self.ids)
        self.mean = np.average(rows, axis=0, weights=self.weights).astype(np.float32)
        self.sample: Floats = rows - self.mean
        job.tell("first dictionaries", 0.0)
        self.atoms, self.codes = learn_additive(
            self.sample, self.parts, self.choices, job.seed(), 4, self.weights
        )
        self.refine(4)

    def refine(self, rounds: int) -> None:
        """Alternate least-squares code vectors, rounded to what is stored, and codes by local search."""
        for done in range(rounds):
            self.job.tell("refining", done / rounds)
            atoms = least_squares(self.codes, self.sample, self.weights, self.choices)
            flat = atoms.reshape(-1, atoms.shape[2])
            stored = self._stored(flat + self.mean / self.parts).dense()
            self.atoms = (stored - self.mean / self.parts).reshape(atoms.shape).astype(np.float32)
            self.codes = Encoder(self.atoms)(self.sample, self.codes, seed=self.job.seed())

    def _stored(self, atoms: Floats) -> Matrix:
        return Matrix.encode(atoms, self.settings["kind"], scale_kind="float16")

    def _all_codes(self) -> Codes:
        rows = self.job.rows
        if len(self.ids) == rows.count:
            return self.codes
        codes = np.empty((rows.count, self.parts), dtype=np.int32)
        encoder = Encoder(self.atoms)
        for start, block in rows.blocks():
            self.job.tell("coding", start / rows.count)
            codes[start : start + len(block)] = encoder(block - self.mean, tries=2, seed=start)
        return codes

    def _table(self) -> KDTable:
        """Return a table of one row with the code vectors and the composer that fit the codes."""
        import torch

        from featherbed.tables.autoencode import fit_composer, set_composer
        from featherbed.tables.kd import KDTable

        composer, dim = self.settings["composer"], self.sample.shape[1]
        generator = torch.Generator().manual_seed(self.job.seed())
        shape: dict[str, Any] = {
            "choices": self.choices,
            "parts": self.parts,
            "composer": composer,
            "pool": "sum",
        }
        table = KDTable(1, dim, **shape, generator=generator)
        set_composer(table, self.atoms, self.mean, None)
        if composer != "linear":
            matrix, codes = (
                torch.from_numpy(self.sample + self.mean),
                torch.from_numpy(self.codes.astype(np.int64)),
            )
            fit_composer(table, matrix, codes, self.job.seed())
        return table

    def bands(self) -> list[Band]:
        """Return the packed form."""
        import torch

        with torch.no_grad():
            (band,) = self._table().bands("float32", "float32", "auto")
        assert band.dictionary is not None
        band = replace(
            band, rows=self.job.rows.count, dictionary=self._stored(band.dictionary.dense())
        )
        if band.cell is not None and band.affine is not None:
            band.cell = replace(
                band.cell, weight=_half(band.cell.weight), input=_half(band.cell.input)
            )
            band.affine = replace(band.affine, weight=_half(band.affine.weight))
        band.codes = Fixed.encode(self._all_codes(), None, self.choices, parts=True)
        return [band]


def _half(matrix: Matrix | None) -> Any:
    return None if matrix is None else Matrix.encode(matrix.dense(), "float16")
