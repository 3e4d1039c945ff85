"""Residual and local-search codes as faiss learns them: row ≈ Σ_m C_m[b_m]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from featherbed.coding import Codes, Encoder, enough
from featherbed.compression.layered import Basis, LayeredFit
from featherbed.compression.method import Fit, Job, Method, Settings, matrix_size, stream_size
from featherbed.compression.rows import Floats

BEAM = 16
ITERATIONS = 25
MOST_LOCAL = 16  # local search learns so slowly beyond that nobody would wait for it


class Additive(Method):
    """``codes`` codes of ``bits`` bits over dictionaries of full width; "rq" learns stage by stage, "lsq" by local search."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        codes, bits = settings["codes"], settings["bits"]
        return stream_size(rows, codes * bits) + matrix_size(settings["kind"], codes << bits, dim)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return the most codes that fit, for each number of bits and kind of dictionary; the most bits of code first."""
        found = []
        for bits in (8, 7, 6, 5, 4):
            for kind in ("int8", "float16"):
                shapes: list[Settings] = [
                    {"codes": n, "bits": bits, "kind": kind} for n in range(1, 65)
                ]
                fitting = [
                    s for s in shapes if self.size(rows, dim, **s) <= budget and rows >= 2 << bits
                ]
                found += (
                    fitting[-1:]
                    if self.name == "rq" or (fitting and fitting[-1]["codes"] <= MOST_LOCAL)
                    else []
                )
        return sorted(found, key=lambda s: -s["codes"] * (s["bits"] + 0.02 * s["bits"] ** 2))

    def work(self, dim: int, **settings: Any) -> float:
        """Return how long a fit takes for each row: local search takes the longer the more codes there are."""
        return float(
            (18 if self.name == "rq" else 40 * settings["codes"]) * dim * settings["codes"]
            << settings["bits"]
        )

    def fit(self, job: Job, **settings: Any) -> Fit:
        """Compress the matrix."""
        return AdditiveFit(job, settings | {"learn": self.name})


class AdditiveFit(LayeredFit):
    """Codes over the columns as they are; faiss learns and finds them until the first refinement."""

    def begin(self) -> Basis:
        """The columns as they are."""
        return Basis()

    def first_codes(self) -> None:
        """Let faiss learn the dictionaries and find the codes."""
        import faiss

        dim, parts, bits = self.sample.shape[1], self.parts, self.bits
        quantiser: Any
        if self.settings["learn"] == "rq":
            quantiser = faiss.ResidualQuantizer(dim, parts, bits)
            iterations, beam = (8, 4) if self.job.quick else (ITERATIONS, BEAM)
            quantiser.cp.niter, quantiser.cp.seed, quantiser.max_beam_size = (
                iterations,
                self.job.seed() + 1,
                beam,
            )
            quantiser.cp.min_points_per_centroid = 1
        else:
            quantiser = faiss.LocalSearchQuantizer(dim, parts, bits)
            quantiser.train_iters, quantiser.random_seed = ITERATIONS, self.job.seed() + 1
        quantiser.train(enough(self.sample, max(1 << bits, dim)))
        self.quantiser = quantiser
        self.atoms = (
            faiss.vector_to_array(quantiser.codebooks).reshape(parts, 1 << bits, dim).copy()
        )
        self.store_atoms()
        self.codes = self._by_faiss(self.sample)

    def _by_faiss(self, rows: Floats, *_given: Any, **_more: Any) -> Codes:
        packed = self.quantiser.compute_codes(rows)
        spread = np.unpackbits(packed, axis=1, bitorder="little")[:, : self.parts * self.bits]
        fields = spread.reshape(len(rows), self.parts, self.bits).astype(np.int32)
        codes: Codes = (fields << np.arange(self.bits, dtype=np.int32)).sum(axis=2, dtype=np.int32)
        return codes

    def encoder(self) -> Callable[..., Codes]:
        """Return faiss's search before any refinement, ours after it: the dictionaries are then others."""
        return Encoder(self.atoms) if self.round else self._by_faiss
