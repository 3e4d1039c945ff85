"""Objects that have something in common: an actor, a director, an age group."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_array

from featherbed.errors import ArgumentError
from featherbed.graphs.graph import Graph, object_ids, whole


def shared_attributes(attributes: Any, objects: int, *, most: int = 100) -> Graph:
    """Relate objects that share the value of an attribute: G = [B Bᵀ > 0], B_ia = 1 where object i has the value a.

    A value that more than ``most`` objects share is left out: of the users of one age group everyone would be related to
    everyone, n (n - 1) / 2 pairs that say little. None and NaN are no values: two objects without one share nothing.

    Args:
        attributes: a tuple (ids [n], values [n]), object by object and value by value, where objects have several values or
            none; or a list or array [objects] with the one value of each object.
        objects: how many objects there are.
        most: the largest number of objects a value may relate.

    >>> shared_attributes(["child", "adult", None, "child"], objects=4).pairs()
    array([[0, 3]])
    >>> films, actors = [0, 0, 1, 2, 2], ["Hepburn", "Grant", "Hepburn", "Bogart", "Grant"]
    >>> shared_attributes((films, actors), objects=3).pairs().tolist()
    [[0, 1], [0, 2]]
    """
    objects, most = whole("objects", objects, 1), whole("most", most, 2)
    if isinstance(attributes, tuple):
        if len(attributes) != 2:
            raise ArgumentError(f"a tuple of {len(attributes)} attributes: give (ids [n], values [n]), or a list of values")
        ids, values = object_ids("ids", attributes[0], objects), np.asarray(attributes[1], dtype=object)
    else:
        ids, values = np.arange(objects), np.asarray(attributes, dtype=object)
    if ids.ndim != 1 or values.shape != ids.shape:
        raise ArgumentError(
            f"attributes have shape {values.shape}, the ids of their objects {ids.shape}: give one value for each of the "
            f"{objects} objects, or a tuple (ids [n], values [n])"
        )
    there = np.array([value is not None and value == value for value in values], dtype=bool)  # NaN is not itself
    ids, values, numbers = ids[there], values[there], dict[Any, int]()
    try:
        columns = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    except TypeError as error:
        raise ArgumentError(f"attributes are texts, numbers or other values that can be looked up: {error}") from None
    # each (object, value) once: a value counts the objects that have it
    cells = np.unique(ids * max(len(numbers), 1) + columns)
    rows, columns = np.divmod(cells, max(len(numbers), 1))
    few = np.bincount(columns, minlength=len(numbers))[columns] <= most
    has = csr_array((np.ones(int(few.sum()), np.int32), (rows[few], columns[few])), shape=(objects, max(len(numbers), 1)))
    return Graph(has @ has.T)
