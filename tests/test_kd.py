"""Learnt codes: relaxations, guides, composers, health, export, and the propositions of the supplement."""

import copy
import math

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.tables.coded import balanced, free_code
from featherbed.tables.parts.relaxations import harden
from featherbed.testing import check_table

COMPOSERS = ("linear", "mlp", "recurrent", "lstm")


def kd(rows=60, dim=8, **settings):
    settings = {"choices": 4, "parts": 5, "generator": torch.Generator().manual_seed(0)} | settings
    return fb.KDTable(rows, dim, **settings)


def teach(table, matrix, steps=150, lr=0.05, extra=True):
    """Draw a table's rows to a matrix by its own training path; return the losses."""
    optimizer = torch.optim.Adam(table.parameters(), lr=lr)
    losses = []
    ids = torch.arange(len(matrix))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (table(ids) - matrix).square().mean()
        losses.append(float(loss.detach()))
        (loss + (fb.auxiliary_loss(table) if extra else 0.0)).backward()
        optimizer.step()
    return losses


@pytest.fixture
def matrix():
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(12, 8, generator=generator)
    return centres[torch.randint(12, (60,), generator=generator)] + 0.2 * torch.randn(
        60, 8, generator=generator
    )


@pytest.mark.parametrize("composer", COMPOSERS)
@pytest.mark.parametrize(
    "more", [{}, {"shared": True, "code_dim": 5}, {"output_norm": True, "code_dim": 11}], ids=str
)
def test_every_composer_is_a_table(composer, more):
    check_table(
        lambda **settings: fb.KDTable(
            50, 8, choices=4, parts=5, composer=fb.Composer(composer, **more), **settings
        )
    )


@pytest.mark.parametrize(
    "more",
    [
        {"composer": fb.Composer(pool="sum")},
        {"relax": fb.StraightThrough(logit_norm=False)},
        {"unique": True},
        {"choices": 3, "parts": 1},
    ],
    ids=str,
)
def test_every_setting_is_a_table(more):
    check_table(
        lambda **settings: fb.KDTable(50, 8, **({"choices": 4, "parts": 5} | more), **settings)
    )


@pytest.mark.parametrize(
    "more",
    [
        {"variant": "centroid"},
        {"shared": True},
        {"additive": True},
        {"variant": "centroid", "shared": True, "additive": True},
        {"variant": fb.Matching(query_dim=5)},
        {"variant": fb.Matching("centroid", normalize=True, commitment=0.25)},
    ],
    ids=str,
)
def test_every_product_table_is_a_table(more):
    check_table(lambda **settings: fb.ProductTable(50, 8, choices=4, parts=4, **more, **settings))


@pytest.mark.parametrize(
    "relax",
    [fb.Softmax(), fb.StraightThrough(), fb.StraightThrough(noise=True, entropy=0.01)],
    ids=repr,
)
@pytest.mark.parametrize("composer", COMPOSERS)
def test_training_learns_the_rows(matrix, relax, composer):
    composed = fb.Composer(composer, code_dim=8)
    table = kd(composer=composed, relax=relax, choices=8)
    losses = teach(table, matrix)
    assert np.mean(losses[-10:]) < 0.4 * losses[0]
    before = ((kd(composer=composed, relax=relax, choices=8).eval().weight - matrix) ** 2).mean()
    assert ((table.eval().weight - matrix) ** 2).mean() < before, (
        "the hard codes must have learnt it too"
    )


@pytest.mark.parametrize("variant", ["softmax", "centroid"])
def test_product_tables_learn(matrix, variant):
    table = fb.ProductTable(
        60, 8, choices=8, parts=4, variant=variant, generator=torch.Generator().manual_seed(0)
    )
    losses = teach(table, matrix)
    assert np.mean(losses[-10:]) < 0.4 * losses[0]
    assert table.auxiliary() is None, "what was added is asked for once"


def test_straight_through_is_hard_forward_and_soft_backward():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    soft = logits.softmax(-1)
    hard = harden(soft)
    torch.testing.assert_close(hard, torch.nn.functional.one_hot(logits.argmax(-1), 5).float())
    weights = torch.arange(5.0)
    (mine,) = torch.autograd.grad((hard * weights).sum(), logits, retain_graph=True)
    (dense,) = torch.autograd.grad((soft * weights).sum(), logits)
    torch.testing.assert_close(mine, dense)


def test_temperatures_fall_to_their_floor():
    steps = torch.tensor([0, 999, 1000, 5000, 10**9])
    inverse = fb.Temperature(1.0, kind="inverse", rate=1.0, every=1000, floor=0.01)(steps)
    torch.testing.assert_close(inverse, torch.tensor([1.0, 1.0, 0.5, 1 / 6, 0.01]))
    falling = fb.Temperature(2.0, kind="exponential", rate=0.5, every=1000, floor=0.1)(steps)
    torch.testing.assert_close(falling, torch.tensor([2.0, 2.0, 1.0, 0.1, 0.1]))
    scheduled = kd(relax=fb.StraightThrough(temperature=fb.Temperature(every=1)))
    assert scheduled.norm.scale is None, "a learnt scale would undo the temperature"
    assert kd().norm.scale is not None


def test_entropy_is_what_it_says():
    table = kd(relax=fb.Softmax(entropy=0.5, logit_norm=False))
    table(torch.tensor([3, 7]))
    share = table.code_logits[[3, 7]].reshape(2, 5, 4).softmax(-1)
    torch.testing.assert_close(table.auxiliary(), 0.5 * -(share * share.log()).sum(-1).mean())
    assert table.auxiliary() is None


def test_the_steps_of_training_are_counted_and_kept():
    table = kd()
    for _ in range(3):
        table(torch.tensor([1, 2, 3]))
    table.eval()(torch.tensor([1]))
    assert int(table.steps) == 3
    again = kd()
    again.load_state_dict(table.state_dict())
    assert int(again.steps) == 3


def test_an_online_guide_teaches_and_is_dropped():
    table = kd(guide=fb.Online(weight=2.0, keep=0.5))
    ids = torch.arange(60)
    torch.manual_seed(0)
    rows = table(ids)
    guide = table.guidance.rows.detach()
    from_guide = (rows.detach() == guide).all(1)
    assert 10 < int(from_guide.sum()) < 50, "about half of the rows the task sees are the guide's"
    added = table.auxiliary()
    (gradient,) = torch.autograd.grad(added, table.guidance.rows, allow_unused=True)
    assert gradient is None, "the guide is not drawn to the codes"
    packed = table.eval().pack()
    torch.testing.assert_close(
        torch.from_numpy(packed[np.arange(60)]), table.weight.detach(), rtol=1e-5, atol=1e-6
    )
    assert packed.nbytes < guide.nbytes / 2


@pytest.mark.parametrize("autoencode", [False, True])
def test_a_pretrained_guide_draws_the_rows_to_it(matrix, autoencode):
    guide = fb.Pretrained(matrix, weight=10.0, autoencode=autoencode, reconstruct=1.0, agree=0.1)
    table = kd(guide=guide, choices=8)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        table(torch.arange(60))
        fb.auxiliary_loss(table).backward()
        optimizer.step()
    fresh = kd(choices=8)
    far = ((fresh.eval().weight - matrix) ** 2).mean()
    assert ((table.eval().weight - matrix) ** 2).mean() < 0.5 * far
    assert ("guidance.encoder" in dict(table.named_parameters())) == autoencode
    assert "guidance.matrix" not in table.state_dict(), (
        "the matrix is the user's, checkpoints do not hold it"
    )


def test_codes_are_taken_in_float32_whatever_autocast_says():
    table = fb.ProductTable(
        400, 16, choices=16, parts=4, generator=torch.Generator().manual_seed(0)
    ).eval()
    plain = table.codes_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(table.codes_of(), plain)
        assert torch.equal(kd().codes_of(), kd().codes_of())
    packed = table.pack()
    np.testing.assert_array_equal(packed.codes_of(np.arange(400)), plain.numpy())


@pytest.mark.parametrize("composer", COMPOSERS)
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_every_row_is_exported_as_evaluated(composer, kind, tmp_path):
    table = kd(
        200, 8, composer=fb.Composer(composer, output_norm=True), choices=5, guide=fb.Online()
    )
    for _ in range(
        5
    ):  # running statistics that are not those of a fresh table, and ids that were never seen
        table(torch.arange(100))
    table.eval()
    fb.save(table.pack(dictionary=kind), tmp_path / "t.safetensors")
    rows = fb.load(tmp_path / "t.safetensors")[np.arange(200)]
    tolerance = {"float32": 1e-5, "float16": 5e-3, "int8": 6e-2}[kind]
    np.testing.assert_allclose(rows, table.weight.detach().numpy(), rtol=tolerance, atol=tolerance)
    sizes = table.sizes()
    assert sizes.code_bits == pytest.approx(200 * 5 * math.log2(5))


def test_health_counts_what_is_there():
    table = kd(40, 8, choices=4, parts=2)
    codes = torch.zeros(40, 2, dtype=torch.int64)
    codes[:, 1] = torch.arange(40) % 3
    table.assign(torch.arange(40), codes)
    torch.testing.assert_close(table.codes_of(), codes)
    health = table.health()
    assert health.used == (1, 3)
    assert health.entropy[0] == 0
    assert health.entropy[1] == pytest.approx(math.log2(3), abs=0.01)
    assert health.duplicates == 37
    assert health.utilization == pytest.approx(4 / 8)
    assert "50.0% of the choices" in str(health)


def product_with_wide_queries():  # near copies of keys of two numbers can be the same key in float32
    return fb.ProductTable(
        60,
        8,
        choices=4,
        parts=4,
        variant=fb.Matching(query_dim=8),
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("make", [kd, product_with_wide_queries], ids=["kd", "product"])
def test_dead_choices_are_revived(make):
    table = make()
    codes = torch.zeros(60, table.parts, dtype=torch.int64)
    table.assign(torch.arange(60), codes)
    before = table.eval().weight.detach()
    assert table.revive(torch.Generator().manual_seed(0)) == 3 * table.parts
    assert table.health().used == (4,) * table.parts
    assert (table.weight - before).abs().max() < 0.5, (
        "a revived choice begins where a living one is"
    )


def test_balanced_codes_fill_every_choice_alike():
    table = kd(100, 8)
    with torch.no_grad():
        table.code_logits.view(100, 5, 4)[:, :, 0] += 2
    assert max(torch.bincount(table.codes_of()[:, 0])) > 40
    table.balance()
    counts = torch.stack([torch.bincount(column, minlength=4) for column in table.codes_of().T])
    assert (counts == 25).all()
    scores = torch.rand(50, 7, generator=torch.Generator().manual_seed(0))
    assert int(torch.bincount(balanced(scores, 8)).max()) <= 8


def test_unique_codes_are_unique_and_change_little():
    table = kd(60, 8, choices=2, parts=6, unique=True)
    assert table.health().duplicates == 0
    table.assign(torch.arange(60), torch.zeros(60, 6, dtype=torch.int64))
    packed = table.eval().pack()
    assert table.health().duplicates == 0
    np.testing.assert_allclose(
        packed[np.arange(60)], table.weight.detach().numpy(), rtol=1e-5, atol=1e-6
    )
    responses = torch.tensor([[3.0, 1.5, 0.0], [2.0, 1.9, 0.0]])
    assert free_code(responses, {(0, 0)}) == (0, 1)
    assert free_code(responses, {(0, 0), (0, 1)}) == (1, 0)


def test_unique_codes_may_use_every_code():
    assert (
        kd(243, choices=3, parts=5, unique=True).health().duplicates == 0
    )  # where log 243 / log 3 comes out below 5


def test_a_guide_has_the_dtype_of_its_table():
    table = kd(guide=fb.Pretrained(np.zeros((60, 8))))
    table(torch.arange(60)).sum().backward()
    assert table.auxiliary().dtype == torch.float32


def test_rows_of_a_semantic_id():
    table = kd(60, 8, choices=3, parts=3)
    codes = table.codes_of()
    assert table.rows_with(codes[7]).tolist() == [
        i for i in range(60) if torch.equal(codes[i], codes[7])
    ]
    assert set(table.rows_with(codes[7][:1]).tolist()) == set(
        (codes[:, 0] == codes[7, 0]).nonzero()[:, 0].tolist()
    )
    with pytest.raises(fb.ArgumentError, match="3 parts"):
        table.rows_with([0, 1, 2, 0])
    with pytest.raises(fb.IdError, match="whole numbers, got str"):
        table.codes_of("word")


def test_sparse_logits_get_row_sparse_gradients(matrix):
    table = kd(sparse=True, choices=8)
    codes, others = fb.split_codes(table)
    optimizer = fb.Several(
        torch.optim.Adam(others, lr=0.05), torch.optim.SparseAdam(codes, lr=0.05)
    )
    table(torch.tensor([3, 3, 9])).sum().backward()
    assert table.code_logits.grad.is_sparse
    before = table.code_logits.detach().clone()
    optimizer.step()
    moved = (table.code_logits.detach() != before).any(1).nonzero()[:, 0].tolist()
    assert moved == [3, 9]
    twin = copy.deepcopy(optimizer)
    assert [len(group["params"]) for group in twin.param_groups] == [
        len(group["params"]) for group in optimizer.param_groups
    ]
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.state[table.code_logits]["step"] == 1
    with pytest.raises(fb.ArgumentError, match="two optimizers"):
        fb.Several(torch.optim.SGD(codes, lr=1), torch.optim.Adam(codes))


def test_lemma_1_counts_the_parameters():
    rows, code_dim = 10_000, 20
    for choices in (2, 8, 32):
        parts = math.ceil(math.log(rows) / math.log(choices))
        table = fb.KDTable(
            rows,
            16,
            choices=choices,
            parts=parts,
            composer=fb.Composer(code_dim=code_dim),
            unique=True,
        )
        vectors = choices * parts * code_dim
        assert table.parameter_count() == vectors + code_dim * 16 + 16
        assert vectors <= choices / math.log(choices) * code_dim * (
            math.log(rows) + math.log(choices)
        )


def test_proposition_1_linear_codes_are_a_sparse_binary_factorisation():
    table = kd(40, 8, choices=4, parts=5, composer=fb.Composer(code_dim=6)).double().eval()
    codes = table.codes_of()
    binary = torch.nn.functional.one_hot(codes, 4).reshape(40, -1).double()
    assert binary.mean() == 1 / 4, "each row has one of K entries of every part"
    vectors = table.dictionary.reshape(20, 6) / 5 @ table.projection
    torch.testing.assert_close(binary @ vectors + table.bias, table.weight)


def test_proposition_2_the_recurrent_table_has_the_higher_rank():
    def rank(composer):
        table = (
            kd(60, 40, choices=3, parts=4, composer=fb.Composer(composer, code_dim=40), unique=True)
            .double()
            .eval()
        )
        return int(torch.linalg.matrix_rank(table.weight.detach()))

    bound = 4 * (3 - 1) + 1
    assert rank("linear") <= bound
    assert rank("recurrent") > bound


@pytest.mark.parametrize("rows", [1, 3, 9, 30])
@pytest.mark.parametrize(("choices", "parts"), [(4, 4), (3, 2), (16, 1)])
def test_few_rows_are_coded_too(rows, choices, parts):
    matrix = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
    shape = {"choices": choices, "parts": parts}
    for make, more in (
        (fb.KDTable, {}),
        (fb.KDTable, {"composer": fb.Composer(shared=True)}),
        (fb.KDTable, {"composer": fb.Composer(code_dim=3)}),
        (fb.ProductTable, {"additive": True}),
        (
            fb.ProductTable,
            {"variant": "centroid"} if 32 % parts == 0 else {"additive": True, "shared": True},
        ),
    ):
        table = make.from_dense(matrix, **shape, **more).eval()
        assert torch.isfinite(table.weight).all()
        assert ((table.weight - matrix) ** 2).mean() <= 1.01 * (matrix**2).mean()
    if rows <= choices:
        table = fb.KDTable.from_dense(matrix, **shape).eval()
        torch.testing.assert_close(table.weight.detach(), matrix, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kd(choices=1), "at least 2"),
        (
            lambda: fb.KDTable.from_dense(torch.full((6, 8), 1e20), choices=4, parts=4),
            "scale it down",
        ),
        (
            lambda: fb.ProductTable.from_dense(torch.full((6, 8), 1e20), choices=4, parts=4),
            "scale it down",
        ),
        (lambda: kd(guide=fb.Pretrained(torch.nn.Embedding(60, 8))), "its weight"),
        (lambda: kd(guide=fb.Pretrained(torch.zeros(60, 8, dtype=torch.int64))), "torch.int64"),
        (lambda: kd(guide=fb.Pretrained(torch.full((60, 8), math.nan))), "NaN or infinity"),
        (lambda: kd(guide=torch.zeros(60, 8)), "guide=Tensor: give fb.Online"),
        (lambda: fb.Online(keep="half"), "keep='half'"),
        (lambda: fb.Online(weight=None), "at least 0"),
        (lambda: fb.Temperature(start="hot"), "above 0"),
        (lambda: fb.Temperature(rate=math.nan), "rate >= 0"),
        (lambda: fb.Softmax(entropy="x"), "at least 0"),
        (lambda: fb.Matching(temperature="x"), "above 0"),
        (
            lambda: fb.Matching("centroid", commitment="x"),
            "at least 0",
        ),
        (lambda: kd().balance(-0.5), "slack=-0.5"),
        (lambda: kd().rows_with([0.5]), "whole numbers"),
        (lambda: fb.make_table("kd:choices=4,parts=4,unique=maybe", 60, 8), "true or false"),
        (lambda: fb.make_table("product:choices=4,parts=4,temperature=x", 60, 8), "above 0"),
        (lambda: kd(parts=0), "parts=0"),
        (lambda: fb.ProductTable(10, 10, choices=4, parts=3), "do not divide 10"),
        (lambda: kd(rows=100, choices=2, parts=3, unique=True), r"2 \*\* 3 is 8"),
        (lambda: kd(relax=fb.Softmax(temperature=0)), "above 0"),
        (lambda: kd(relax=fb.StraightThrough(temperature=math.nan)), "above 0"),
        (lambda: fb.Temperature(start=0.0), "above 0"),
        (lambda: fb.Temperature(floor=2.0), "the floor is above"),
        (lambda: fb.Temperature(kind="cosine"), "constant, inverse, exponential"),
        (lambda: fb.Matching(temperature=0), "above 0"),
        (lambda: kd(guide=fb.Pretrained(torch.zeros(60, 9))), r"\[60, 8\]"),
        (lambda: fb.Online(keep=0.0), "keep=0.0"),
        (lambda: fb.Online(weight=-1.0), "at least 0"),
        (lambda: kd(composer=3), "fb.Composer"),
        (lambda: fb.ProductTable(10, 8, choices=4, parts=4, variant=3), "fb.Matching"),
        (lambda: fb.make_table("kd:choices=4,parts=4,shared=maybe", 60, 8), "true or false"),
        (lambda: fb.make_table("kd:choices=4,parts=4,width=3", 60, 8), "code_dim, pool, shared"),
        (lambda: kd(composer="cnn"), "linear, mlp, recurrent, lstm"),
        (lambda: fb.Composer(pool="max"), "mean or sum"),
        (lambda: kd(relax="softmax"), "fb.StraightThrough"),
        (lambda: fb.ProductTable(10, 8, choices=4, parts=4, variant="hard"), "softmax, centroid"),
        (lambda: fb.Several(), "at least one"),
        (lambda: kd(guide="online"), "fb.Online"),
        (lambda: fb.Matching(commitment=0.5), "centroid"),
        (lambda: kd().rows_with([99]), "0 to 3"),
        (lambda: fb.KDTable.from_dense(torch.nn.Embedding(3, 4), choices=4, parts=4), "its weight"),
    ],
)
def test_bad_settings_say_what_to_do(make, says):
    with pytest.raises(fb.ArgumentError, match=says):
        make()


def test_specs_make_coded_tables():
    table = fb.make_table(
        "kd:choices=8,parts=4,relax=straightthrough(entropy=0.1),guide=online(keep=0.3)", 100, 16
    )
    assert table.relax == fb.StraightThrough(entropy=0.1)
    assert table.guide == fb.Online(keep=0.3)
    assert isinstance(
        fb.make_table("product:choices=8,parts=4,variant=centroid", 100, 16), fb.ProductTable
    )


def test_specs_reach_every_setting_by_itself_or_in_its_object():
    def made(spec):
        table = fb.make_table(spec, 60, 8)
        return [getattr(table, name, None) for name in ("composer", "relax", "variant")]

    flat = "kd:choices=4,parts=3,composer=mlp,code_dim=5,shared=true,logit_norm=false"
    grouped = (
        "kd:choices=4,parts=3,composer=composer(kind=mlp,code_dim=5,shared=true),"
        "relax=straightthrough(logit_norm=false)"
    )
    composer = fb.Composer("mlp", code_dim=5, shared=True)
    assert made(flat) == made(grouped) == [composer, fb.StraightThrough(logit_norm=False), None]
    matching = fb.Matching("centroid", commitment=0.5)
    for spec in (
        "variant=centroid,commitment=0.5",
        "variant=matching(kind=centroid,commitment=0.5)",
    ):
        assert made(f"product:choices=4,parts=4,{spec}") == [None, None, matching]
    assert fb.KDTable(60, 8, choices=4, parts=3, composer=composer).extra_repr() == (
        "60, 8, choices=4, parts=3, composer=Composer('mlp', code_dim=5, shared=True), "
        "relax=StraightThrough(temperature=1.0, entropy=0.0, noise=False, logit_norm=True), unique=False"
    )
