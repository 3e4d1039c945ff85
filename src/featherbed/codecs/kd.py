"""K-way D-dimensional codes by auto-encoding: additive codes, then a composer of ``fb.KDTable``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from featherbed.codecs.codec import Codec, CodecJob, Fit, Settings, matrix_size, stream_size
from featherbed.codecs.coding import (
    AdditiveEncoder,
    Codes,
    fit_additive,
    fit_shared,
    least_squares,
)
from featherbed.codecs.principal import principal_directions
from featherbed.codecs.rows import Floats
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.packed.cells import Cell
from featherbed.packed.matrix import Matrix

Parameters = dict[str, Floats]  # atoms [D or 1, K, d'], weight, bias, input, projection, shift
STEPS = 600  # of the composer's fit, where it is no least-squares problem
BATCH = 2048
LEARNING_RATE = 1e-2
SMALL = 1 << 18  # numbers of a step below which one thread is faster
COMPOSERS = ("linear", "mlp", "recurrent", "lstm")
GATES = {"linear": 0, "mlp": 1, "recurrent": 4, "lstm": 8}  # matrices [d, d] of the cell


class KDCodec(Codec):
    """``parts`` codes of ``bits`` bits over code vectors, composed by ``composer`` (fb.KDTable)."""

    name = "kd"

    def size(self, rows: int, dim: int, **settings: Any) -> int:
        """Return the bytes of the arrays with these settings."""
        parts, bits, composer = settings["parts"], settings["bits"], settings["composer"]
        total = stream_size(rows, parts * bits) + matrix_size(settings["kind"], parts << bits, dim)
        if composer == "linear":
            return total
        biases = 5 if composer != "mlp" else 2
        return total + (GATES[composer] + 1) * matrix_size("float16", dim, dim) + 4 * biases * dim

    def settings(self, rows: int, dim: int, budget: int, rank: int) -> list[Settings]:  # noqa: ARG002
        """Return the most parts that fit for each composer and number of bits."""
        found: list[Settings] = []
        for composer in COMPOSERS:
            for bits in (8, 7, 6, 5, 4):
                fixed: Settings = {"bits": bits, "kind": "int8", "composer": composer}
                counts = range(1, 33)
                fitting = [n for n in counts if self.size(rows, dim, parts=n, **fixed) <= budget]
                found += [{"parts": fitting[-1], **fixed}] if fitting and rows >= 2 << bits else []

        def order(s: Settings) -> tuple[int, float]:
            bits = s["bits"] + 0.02 * s["bits"] ** 2
            return COMPOSERS.index(s["composer"]), -s["parts"] * bits

        return sorted(found, key=order)

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row."""
        return float(8 * (settings["parts"] << settings["bits"]) * (dim + 12 * settings["parts"]))

    def defaults(self) -> Settings:
        """Return the default composer, the best one for its bytes."""
        return {"composer": "linear"}

    def fit(self, job: CodecJob, **settings: Any) -> Fit:
        """Compress the matrix."""
        if settings["composer"] not in COMPOSERS:
            raise ArgumentError(
                f"kd: composer={settings['composer']!r}: use one of {', '.join(COMPOSERS)}"
            )
        rest = {name: value for name, value in settings.items() if name != "bits"}
        return KDFit(job, choices=1 << settings["bits"], **rest)


class KDFit(Fit):
    """Additive codes of the sample around the weighted mean of the rows; the composer is fitted
    last.

    ``width`` is the width of the code vectors: a linear composer narrower than the rows codes them
    in their principal directions (``basis``). ``shared``: all parts choose among the same atoms.
    """

    def __init__(
        self,
        job: CodecJob,
        *,
        parts: int,
        choices: int,
        kind: str = "float32",
        composer: str = "linear",
        width: int | None = None,
        shared: bool = False,
    ) -> None:
        if composer != "linear":
            _require_torch(composer)
        self.job, self.parts, self.choices = job, parts, choices
        self.kind, self.composer, self.refinable = kind, composer, not shared
        self.ids = job.training
        self.weights, self.rows = job.importance[self.ids], job.rows.take(self.ids)
        self.mean = np.average(self.rows, axis=0, weights=self.weights).astype(np.float32)
        self.sample: Floats = self.rows - self.mean
        self.basis: Floats | None = None  # [width, d]
        if composer == "linear" and width is not None and width < job.rows.dim:
            moment = (self.sample * self.weights[:, None]).T.astype(np.float64) @ self.sample
            self.basis = principal_directions(moment, width).astype(np.float32)
            self.sample = np.ascontiguousarray(self.sample @ self.basis.T)
        job.progress("initial dictionaries", 0.0)
        if shared:
            found = fit_shared(self.sample, parts, choices, job.seed(), 8, self.weights)
        else:
            found = fit_additive(self.sample, parts, choices, job.seed(), 4, self.weights)
        self.atoms, self.codes = found
        self.refine(0 if shared else 4)

    def refine(self, rounds: int) -> None:
        """Alternate least-squares code vectors, rounded as stored, and codes by local search."""
        offset = self.mean / self.parts if self.basis is None else np.float32(0)
        for done in range(rounds):
            self.job.progress("refining", done / rounds)
            atoms = least_squares(self.codes, self.sample, self.weights, self.choices)
            flat = atoms.reshape(-1, atoms.shape[2])
            stored = self._stored(flat + offset).dense()
            self.atoms = (stored - offset).reshape(atoms.shape).astype(np.float32)
            self.codes = AdditiveEncoder(self.atoms)(self.sample, self.codes, seed=self.job.seed())

    def _stored(self, atoms: Floats) -> Matrix:
        return Matrix.encode(atoms, self.kind, scale_kind="float16")

    def all_codes(self) -> Codes:  # [V, D]
        """Return the codes of every row of the matrix."""
        rows = self.job.rows
        if len(self.ids) == rows.count:
            return self.codes
        codes = np.empty((rows.count, self.parts), dtype=np.int32)
        encoder = AdditiveEncoder(np.repeat(self.atoms, self.parts // len(self.atoms), axis=0))
        for place, block in self.job.blocks():
            inside: Floats = block - self.mean
            inside = inside if self.basis is None else np.dot(inside, self.basis.T)
            codes[place] = encoder(inside, tries=2, seed=place.start)
        return codes

    def fit_composer(self, initial: Parameters) -> Parameters:
        """Fit code vectors and a nonlinear composer to the codes, from ``initial`` parameters."""
        if starts_linear(self.composer, initial):
            initial = linear_start(self.parts * self.atoms, self.mean)
        given = (self.rows, self.codes, self.job.rows.weights[self.ids])
        return train_composer(self.composer, initial, *given, self.job.seed())

    def bands(self) -> list[Band]:
        """Return the packed form."""
        dim, seed = self.job.rows.dim, self.job.seed()
        codes = Fixed.encode(self.all_codes(), None, self.choices, parts=True)
        if self.composer == "linear":
            folded = self.atoms.reshape(-1, dim) + self.mean / np.float32(self.parts)
            return [Band(self.job.rows.count, codes, dictionary=self._stored(folded))]
        drawn = initial_parameters(self.composer, self.parts, self.choices, dim, seed)
        found = self.fit_composer(drawn | {"shift": self.mean})
        atoms = found["atoms"].reshape(-1, dim)
        ordered = self.composer != "mlp"
        given = _half(found["input"]) if "input" in found else None
        cell = Cell(self.composer, _half(found["weight"]), found["bias"], given)
        dictionary = self._stored(atoms if ordered else atoms / np.float32(self.parts))
        combine = "concat" if ordered else "sum"
        affine = Affine(_half(found["projection"]), found["shift"])
        return [Band(self.job.rows.count, codes, None, dictionary, combine, cell, affine)]


def _half(matrix: Floats) -> Matrix:
    return Matrix.encode(matrix, "float16")


def _require_torch(composer: str) -> None:
    if find_spec("torch") is None:
        raise MissingExtra("torch", "train", f"kd codes with the composer {composer!r}")


def initial_parameters(composer: str, parts: int, choices: int, dim: int, seed: int) -> Parameters:
    """Draw code vectors, cell and projection for rows of about unit variance; the shift is 0.

    >>> found = initial_parameters("lstm", 2, 4, 3, seed=0)
    >>> {name: array.shape for name, array in found.items()}  # doctest: +ELLIPSIS
    {'atoms': (2, 4, 3), 'weight': (3, 12), 'bias': (12,), 'input': (3, 12), ...}
    """
    generator = np.random.default_rng(seed)
    gates = 1 if composer == "mlp" else 4

    def draw(std: float, *shape: int) -> Floats:
        return (std * generator.standard_normal(shape)).astype(np.float32)

    gain = 1 / np.sqrt(dim)
    found = {
        "atoms": draw(np.sqrt(parts) if composer == "mlp" else 1.0, parts, choices, dim),
        "weight": draw(gain, dim, gates * dim),
        "bias": np.zeros(gates * dim, dtype=np.float32),
    }
    if composer == "lstm":
        found["input"] = draw(gain, dim, gates * dim)
    shift = np.zeros(dim, dtype=np.float32)
    return found | {"projection": draw(gain, dim, dim), "shift": shift}


def starts_linear(composer: str, parameters: Parameters) -> bool:
    """Return whether a composer can start as the sum of the code vectors."""
    return composer == "mlp" and len(set(parameters["projection"].shape)) == 1


def linear_start(atoms: Floats, mean: Floats) -> Parameters:
    """Return an mlp equal to the mean of the code vectors: relu(x + c) - c, with c above every
    -x."""
    eye, above = np.eye(len(mean), dtype=np.float32), np.float32(4 * atoms.std(ddof=1))
    bias = np.full(len(mean), above, dtype=np.float32)
    return {"atoms": atoms, "weight": eye, "bias": bias, "projection": eye, "shift": mean - above}


def train_composer(
    composer: str,
    initial: Parameters,
    rows: Floats,  # [n, d]
    codes: Codes,  # [n, D]
    weights: Floats,  # [n]
    seed: int,
    steps: int = STEPS,
) -> Parameters:
    """Fit code vectors and composer to rows by Adam with given codes; errors are weighted."""
    import torch

    values = {name: torch.tensor(array, requires_grad=True) for name, array in initial.items()}
    target, share = torch.from_numpy(rows), torch.from_numpy(weights)[:, None]
    indices = torch.from_numpy(codes.astype(np.int64))
    optimizer = torch.optim.Adam(
        values.values(), lr=LEARNING_RATE / (10 if starts_linear(composer, initial) else 1)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    part, batch = torch.arange(codes.shape[1]), min(BATCH, len(rows))
    threads = torch.get_num_threads()
    if batch * initial["atoms"].shape[2] < SMALL:
        torch.set_num_threads(1)  # in small steps a second thread only waits for a busy core
    try:
        with torch.enable_grad():
            for _ in range(steps):
                ids = torch.randint(len(rows), (batch,), generator=generator)
                every = values["atoms"].expand(codes.shape[1], -1, -1)
                found = compose_rows(composer, every[part, indices[ids]], values)
                loss = (share[ids] * (found - target[ids]).square()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
    finally:
        torch.set_num_threads(threads)
    return {name: value.detach().numpy() for name, value in values.items()}


def compose_rows(composer: str, vectors: Any, parameters: Mapping[str, Any]) -> Any:
    """Compose rows [n, d] from code vectors, torch [n, D, d']: cell, projection, shift."""
    weight, bias = parameters["weight"], parameters["bias"]
    if composer == "mlp":
        hidden = (vectors.mean(-2) @ weight + bias).relu()
    else:
        hidden = run_cell(composer, vectors, weight, bias, parameters.get("input"))
    return hidden @ parameters["projection"] + parameters["shift"]


def run_cell(kind: str, vectors: Any, weight: Any, bias: Any, given: Any = None) -> Any:
    """Read code vectors, torch [..., D, d'], in order; return the mean of the states [..., w].

    The formulas are those of ``featherbed.packed.cells.Cell``, on tensors with gradients.
    """
    repeated = [1] * (vectors.dim() - 1) + [4]
    inputs = (vectors.repeat(*repeated) if given is None else vectors @ given) + bias
    state = memory = total = inputs.new_zeros(*inputs.shape[:-2], weight.shape[0])
    for step in inputs.unbind(-2):
        parts = (step + state @ weight).chunk(4, dim=-1)
        if kind == "recurrent":
            keep, take, show, fresh = parts
        else:  # the order of torch's LSTM
            take, keep, fresh, show = parts
        memory = keep.sigmoid() * memory + take.sigmoid() * fresh.tanh()
        state = show.sigmoid() * memory.tanh()
        total = total + state
    return total / vectors.shape[-2]
