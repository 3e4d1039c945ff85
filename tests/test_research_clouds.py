"""Clouds of rows on a page of their own."""

import re

import numpy as np
import pytest

import featherbed as fb
from research.harness.clouds import clouds_page, mean_distance, principal_axes

RNG = np.random.default_rng(0)


def test_axes_are_those_of_the_covariance():
    rows = RNG.normal(size=(200, 6)) @ np.diag([5, 4, 3, 1, 1, 1]) + 7
    found = principal_axes(rows)
    values = np.sort(np.linalg.eigvalsh(np.cov(rows.T)))[::-1][:3]
    np.testing.assert_allclose(found.var(0, ddof=1), values)
    np.testing.assert_allclose(np.cov(found.T) - np.diag(values), 0, atol=1e-9)
    np.testing.assert_allclose(
        principal_axes(-rows), -found, atol=1e-9
    )  # signs follow the axes, not the data's order
    assert principal_axes(rows[:, :2]).shape == (200, 3), "two columns leave the third axis at zero"


def test_distances_by_hand():
    rows = RNG.normal(size=(30, 4))
    pairs = RNG.integers(30, size=(50, 2))
    spread = np.mean([np.linalg.norm(row - rows.mean(0)) for row in rows])
    expected = np.mean([np.linalg.norm(rows[i] - rows[j]) for i, j in pairs]) / spread
    assert mean_distance(rows, pairs) == pytest.approx(expected)
    assert mean_distance(3 * rows, pairs) == pytest.approx(expected), "scale plays no part"
    with pytest.raises(fb.ArgumentError, match="no pairs"):
        mean_distance(rows, pairs[:0])


def test_the_page_holds_all_it_needs_and_shows_names_as_text():
    clouds = {"without": RNG.normal(size=(4, 5)), "with": RNG.normal(size=(4, 5))}
    names = ["<script>alert(1)</script>", "Heat (1995)", "Clue", "Big"]
    page = clouds_page(
        clouds, names, ["a", "b", "b", "b"], {"with": {"same actor": 1.25}}, title="Films & more"
    )
    own = re.sub(
        r"<script\b[^>]*>.*?</script>", "<script>", page, flags=re.S
    )  # plotly's own text names addresses
    assert not re.search(r"<(script|link|img|iframe)\b[^>]*(src|href)=", own), (
        "the page asks for something it does not hold"
    )
    assert "<script>alert(1)" not in page and "Heat (1995)" in page
    assert page.count('"hovertemplate":"%{text}') == 4, "a trace for each group in each cloud"
    assert "<td>1.250</td>" in page and "Films &amp; more" in page
    with pytest.raises(fb.ArgumentError, match="as many rows"):
        clouds_page(clouds, names[:3], ["a", "b", "b"])
