"""The conformance suite: every table is compared with the dense table it represents.

fb.testing.check_table(lambda **settings: MyTable(50, 8, **settings))
"""

from __future__ import annotations

from featherbed.testing.conventions import (
    check_clipped,
    check_compiled,
    check_computed_weight,
    check_exported,
    check_functional,
    check_meta,
    check_parametrized,
    check_pretrained,
    check_pruned,
    check_reset,
    check_second_derivative,
    check_vmap,
)
from featherbed.testing.oracle import Make, oracle, seeded, some_ids
from featherbed.testing.promises import (
    check_bad_ids,
    check_bags,
    check_capabilities,
    check_copies,
    check_dtypes,
    check_fit,
    check_forward,
    check_gradients,
    check_logits,
    check_packed,
    check_padding,
    check_seed,
    check_sizes,
)

__all__ = [
    "check_bad_ids",
    "check_bags",
    "check_capabilities",
    "check_clipped",
    "check_compiled",
    "check_computed_weight",
    "check_copies",
    "check_dtypes",
    "check_exported",
    "check_fit",
    "check_forward",
    "check_functional",
    "check_gradients",
    "check_logits",
    "check_meta",
    "check_packed",
    "check_padding",
    "check_parametrized",
    "check_pretrained",
    "check_pruned",
    "check_reset",
    "check_second_derivative",
    "check_seed",
    "check_sizes",
    "check_table",
    "check_vmap",
    "oracle",
    "seeded",
    "some_ids",
]


def check_table(make: Make, *, compiled: bool = False) -> None:
    """Run all checks on a table; ``make(**settings)`` accepts ``padding_idx``, ``dtype``,
    ``generator``.

    The checks cover the table's own promises (rows, bags, logits, packed form, capabilities) and
    PyTorch's conventions (``torch.func``, ``torch.export``, parametrizations, pruning, the meta
    device, ``reset_parameters``). ``compiled=True`` adds torch.compile (slow, needs a C++
    compiler). Raises AssertionError at the first difference.

    >>> import featherbed as fb
    >>> check_table(lambda **settings: fb.AnchorTable(50, 8, anchors=5, **settings))
    """
    optional = ("check_table", "check_compiled")
    for name in __all__:
        if name.startswith("check_") and name not in optional:
            globals()[name](make)
    if compiled:
        check_compiled(make)
