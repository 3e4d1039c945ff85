"""Remaining weights of a model, those beside its token table, in float16 or int8.

They are stored in the small type and computed with in float32: float16 weights are rounded in
place, int8 weights belong to linear layers, which multiply them by a scale per output on each call.
All other weights of an int8 model (norms, biases, positions) are float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError

RESTS = ("float32", "float16", "int8")
LARGEST = 65504.0  # of float16


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale per output: y = (s q) x + b.

    >>> layer = Int8Linear.of(nn.Linear(3, 2))
    >>> layer(torch.ones(5, 3)).shape, layer.levels.dtype
    (torch.Size([5, 2]), torch.int8)
    """

    levels: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]
    bias: nn.Parameter | None

    def __init__(self, levels: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = levels.shape
        self.register_buffer("levels", levels)
        self.register_buffer("scales", scales)
        self.bias = bias

    @classmethod
    def of(cls, module: nn.Module) -> Int8Linear:
        """Return a linear layer with its weight rounded to int8, or on the meta device, empty."""
        levels, scales = round_int8(outputs_first(module))
        bias = getattr(module, "bias", None)
        return cls(levels, scales, bias)

    @property
    def weight(self) -> Tensor:  # [out, in]
        """The weight, computed on each access."""
        return self.levels.to(self.scales.dtype) * self.scales[:, None]

    def forward(self, inputs: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Return the outputs."""
        return F.linear(inputs, self.weight.to(inputs.dtype), self.bias)

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:  # [out, in] -> int8 [out, in], [out]
    """Return levels q and scales s with w ~ s q: s = max |w| / 127 of each output.

    >>> round_int8(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))[0].tolist()
    [[127, -64], [0, 0]]
    """
    weight = weight.detach().float()
    scales = weight.abs().amax(1) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return torch.round(weight / safe[:, None]).to(torch.int8), scales


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer: of torch, or the Conv1D of ``transformers``."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def outputs_first(module: nn.Module) -> Tensor:  # -> [out, in]
    """Return the weight of a linear layer; Conv1D stores the transposed one."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, nn.Linear) else weight.T


def check_rest(rest: str) -> str:
    """Return the type of the remaining weights, or raise if it is unknown."""
    if rest not in RESTS:
        raise ArgumentError(f"rest={rest!r}: use one of {', '.join(RESTS)}")
    return rest


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of a model whose weight no other module holds."""
    modules = list(model.named_modules())
    owners: dict[int, int] = {}
    for _, module in modules:
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in modules:
        if is_linear(module) and owners[id(module.weight)] == 1:
            yield name, module


@torch.no_grad()
def shrink_rest(model: nn.Module, rest: str) -> None:
    """Round all weights of a model but its packed tables to ``rest``, in place."""
    if rest == "float32":
        return
    for name, module in list(linear_layers(model)) if rest == "int8" else []:
        replace_module(model, name, Int8Linear.of(module))
    for name, tensor in model.state_dict().items():  # buffers that are not stored stay exact
        small = as_stored(name, tensor)
        if small is not tensor:
            tensor.copy_(small)


def fits_half(tensor: Tensor) -> bool:
    """Whether a tensor can be rounded to float16: float32, and within its range."""
    return tensor.dtype == torch.float32 and not bool((tensor.abs() > LARGEST).any())


def as_stored(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a model with small remaining weights as it is stored."""
    half = not name.endswith(".scales") and fits_half(tensor)
    return tensor.half() if half else tensor


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, leaf = name.rpartition(".")
    new.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), leaf, new)
