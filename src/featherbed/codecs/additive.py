"""Additive codes: row ≈ Σ_m C_m[b_m], residual ("rq"), by local search ("lsq"), or layered.

Layered codes: additive codes learnt together, and what they leave in blocks over one shared dictionary.

row ≈ (Σ_m C_m[b_m] + [S[k_1], ..., S[k_n]]) W + mean

The first layer is additive quantisation (codes by local search, dictionaries by least squares: Martinez et al. 2016). What it
leaves is nearly the same in all directions, so that the second layer needs one small dictionary S for all blocks of columns
instead of one for each. W is an orthogonal basis of the columns that carry the matrix, turned at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import Encoder, decode, least_squares, residual_start
from featherbed.codecs.kmeans import Codes, enough, kmeans, nearest
from featherbed.codecs.principal import principal
from featherbed.codecs.rows import Floats
from featherbed.errors import ArgumentError
from featherbed.packed.band import Affine, Band
from featherbed.packed.codes import Fixed
from featherbed.packed.matrix import Matrix

BEAM = 16
ITERATIONS = 25
MOST_LOCAL = 16  # codes beyond which local search takes too long to learn
START = 30_000  # rows the first codebooks are learnt from
ROUNDS = 8
TOGETHER = 3  # rounds of a refinement in which both layers are fitted to each other
EFFICIENCY = {
    12: 1.2,
    10: 1.15,
    8: 1.05,
    7: 1.0,
    6: 0.93,
    5: 0.85,
}  # of additive codes, by their bits


class LayeredCodec(Codec):
    """``codes`` additive codes of ``bits`` bits, then ``blocks`` codes of ``block_bits`` bits over a shared dictionary."""

    name = "layered"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays these settings make."""
        codes, width = settings["codes"], settings["width"]
        blocks, block_bits = settings["blocks"], settings["block_bits"]
        total = stream_size(rows, codes * settings["bits"]) + matrix_size(
            settings["kind"], codes << settings["bits"], width
        )
        total += 4 * dim + matrix_size("float16", width, dim)
        if blocks:
            total += stream_size(rows, blocks * block_bits) + matrix_size(
                "int8", 1 << block_bits, width // blocks, "column", 4
            )
        return total

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:
        """Return for each number of additive codes the block layer that promises least error, best promise first."""
        found = []
        for bits in EFFICIENCY:
            if rows < 8 << bits:
                continue
            for codes in range(1, 25 if bits <= 8 else 2):
                fitting = [
                    s
                    for s in self._shapes(codes, bits, rank)
                    if self.size(rows, dim, **s) <= budget
                ]
                if fitting:
                    found.append(min(fitting, key=lambda s: promise(s, rank)))
        best: dict[
            tuple[int, int], Settings
        ] = {}  # of each number of codes: the promise is too rough to tell near ones apart
        for settings in sorted(found, key=lambda s: promise(s, rank)):
            best.setdefault((settings["codes"], max(8, settings["bits"])), settings)
        return list(best.values())

    def _shapes(self, codes: int, bits: int, rank: int) -> list[Settings]:
        """Return the ways to go on after ``codes`` additive codes: no blocks, or blocks of any width and bits."""
        fixed = {"codes": codes, "bits": bits, "kind": "int8"}
        shapes: list[Settings] = [{**fixed, "width": rank, "blocks": 0, "block_bits": 0}]
        for across in range(2, min(rank, 24) + 1):
            blocks = -(-rank // across)
            most = min(12, 4 * across)
            shapes += [
                {**fixed, "width": across * blocks, "blocks": blocks, "block_bits": n}
                for n in range(4, most + 1)
            ]
        return shapes

    def work(self, dim: int, **settings: Any) -> float:  # noqa: ARG002 - the rank counts
        """Return how long a fit takes for each row: finding the first dictionaries, then codes by local search."""
        codes, atoms = settings["codes"], settings["codes"] << settings["bits"]
        blocks = settings["blocks"] * (1 << settings["block_bits"])
        if codes == 1:
            return float(0.5 * atoms * settings["width"] + 6 * blocks)
        return float(8 * atoms * (settings["width"] + 12 * codes) + 8 * blocks)

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings with the width that belongs to the blocks; blocks without bits, or bits without blocks, are none."""
        blocks, bits = settings["blocks"], settings["block_bits"]
        if blocks > dim:
            raise ArgumentError(
                f"layered: blocks={blocks}: {dim} columns can be cut into at most as many"
            )
        if not blocks or not bits:
            return settings | {"width": rank, "blocks": 0, "block_bits": 0}
        return settings | {"width": blocks * -(-rank // blocks)}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        return LayeredFit(job, settings)


def promise(settings: Settings, rank: int) -> float:
    """Return about log2 of the error these settings leave: 2 bits / dimensions, less what each kind of code wastes.

    The constants were read off fits of word vectors; they only order settings, the choice is made by measuring.
    """
    codes, bits = settings["codes"], settings["bits"]
    total = -0.3 - 2 * codes * bits / rank * EFFICIENCY[bits] * (1.08 - 0.02 * codes)
    if settings["blocks"]:
        across = settings["width"] / settings["blocks"]
        rate = settings["block_bits"] / across
        total += -2 * rate + (0.25 + 0.55 / across) * min(1.0, rate) + 0.3 / codes
    return float(total)


@dataclass
class Basis:
    """Orthogonal columns that carry the matrix: y = (x - mean) weight^T, x ≈ y weight + mean."""

    weight: Floats | None = None  # [width, d], as stored; None: the columns as they are
    mean: Floats | None = None  # [d]

    def down(self, rows: Floats) -> Floats:  # [n, d] -> [n, width]
        """Return rows in the basis."""
        if self.weight is None or self.mean is None:
            return rows
        inside: Floats = np.dot(rows - self.mean, self.weight.T)
        return inside

    @property
    def affine(self) -> Affine | None:
        """The way back, as it is stored."""
        return (
            None
            if self.weight is None
            else Affine(Matrix.encode(self.weight, "float16"), self.mean)
        )


def basis_of(job: CodecJob, width: int) -> Basis:
    """Return the ``width`` columns that carry most of the matrix by importance, turned at random so that all carry alike."""
    mean, top = principal(job, width)
    turn, _ = np.linalg.qr(job.generator.standard_normal((width, width)))
    weight = (turn[:, : len(top)] @ top).astype(np.float16).astype(np.float32)
    return Basis(weight, mean)


class LayeredFit(Fit):
    """The state of a layered fit: dictionaries learnt on a sample (all rows when they are few), codes of the sample."""

    refinable = True

    def __init__(self, job: CodecJob, settings: Settings) -> None:
        self.job, self.settings = job, settings
        self.parts, self.bits, self.blocks = (
            settings["codes"],
            settings["bits"],
            settings.get("blocks", 0),
        )
        self.ids = job.rows.draw(job.learn, job.generator)
        self.basis = self.begin()
        self.sample = self.basis.down(job.rows.take(self.ids))
        self.weights = job.importance[self.ids]
        self.round = 0
        self.tail: Floats = np.zeros_like(self.sample[:1])
        self.shared: Matrix | None = None
        self.tail_codes: Codes | None = None
        job.tell("first dictionaries", 0.0)
        self.first_codes()

    def begin(self) -> Basis:
        """Choose the basis."""
        return basis_of(self.job, self.settings["width"])

    def first_codes(self) -> None:
        """Learn the first dictionaries and codes."""
        start = self.job.generator.choice(
            len(self.sample), min(START, len(self.sample)), replace=False
        )
        beam = 8 if self.parts <= 12 else 4
        self.atoms = residual_start(
            self.sample[start], self.parts, self.bits, self.job.seed(), beam
        )
        self.store_atoms()
        self.codes: Codes = Encoder(self.atoms)(self.sample, seed=self.job.seed())
        self.refine(ROUNDS if self.parts > 1 else 2)

    def store_atoms(self) -> None:
        """Round the atoms to what is stored: codes are then found for the rounded ones."""
        flat = self.atoms.reshape(-1, self.atoms.shape[2])
        self.dictionary = Matrix.encode(flat, self.settings["kind"], scale_kind="float16")
        self.atoms = self.dictionary.dense().reshape(self.atoms.shape)

    def refine(self, rounds: int) -> None:
        """Alternate least-squares atoms and codes by local search: of the rows at first, at last of what the blocks leave."""
        alone = max(0, rounds - TOGETHER) if self.blocks and self.parts > 1 else 0
        for done in range(rounds):
            self.job.tell("refining", done / rounds)
            if self.blocks and done >= alone:
                self._new_blocks(self.sample - decode(self.codes, self.atoms))
            target = self.sample - self.tail if done >= alone else self.sample
            self.atoms = least_squares(self.codes, target, self.weights, 1 << self.bits)
            self.store_atoms()
            self.codes = Encoder(self.atoms)(target, self.codes, seed=self.job.seed())
            self.round += 1
        if self.blocks:
            self._new_blocks(self.sample - decode(self.codes, self.atoms))

    def _new_blocks(self, left: Floats) -> None:
        choices, across = 1 << self.settings["block_bits"], left.shape[1] // self.blocks
        pieces = left.reshape(-1, across)
        start = None if self.shared is None else self.shared.dense()
        centroids = kmeans(
            pieces, choices, self.job.seed(), rounds=12 if start is None else 4, start=start
        )
        self.shared = Matrix.encode(centroids, "int8", "column")
        self.tail_codes = nearest(pieces, self.shared.dense()).reshape(-1, self.blocks)
        self.tail = self.shared.dense()[self.tail_codes].reshape(left.shape)

    def encoder(self) -> Callable[..., Codes]:
        """Return what finds the codes of further rows."""
        return Encoder(self.atoms)

    def _encode_all(self) -> tuple[NDArray[np.integer], NDArray[np.integer] | None]:
        """Return the codes of every row; where the sample was everything they are there already."""
        rows = self.job.rows
        if len(self.ids) == rows.count:
            return self.codes, self.tail_codes
        kind = np.uint8 if self.bits <= 8 else np.uint16
        codes = np.empty((rows.count, self.parts), dtype=kind)
        tails = np.empty((rows.count, self.blocks), dtype=np.uint16) if self.blocks else None
        encoder = self.encoder()
        for start, block in rows.blocks():
            self.job.tell("coding", start / rows.count)
            inside = self.basis.down(block)
            found = encoder(inside, tries=2, seed=start)
            if tails is not None and self.shared is not None:
                for again in range(2):
                    left = inside - decode(found, self.atoms)
                    blocks = nearest(
                        left.reshape(-1, left.shape[1] // self.blocks), self.shared.dense()
                    )
                    if again == 0:
                        found = encoder(
                            inside - self.shared.dense()[blocks].reshape(left.shape),
                            found,
                            tries=1,
                            seed=start,
                        )
                tails[start : start + len(block)] = blocks.reshape(-1, self.blocks)
            codes[start : start + len(block)] = found
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

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
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
