"""Additive codes: row ≈ Σ_m C_m[b_m], residual ("rq"), by local search ("lsq"), or layered.

Layered codes are additive codes fitted together, and codes of their residual in blocks of columns:

row ≈ (Σ_m C_m[b_m] + [S[k_1], ..., S[k_n]]) W + mean

The first layer is additive quantization (codes by local search, dictionaries by least squares:
Martinez et al. 2016). Its residual has nearly the same distribution in all directions, so that the
second layer needs one small dictionary S for all blocks of columns. W is an orthogonal basis of the
leading principal directions, rotated at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import (
    AdditiveEncoder,
    Codes,
    decode,
    enough,
    kmeans,
    least_squares,
    mean_square,
    move_centroids,
    nearest,
)
from featherbed.codecs.principal import principal
from featherbed.codecs.rows import Floats
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.packed.matrix import Matrix

BEAM = 16
ITERATIONS = 25
MOST_LOCAL = 16  # codes above which a fit by local search takes too long
ROUNDS = 3  # of additive codes alone in an initial fit; one of both layers follows
ENOUGH = 0.0015  # share of the error: a round that gains less is the last
MOST_STAGES = 24
ROUGH = 1.2  # precision of predicted errors: shapes of any kind within it are worth a fit
USUAL_BITS = 8  # of additive codes
LEAST_BITS = 7  # fewer never won where two dictionaries are less than an eighth of the budget
GAIN, MOST_GAIN = 0.04, 0.16  # of local search over stages, in log2 of the error: a code, all codes
PIECES = 16  # blocks of all rows for each choice, at least
FEW_PIECES = 1 << 17  # blocks for which k-means stops early: further rounds follow anyway
PAIRS = 0.2  # further loss of blocks of two columns, whose residual is far from normal
# of additive codes, by bits
EFFICIENCY = {12: 1.2, 10: 1.15, 8: 1.05, 7: 1.0, 6: 0.93, 5: 0.85, 4: 0.78}


class LayeredCodec(Codec):
    """``codes`` additive codes of ``bits`` bits, then ``blocks`` codes of ``block_bits`` bits.

    The codes of blocks share one dictionary.
    """

    name = "layered"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        codes, width = settings["codes"], settings["width"]
        blocks, block_bits = settings["blocks"], settings["block_bits"]
        total = stream_size(rows, codes * settings["bits"])
        total += matrix_size(settings["kind"], codes << settings["bits"], width)
        if blocks or width < dim:
            total += 4 * dim + matrix_size("float16", width, dim)
        if blocks:
            total += stream_size(rows, blocks * block_bits)
            total += matrix_size("int8", 1 << block_bits, width // blocks, "column", 4)
        return total

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return the best block layer for each number of additive codes, by estimated error."""
        found: list[Settings] = []
        layers = block_layers(rank, dim)
        least = LEAST_BITS if rank << LEAST_BITS < budget / 16 else min(EFFICIENCY)
        for bits in EFFICIENCY:
            if rows < 8 << bits or (bits < least and found):  # few rows allow fewer
                continue
            for codes in range(1, MOST_STAGES + 1 if bits <= 8 else 2):
                fixed = {"codes": codes, "bits": bits, "kind": "int8"}
                fitting = (
                    fixed | layer
                    for layer in layers
                    if not 0 < rows * layer["blocks"] < PIECES << layer["block_bits"]
                    and self.size(rows, dim, **fixed, **layer) <= budget
                )
                best = next(fitting, None)
                if best is None:
                    break
                found.append(best)
        return sorted(found, key=lambda s: estimated_log_error(s, rank))

    def predict(self, job: CodecJob, **settings: Any) -> float:
        """Return the expected error, from the residual of as many stages of k-means.

        Stages of the usual number of bits stand for others of as many bits in all. Codes by local
        search and least-squares dictionaries gain on stages, the more the more stages there are.
        """
        codes, bits = int(settings["codes"]), int(settings["bits"])
        usual = USUAL_BITS if job.rows.count >= 8 << USUAL_BITS else bits
        share = bits * efficiency(bits) / (usual * efficiency(usual))  # of a usual stage
        whole, part = divmod(codes * share, 1.0)
        stages = job.stages(usual)
        stages.atoms(math.ceil(whole + part))
        before, after = stages.errors[int(whole)], stages.errors[math.ceil(whole + part)]
        residual = before * (max(after, 1e-30) / max(before, 1e-30)) ** part
        gain = min(MOST_GAIN, GAIN * (codes - 1))
        return float(residual) * math.exp2(block_log_error(settings) - gain)

    def order(self, job: CodecJob, listed: list[Settings]) -> list[Settings]:
        """Return settings by the error that residuals of these rows and their blocks predict.

        Stages are fitted as long as they may still lower the error.
        """
        found: list[tuple[float, Settings]] = []
        least = math.inf
        for bits in dict.fromkeys(settings["bits"] for settings in listed):
            since = 0
            own = sorted((s for s in listed if s["bits"] == bits), key=lambda s: s["codes"])
            for settings in own:
                error = self.predict(job, **settings)
                found.append((error, settings))
                since = 0 if error < least else since + 1
                least = min(error, least)
                if since > 4 and bits >= LEAST_BITS:  # few bits take many codes, of few rows
                    break
        found.sort(key=lambda pair: pair[0])
        first: dict[int, Settings] = {}  # the prediction is rough: few and many codes come first
        for error, settings in found:
            if error < ROUGH * least:
                first.setdefault(math.isqrt(settings["codes"]), settings)
        return [*first.values(), *(s for _, s in found if s not in first.values())]

    def work(self, dim: int, **settings: Any) -> float:  # noqa: ARG002 - the rank counts
        """Return the work of a fit for each row: initial dictionaries, then codes by local
        search."""
        codes, atoms = settings["codes"], settings["codes"] << settings["bits"]
        blocks = settings["width"] << settings["block_bits"] if settings["blocks"] else 0
        search = 0 if codes == 1 else 4 * atoms * (settings["width"] + 60)
        return float(20 * atoms * settings["width"] + search + 16 * blocks)

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with the width of the blocks; no blocks if their number or bits are 0."""
        blocks, bits = settings["blocks"], settings["block_bits"]
        if blocks > dim:
            raise ArgumentError(
                f"layered: blocks={blocks}: {dim} columns make at most {dim} blocks"
            )
        if not blocks or not bits:
            return settings | {"width": dim, "blocks": 0, "block_bits": 0}
        return settings | {"width": blocks * -(-rank // blocks)}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return LayeredFit(job, settings)

    def grow(self, start: Fit, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix with the dictionaries of a fit to a sample, which are then
        refined."""
        assert isinstance(start, LayeredFit)
        return LayeredFit(job, settings, start)


def block_layers(rank: int, dim: int) -> list[Settings]:
    """Return the possible second layers, the most precise first and none last.

    Without blocks the rows may be coded as they are, which takes no basis.
    """
    found: list[Settings] = [
        {"width": width, "blocks": 0, "block_bits": 0} for width in dict.fromkeys((dim, rank))
    ]
    for across in range(2, min(rank, 24) + 1):
        blocks = -(-rank // across)
        found += [
            {"width": across * blocks, "blocks": blocks, "block_bits": bits}
            for bits in range(4, min(12, 4 * across) + 1)
        ]
    return sorted(found, key=block_log_error)


def efficiency(bits: int) -> float:
    """Return the efficiency of additive codes of ``bits`` bits, that of the nearest known number.

    >>> efficiency(8), efficiency(4), efficiency(11)
    (1.05, 0.78, 1.2)
    """
    return EFFICIENCY[min(EFFICIENCY, key=lambda known: (abs(known - bits), -known))]


def estimated_log_error(settings: Settings, rank: int) -> float:
    """Return an estimate of log2 of the error before anything is fitted: 2 bits / dimensions."""
    codes, bits = int(settings["codes"]), int(settings["bits"])
    rate = 2 * codes * bits / rank
    return -0.3 - rate * efficiency(bits) * (1.08 - 0.02 * codes) + block_log_error(settings)


def block_log_error(settings: Settings) -> float:
    """Return log2 of the share of the residual that the blocks leave, 2^(-2 bits / columns) at
    best.

    The loss is that of k-means on normal variables (2 to 20 columns, 4 to 10 bits).
    """
    if not settings["blocks"]:
        return 0.0
    across, bits = settings["width"] / settings["blocks"], settings["block_bits"]
    rate = bits / across
    further = PAIRS if across < 3 else 0.0
    return float(-2 * rate + (0.8 + 0.2 * bits + 0.09 * across) / across + further)


@dataclass
class Basis:
    """An orthogonal basis of the leading directions: y = (x - mean) weight^T, x ≈ y weight +
    mean."""

    weight: Floats | None = None  # [width, d], as stored; None: the identity
    mean: Floats | None = None  # [d]

    def down(self, rows: Floats) -> Floats:  # [n, d] -> [n, width]
        """Return rows in the basis."""
        if self.weight is None or self.mean is None:
            return rows
        inside: Floats = np.dot(rows - self.mean, self.weight.T)
        return inside

    @property
    def affine(self) -> Affine | None:
        """The stored map back to rows."""
        if self.weight is None:
            return None
        return Affine(Matrix.encode(self.weight, "float16"), self.mean)


def basis_of(job: CodecJob, width: int) -> Basis:
    """Return the ``width`` principal directions by importance, rotated at random."""
    mean, top = principal(job, width)
    rotation, _ = np.linalg.qr(job.generator.standard_normal((width, width)))
    weight = (rotation[:, : len(top)] @ top).astype(np.float16).astype(np.float32)
    return Basis(weight, mean)


class LayeredFit(Fit):
    """The state of a layered fit: dictionaries, and the codes of the training rows."""

    refinable = True

    basis: Basis
    dictionary: Matrix
    atoms: Floats  # [M, K, width], as stored

    def __init__(self, job: CodecJob, settings: Settings, start: LayeredFit | None = None) -> None:
        self.job, self.settings = job, settings
        self.parts, self.bits = settings["codes"], settings["bits"]
        self.blocks = settings.get("blocks", 0)
        self.basis = self.choose_basis() if start is None else start.basis
        self.sample = self.basis.down(job.rows.take(job.training))
        self.weights = job.importance[job.training]
        self.tail: Floats = np.zeros_like(self.sample[:1])
        self.shared: Matrix | None = None
        self.tail_codes: Codes | None = None
        self.refined = False
        self.promise = 1 - min(0.06, 0.01 * (self.parts - 1))
        job.progress("initial dictionaries", 0.0)
        if start is None:
            self.initial_codes()
        else:
            self.dictionary, self.atoms, self.shared = start.dictionary, start.atoms, start.shared
            self.codes: Codes = AdditiveEncoder(self.atoms)(self.sample, seed=job.seed())
            self._alternate(0, 1 if self.blocks else 0)

    def choose_basis(self) -> Basis:
        """Return the basis; the identity where there are no blocks to be made equal."""
        width = self.settings["width"]
        if not self.blocks and width == self.job.rows.dim:
            return Basis()
        return basis_of(self.job, width)

    def initial_codes(self) -> None:
        """Fit the initial dictionaries and codes."""
        stages = self.job.stages(self.bits).atoms(self.parts)
        weight = self.basis.weight
        self.store_atoms(stages if weight is None else np.dot(stages, weight.T))
        self.codes = AdditiveEncoder(self.atoms)(self.sample, seed=self.job.seed())
        self._alternate(ROUNDS, 1 if self.blocks else 0)

    def store_atoms(self, atoms: Floats) -> None:  # [M, K, width]
        """Round the atoms as stored: codes are then found for the rounded ones."""
        flat = atoms.reshape(-1, atoms.shape[2])
        self.dictionary = Matrix.encode(flat, self.settings["kind"], scale_kind="float16")
        self.atoms = self.dictionary.dense().reshape(atoms.shape)

    def refine(self, rounds: int) -> None:
        """Alternate least-squares atoms and codes by local search, in the last rounds with
        blocks."""
        self.refined = True
        together = (rounds + 1) // 2 if self.blocks else 0
        self._alternate(rounds - together if self.parts > 1 else 0, together)

    def _alternate(self, alone: int, together: int) -> None:
        """Fit the additive codes to the rows, then both layers to each other."""
        for first, rounds, joint in ((0, alone, False), (alone, together, self.blocks > 0)):
            error = math.inf
            if joint and rounds:
                self._fit_blocks(self.sample - decode(self.codes, self.atoms))
            for done in range(rounds):
                self.job.progress("refining", (first + done) / (alone + together))
                self._move_atoms(self.sample - self.tail if joint else self.sample)
                left = self.sample - decode(self.codes, self.atoms)
                if joint:
                    self._fit_blocks(left)
                    left -= self.tail
                before, error = error, mean_square(left, self.weights)
                if before - error < ENOUGH * before or self.job.late():
                    break

    def _move_atoms(self, target: Floats) -> None:
        """Find least-squares atoms of the codes, then codes of these atoms."""
        self.store_atoms(least_squares(self.codes, target, self.weights, 1 << self.bits))
        self.codes = AdditiveEncoder(self.atoms)(target, self.codes, seed=self.job.seed())

    def _fit_blocks(self, left: Floats) -> None:
        """Fit the dictionary of the blocks to the residuals of the additive codes: one step of
        k-means."""
        choices, across = 1 << self.settings["block_bits"], left.shape[1] // self.blocks
        pieces = np.ascontiguousarray(left).reshape(-1, across)
        if self.shared is None:
            rounds = 12 if len(pieces) > FEW_PIECES else 6
            centroids = kmeans(pieces, choices, self.job.seed(), rounds=rounds)
        else:
            known = self.shared.dense()
            weights = np.repeat(self.weights, self.blocks)
            centroids = move_centroids(known, nearest(pieces, known), pieces, weights)
        self.shared = Matrix.encode(centroids, "int8", "column")
        self.tail_codes = nearest(pieces, self.shared.dense()).reshape(-1, self.blocks)
        self.tail = self.shared.dense()[self.tail_codes].reshape(left.shape)

    def encoder(self) -> Callable[..., Codes]:
        """Return the function that codes further rows."""
        return AdditiveEncoder(self.atoms)

    def _encode_all(self) -> tuple[NDArray[np.integer], NDArray[np.integer] | None]:
        """Return the codes of every row of the matrix."""
        rows = self.job.rows
        if len(self.sample) == rows.count:
            return self.codes, self.tail_codes
        kind = np.uint8 if self.bits <= 8 else np.uint16
        codes = np.empty((rows.count, self.parts), dtype=kind)
        tails = np.empty((rows.count, self.blocks), dtype=np.uint16) if self.blocks else None
        encoder = self.encoder()
        for place, block in self.job.blocks():
            inside = self.basis.down(block)
            found = encoder(inside, seed=place.start)
            if tails is not None and self.shared is not None:
                shared, across = self.shared.dense(), inside.shape[1] // self.blocks
                if self.parts > 1:
                    left = inside - decode(found, self.atoms)
                    tail = shared[nearest(left.reshape(-1, across), shared)].reshape(left.shape)
                    found = encoder(inside - tail, found, tries=1, seed=place.start)
                left = inside - decode(found, self.atoms)
                tails[place] = nearest(left.reshape(-1, across), shared).reshape(-1, self.blocks)
            codes[place] = found
        return codes, tails

    def bands(self) -> list[Band]:
        """Return the packed form."""
        codes, tails = self._encode_all()
        count, plus = self.job.rows.count, None
        if tails is not None and self.shared is not None:
            coded = Fixed.encode(tails, None, self.shared.shape[0])
            plus = Band(count, coded, dictionary=self.shared, combine="concat")
        first = Fixed.encode(codes, None, 1 << self.bits, parts=True)
        return [Band(count, first, dictionary=self.dictionary, affine=self.basis.affine, plus=plus)]


class AdditiveCodec(Codec):
    """``codes`` codes of ``bits`` bits, fitted stage by stage ("rq") or by local search ("lsq")."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        codes, bits = settings["codes"], settings["bits"]
        return stream_size(rows, codes * bits) + matrix_size(settings["kind"], codes << bits, dim)

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return the most codes that fit for each number of bits and kind of dictionary."""
        found = []
        for bits in (8, 7, 6, 5, 4):
            for kind in ("int8", "float16"):
                shapes = [{"codes": n, "bits": bits, "kind": kind} for n in range(1, 65)]
                shapes = [s for s in shapes if self.size(rows, dim, **s) <= budget]
                best: list[Settings] = shapes[-1:] if rows >= 2 << bits else []
                found += [s for s in best if self.name == "rq" or s["codes"] <= MOST_LOCAL]
        return sorted(found, key=lambda s: -s["codes"] * (s["bits"] + 0.02 * s["bits"] ** 2))

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row: local search is slow for many codes."""
        codes = settings["codes"]
        return float((60 if self.name == "rq" else 40 * codes) * dim * codes << settings["bits"])

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return AdditiveFit(job, settings | {"learn": self.name})


class AdditiveFit(LayeredFit):
    """Codes of the rows themselves, fitted by faiss until the first refinement."""

    def choose_basis(self) -> Basis:
        """Return the identity."""
        return Basis()

    def initial_codes(self) -> None:
        """Fit dictionaries and codes by faiss."""
        import faiss

        dim, parts, bits = self.sample.shape[1], self.parts, self.bits
        quantizer: Any
        if self.settings["learn"] == "rq":
            quantizer = faiss.ResidualQuantizer(dim, parts, bits)
            quantizer.cp.niter, quantizer.max_beam_size = ITERATIONS, BEAM
            quantizer.cp.seed, quantizer.cp.min_points_per_centroid = self.job.seed() + 1, 1
        else:
            quantizer = faiss.LocalSearchQuantizer(dim, parts, bits)
            quantizer.train_iters, quantizer.random_seed = ITERATIONS, self.job.seed() + 1
        quantizer.train(enough(self.sample, max(1 << bits, dim)))
        self.quantizer = quantizer
        codebooks = faiss.vector_to_array(quantizer.codebooks)
        self.store_atoms(codebooks.reshape(parts, 1 << bits, dim))
        self.codes = self._by_faiss(self.sample)

    def _by_faiss(self, rows: Floats, *_given: Any, **_more: Any) -> Codes:
        packed = self.quantizer.compute_codes(rows)
        flat = np.unpackbits(packed, axis=1, bitorder="little")[:, : self.parts * self.bits]
        fields = flat.reshape(len(rows), self.parts, self.bits).astype(np.int32)
        codes: Codes = (fields << np.arange(self.bits, dtype=np.int32)).sum(axis=2, dtype=np.int32)
        return codes

    def encoder(self) -> Callable[..., Codes]:
        """Return the search of faiss before any refinement, ours for refined dictionaries."""
        return AdditiveEncoder(self.atoms) if self.refined else self._by_faiss
