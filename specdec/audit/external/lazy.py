"""Random numbers of which nothing is known but what was asked: comparisons and races decide, everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import name_of
from specdec.audit.external.tape import CannotWalk, Tape

# What a number is, as a function of its uniform u: a u + b, a log u + b, a / -log u, or a (-log(-log u)) + b.
LINEAR, LOG, SPEED, GUMBEL = "linear", "log", "speed", "gumbel"
REMEDY = (
    "random numbers may be compared with numbers, shifted, scaled, taken the logarithm of, and raced (an argmax of w / exponential or of "
    "log w + Gumbel noise); everything else, such as a product of two of them, cannot be enumerated"
)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRUCTURE = words(
    "getitem reshape reshape_as view view_as squeeze unsqueeze expand expand_as broadcast_to flatten unflatten permute transpose t swapaxes movedim clone "
    "contiguous detach select narrow unbind chunk split flip index_select gather take_along_dim repeat stack cat alias"
)
_CASTS = words("to float double half bfloat16 type type_as cpu cuda")
_LIKE = words("empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_tensor")
_FACTS = words(
    "shape dtype device ndim is_cuda is_cpu layout requires_grad grad size dim numel is_floating_point is_contiguous stride "
    "element_size is_complex len"
)


class Lazy(Tensor):
    """Numbers that are not drawn. The tensor itself holds NaN.

    Attributes:
        tape: decides. names_: of the uniforms. form: what the numbers are. flipped: u is 1 minus the uniform. a, b: float64, of this shape.
        shared: whether a view of this tensor, or of which this is a view, may be held by the caller.
    """

    tape: Tape
    names_: Tensor
    form: str
    flipped: bool
    a: Tensor
    b: Tensor
    shared: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})

    __array_ufunc__ = None  # so that a comparison with a numpy number comes to this class

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<random numbers that are not drawn, {list(self.shape)}>"

    def __lt__(self, other: Any) -> Tensor:
        return super().__lt__(_tensor(other))

    def __le__(self, other: Any) -> Tensor:
        return super().__le__(_tensor(other))

    def __gt__(self, other: Any) -> Tensor:
        return super().__gt__(_tensor(other))

    def __ge__(self, other: Any) -> Tensor:
        return super().__ge__(_tensor(other))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise refused("numpy's conversion to an array")


def _tensor(value: Any) -> Any:
    """A numpy array as a tensor; torch compares with everything else."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def refused(name: str, remedy: str = REMEDY) -> CannotWalk:
    return CannotWalk(f"`{name}` with random numbers cannot be walked: {remedy}")


def lazy(
    like: Tensor,
    tape: Tape,
    names: Tensor,
    form: str = LINEAR,
    a: Any = 1.0,
    b: Any = 0.0,
    flip: bool = False,
) -> Lazy:
    """Numbers with the shape, dtype and device of ``like``."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.full_like(like, torch.nan, requires_grad=False).as_subclass(Lazy)
        return become(made, tape, names, form, a, b, flip)


def become(tensor: Tensor, tape: Tape, names: Tensor, form: str, a: Any, b: Any, flip: bool = False) -> Lazy:
    """Turn ``tensor``, which a caller may hold, into these numbers."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.fill_(torch.nan)
        tensor.__class__ = Lazy
        assert isinstance(tensor, Lazy)
        tensor.tape, tensor.names_, tensor.form, tensor.flipped, tensor.shared = (
            tape,
            names,
            form,
            flip,
            False,
        )
        tensor.a, tensor.b = (
            torch.as_tensor(x, dtype=torch.float64).cpu().broadcast_to(names.shape).clone() for x in (a, b)
        )
    return tensor


def put(tensor: Tensor, made: Lazy, name: str) -> Lazy:
    """An in-place operation: ``tensor``, which may be an ordinary one, gets the numbers of ``made``."""
    if made.shape != tensor.shape or (not isinstance(tensor, Lazy) and tensor._base is not None):
        raise refused(f"{name} into a part of another tensor", "draw a new tensor of random numbers instead")
    if not isinstance(tensor, Lazy) or not tensor.shared:
        return become(tensor, made.tape, made.names_, made.form, made.a, made.b, made.flipped)
    if (tensor.form, tensor.flipped) != (made.form, made.flipped):
        raise refused(
            f"{name} where another view of the same numbers exists",
            "draw a new tensor of random numbers instead",
        )
    for old, new in ((tensor.names_, made.names_), (tensor.a, made.a), (tensor.b, made.b)):
        old.copy_(new)  # views share it
    return tensor


def operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on arguments of which some are ``Lazy``."""
    raw = name_of(func, str(func))
    if raw == "__get__":
        name = name_of(func.__self__, "an attribute")  # type: ignore[attr-defined]
        raw = name
        if name in ("T", "mT"):
            return _structure(func, args, kwargs)
    name = raw.strip("_")
    changes = raw in _IN_PLACE or (raw[-1] == "_" and raw[-2] != "_")  # its first argument
    if changes and name not in _ARITHMETIC:
        raise refused(raw)
    with torch._C.DisableTorchFunctionSubclass():
        if name in _FACTS:
            return func(*args, **kwargs)
        if name in _LIKE:
            return func(*(x.as_subclass(Tensor) if isinstance(x, Lazy) else x for x in args), **kwargs)
        if name in _STRUCTURE:
            return _structure(func, args, kwargs)
        if raw in _CASTS:
            (x, *rest) = args
            like = func(x.as_subclass(Tensor), *rest, **kwargs)
            return lazy(like, x.tape, x.names_, x.form, x.a, x.b, x.flipped)
        if name == "item":  # a number of Python, as far as it is compared
            return _structure(torch.reshape, (*args, ()), {})
        if name == "tolist":
            return _listed(args[0])
        if name == "iter":
            return iter(_structure(torch.unbind, args, {}))
        if name in _COMPARE and not kwargs:
            return _compare(name, args)
        if name in ("argmax", "argmin"):
            return _argmost(name, *args, **kwargs)
        if name in _ARITHMETIC and not {"out"} & set(kwargs):
            made = _arithmetic(name, args, kwargs)
            return put(args[0], made, raw) if changes else made
    raise refused(raw)


def _listed(x: Lazy) -> Any:
    return [_listed(part) for part in _structure(torch.unbind, (x,), {})] if x.dim() else x


def _structure(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found: list[Lazy] = []

    def part(value: Any, pick: Callable[[Lazy], Tensor]) -> Any:
        if isinstance(value, Lazy):
            found.append(value)
            return pick(value)
        if isinstance(value, list | tuple):
            return type(value)(part(v, pick) for v in value)
        return value

    def run(pick: Callable[[Lazy], Tensor]) -> Any:
        return func(*part(args, pick), **{k: part(v, pick) for k, v in kwargs.items()})

    like = run(lambda x: x.as_subclass(Tensor))
    names, a, b = run(lambda x: x.names_), run(lambda x: x.a), run(lambda x: x.b)
    one = found[0]
    if any((x.form, x.flipped) != (one.form, one.flipped) for x in found):
        raise refused(name_of(func, "cat"))

    def make(like: Tensor, names: Tensor, a: Tensor, b: Tensor) -> Lazy:
        made = like.as_subclass(Lazy)
        made.tape, made.form, made.flipped = one.tape, one.form, one.flipped
        made.names_, made.a, made.b = names, a, b
        made.shared = names._base is not None  # then what is put into one is seen in the other
        one.shared |= made.shared
        return made

    if isinstance(like, Tensor):
        return make(like, names, a, b)
    return type(like)(make(*parts) for parts in zip(like, names, a, b))


# -- comparisons ------------------------------------------------------------------------------------------------------------------

_COMPARE = {
    "lt": True,
    "le": True,
    "less": True,
    "less_equal": True,
    "gt": False,
    "ge": False,
    "greater": False,
    "greater_equal": False,
}

_CLOSED = words("le less_equal ge greater_equal")


def _compare(name: str, args: tuple[Any, ...]) -> Tensor:
    x, y = args
    less = _COMPARE[name]
    if not isinstance(x, Lazy):
        x, y, less = y, x, not less
    if isinstance(y, Lazy):
        raise refused(f"{name} of two random numbers")
    value = torch.as_tensor(y, dtype=torch.float64).cpu()
    names, a, b, value = torch.broadcast_tensors(x.names_, x.a, x.b, value)
    level, rising = _level(x.form, a, b, value)
    if x.flipped:
        level, rising = 1 - level, ~rising
    closed = (name in _CLOSED) ^ (not less) ^ ~rising  # whether the number at the level counts as below it
    below = x.tape.below(names.contiguous(), level.nan_to_num(nan=0.0).clamp(0, 1), closed).bool()
    return (((below == rising) == less) & ~value.isnan()).to(x.device)  # a comparison with NaN is false


def _level(form: str, a: Tensor, b: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The u at which the number is ``value``, and whether it is below it for smaller u."""
    if form == SPEED:
        return torch.where(value > 0, torch.exp(-a / value), 0), torch.ones_like(a, dtype=torch.bool)
    t = torch.where(a != 0, (value - b) / a, torch.where(b < value, torch.inf, -torch.inf))
    if form == LOG:
        t = t.exp()
    elif form == GUMBEL:
        t = torch.exp(-torch.exp(-t))
    return t, a >= 0


# -- races ------------------------------------------------------------------------------------------------------------------------


def _argmost(name: str, x: Lazy, dim: int | None = None, keepdim: bool = False) -> Tensor:
    best = name == "argmax"
    names, a, b = (t.flatten() if dim is None else t.movedim(dim, -1) for t in (x.names_, x.a, x.b))
    sign = a if best else -a
    if x.form == SPEED and best and bool((a >= 0).all()):
        weights = a
    elif x.form == LOG and bool((b.abs() <= 1e-12).all()) and bool((sign > 0).all()):
        weights = 1 / sign
    elif x.form == GUMBEL and bool((sign > 0).all()) and bool((sign == sign[..., :1]).all()):
        weights = torch.softmax((b if best else -b) / sign, -1)
    else:
        raise refused(name)
    won = x.tape.race(names, weights, x.flipped)
    if keepdim:
        won = won.reshape([1] * x.dim()) if dim is None else won.unsqueeze(dim)
    return won.to(x.device)


# -- arithmetic -------------------------------------------------------------------------------------------------------------------

_ALIASES = {
    "add": "add radd iadd",
    "sub": "sub rsub isub subtract",
    "mul": "mul rmul imul multiply",
    "div": "div truediv rdiv rtruediv itruediv divide true_divide",
}
_BINARY = {alias: op for op, aliases in _ALIASES.items() for alias in aliases.split()}
_ARITHMETIC = {*_BINARY, *words("neg negative log log1p exp reciprocal clamp clip clamp_min clamp_max")}
_IN_PLACE = words("__iadd__ __isub__ __imul__ __itruediv__")
_TINY = 1e-12


def _arithmetic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lazy:
    if name in ("clamp", "clip", "clamp_min", "clamp_max"):
        return _clamp(name, args, kwargs)
    if kwargs:
        raise refused(f"{name}({', '.join(kwargs)}=...)")
    if len(args) == 1:
        return _unary(name, args[0])
    x, y = args
    if name in ("rsub", "rdiv", "rtruediv"):
        x, y = y, x
    if isinstance(x, Lazy) and isinstance(y, Lazy):
        raise refused(f"{name} of two random numbers")
    op = _BINARY[name]
    first = isinstance(x, Lazy)
    u, c = (x, y) if first else (y, x)
    value = torch.as_tensor(c, dtype=torch.float64).cpu()
    if op == "sub":
        return _affine(u, 1.0, -value) if first else _affine(u, -1.0, value)
    if op == "add":
        return _affine(u, 1.0, value)
    if op == "mul":
        return _affine(u, value, 0.0)
    return _affine(u, 1 / value, 0.0) if first else _affine(_unary("reciprocal", u), value, 0.0)


def _affine(u: Lazy, scale: Any, shift: Any) -> Lazy:
    """``scale * u + shift``."""
    if u.form == SPEED:
        if bool((torch.as_tensor(shift) != 0).any()) or bool((torch.as_tensor(scale) < 0).any()):
            raise refused("a shift or a negative multiple of w / exponential")
        return _like(u, SPEED, u.a * scale, u.b)
    return _like(u, u.form, u.a * scale, u.b * scale + shift)


def _unary(name: str, u: Lazy) -> Lazy:
    if name in ("neg", "negative"):
        if u.form == SPEED:
            raise refused(name)
        return _like(u, u.form, -u.a, -u.b)
    if name == "log1p":
        return _unary("log", _affine(u, 1.0, 1.0))
    if name == "reciprocal" and u.form == LOG and bool((u.b.abs() <= _TINY).all()):
        return _like(u, SPEED, -1 / u.a, 0.0)
    if name == "log":
        if u.form == LINEAR and bool((u.b.abs() <= _TINY).all()) and bool((u.a > 0).all()):
            return _like(u, LOG, 1.0, u.a.log())
        if u.form == LINEAR and bool(((u.b + u.a).abs() <= _TINY).all()) and bool((u.b > 0).all()):
            return _like(u, LOG, 1.0, u.b.log(), flip=not u.flipped)
        if u.form == LOG and bool((u.b.abs() <= _TINY).all()) and bool((u.a < 0).all()):
            return _like(u, GUMBEL, -1.0, (-u.a).log())
        if u.form == SPEED:
            return _like(u, GUMBEL, 1.0, u.a.log())
    if name == "exp":
        if u.form == LOG and bool((u.a == 1).all()):
            return _like(u, LINEAR, u.b.exp(), 0.0)
        if u.form == GUMBEL and bool((u.a == 1).all()):
            return _like(u, SPEED, u.b.exp(), 0.0)
    raise refused(name)


def _clamp(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lazy:
    """A clamp that hardly ever does anything is left out."""
    u, *rest = args
    bounds = dict(zip(("min", "max") if name in ("clamp", "clip") else (name[-3:],), rest)) | kwargs
    for side, bound in bounds.items():
        if bound is None:
            continue
        level, rising = _level(u.form, u.a, u.b, torch.as_tensor(bound, dtype=torch.float64))
        level = level.clamp(0, 1)
        below = torch.where(rising, level, 1 - level)
        if bool((below if side == "min" else 1 - below).max() > _TINY):
            raise refused(name, f"it changes the number with a probability above {_TINY}")
    return u


def _like(u: Lazy, form: str, a: Any, b: Any, flip: bool | None = None) -> Lazy:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    names, a, b = torch.broadcast_tensors(u.names_, a, b)
    payload = torch.empty(names.shape, dtype=u.dtype, device=u.device)
    return lazy(payload, u.tape, names.clone(), form, a, b, u.flipped if flip is None else flip)
