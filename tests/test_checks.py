"""Checks of arguments: which values pass, and the one message of each."""

import math

import numpy as np
import pytest

from featherbed.checks import check_choice, check_integer, check_number, is_integer, is_number
from featherbed.errors import ArgumentError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_python_and_numpy_pass(value):
    found = check_integer("steps", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float32(3), "3", None, math.nan])
def test_other_values_are_no_integers(value):
    assert not is_integer(value)
    with pytest.raises(ArgumentError, match=r"^steps=.*: give a whole number of at least 1$"):
        check_integer("steps", value)


@pytest.mark.parametrize("value", [0, 10])
def test_integers_out_of_range(value):
    with pytest.raises(ArgumentError, match=rf"^k={value}: give a whole number from 1 to 9$"):
        check_integer("k", value, 1, 9)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int8(1)])
def test_numbers_pass(value):
    assert check_number("lr", value, above=0) == value
    assert type(check_number("lr", value)) is float


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf, 1j])
def test_other_values_are_no_numbers(value):
    assert not is_number(value)
    with pytest.raises(ArgumentError, match=r"^lr=.*: give a finite number$"):
        check_number("lr", value)


def test_limits_of_numbers():
    assert is_number(0, 0, 1) and is_number(1, 0, 1) and not is_number(1.1, 0, 1)
    assert check_number("p", 0, minimum=0) == 0
    with pytest.raises(ArgumentError, match=r"^p=-1: give a number of at least 0$"):
        check_number("p", -1, minimum=0)
    with pytest.raises(ArgumentError, match=r"^lr=0: give a number above 0$"):
        check_number("lr", 0, above=0)


def test_choices():
    assert check_choice("mode", "sum", ("sum", "mean")) == "sum"
    with pytest.raises(ArgumentError, match=r"^mode='max': use one of sum, mean$"):
        check_choice("mode", "max", ("sum", "mean"))
