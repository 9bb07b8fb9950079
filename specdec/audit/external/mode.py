"""Torch's random operators, with numbers that a ``Tape`` decides."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.arguments import name_of
from specdec.audit.external.lazy import LINEAR, LOG, Lazy, lazy, operate, put, refused, words
from specdec.audit.external.tape import CannotWalk, Tape

_REFUSED = words(
    "randn randn_like normal normal_ randint randint_like randperm random_ geometric_ cauchy_ log_normal_ poisson binomial rrelu rrelu_ "
    "native_dropout _standard_gamma _sample_dirichlet"
)
_DROPOUT = words(
    "dropout dropout_ alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d"
)
DRAWS = "draw with torch.rand, uniform_, exponential_, bernoulli or multinomial, which can be walked"


class Foreign(TorchFunctionMode):
    """While it is active, torch's random operators give numbers of ``tape``."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func, "")
        make = _MAKES.get(name)
        if make is not None and type(func) is not FunctionType:
            return make(self, *args, **kwargs)
        if name in _REFUSED or (name in _DROPOUT and _drops(*args, **kwargs)):
            raise refused(name, DRAWS)
        if any(issubclass(t, Lazy) for t in types):
            return operate(func, args, kwargs)
        if type(func) is FunctionType:  # it may draw inside, where this mode does not see it
            before = torch.get_rng_state()
            out = func(*args, **kwargs)
            if not torch.equal(before, torch.get_rng_state()):
                raise refused(name, DRAWS)
            return out
        return func(*args, **kwargs)

    def names(self, shape: Any, generator: torch.Generator | None) -> Tensor:
        """New numbers. The generator is advanced by one number, so that seeding it again gives the same ones."""
        source = torch.default_generator if generator is None else generator
        names = self.tape.numbers(shape, id(source), source.get_state().numpy().tobytes())
        torch.rand((), generator=generator, device=source.device)
        self.tape.advanced(id(source), source.get_state().numpy().tobytes())
        return names


def _drops(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


def _rand(
    mode: Foreign, *size: Any, generator: torch.Generator | None = None, out: Any = None, **kwargs: Any
) -> Lazy:
    if out is not None:
        raise refused("rand(out=...)", DRAWS)
    kwargs.pop("names", None)
    like = torch.empty(*size, **kwargs)
    return lazy(like, mode.tape, mode.names(like.shape, generator))


def _rand_like(
    mode: Foreign, input: Tensor, *, generator: torch.Generator | None = None, **kwargs: Any
) -> Lazy:
    return lazy(
        torch.empty_like(input.as_subclass(Tensor), **kwargs), mode.tape, mode.names(input.shape, generator)
    )


def _uniform_(
    mode: Foreign, t: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None, **more: Any
) -> Tensor:
    low, high = more.get("from", low), more.get("to", high)  # "from" is a keyword of Python
    return _put(mode, t, generator, "uniform_", LINEAR, high - low, low)


def _exponential_(mode: Foreign, t: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    return _put(mode, t, generator, "exponential_", LOG, -1 / lambd, 0.0)


def _put(mode: Foreign, t: Tensor, generator: Any, name: str, *what: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty_like(t.as_subclass(Tensor))
    return put(t, lazy(like, mode.tape, mode.names(t.shape, generator), *what), name)


def _bernoulli(
    mode: Foreign, input: Tensor, p: Any = None, *, generator: Any = None, out: Any = None
) -> Tensor:
    if out is not None:
        raise refused("bernoulli(out=...)", DRAWS)
    level = torch.as_tensor(input if p is None else p, dtype=torch.float64).expand(input.shape)
    if not bool(((level >= 0) & (level <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return mode.tape.below(mode.names(input.shape, generator), level.cpu()).to(input)


def _bernoulli_(mode: Foreign, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return input.copy_(_bernoulli(mode, input, p, generator=generator))


def _multinomial(
    mode: Foreign,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    out: Any = None,
) -> Tensor:
    if isinstance(input, Lazy):
        raise refused("multinomial")
    if out is not None:
        raise refused("multinomial(out=...)", DRAWS)
    law = input.detach().double().cpu().reshape(-1, input.shape[-1]).clone()
    if bool(((law < 0) | ~law.isfinite()).any()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if bool((law.sum(-1) <= 0).any()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement and bool(((law > 0).sum(-1) < num_samples).any()):
        raise CannotWalk(
            f"`multinomial` without replacement of {num_samples} tokens where fewer have a probability: torch returns any others then"
        )
    shape, V = input.shape[:-1], input.shape[-1]
    names = mode.names((*shape, max(V, num_samples)), generator).reshape(len(law), -1)
    if mode.tape.is_seeded(names):
        if num_samples > 1:
            raise refused("multinomial of several tokens by a seeded generator", DRAWS)
        return mode.tape.race(names, law).reshape(*shape, 1).to(input.device)  # as torch draws one token
    tokens = torch.empty(len(law), num_samples, dtype=torch.long)
    for n in range(num_samples):
        tokens[:, n] = mode.tape.draw(names[:, n], law)
        if not replacement:
            law.scatter_(1, tokens[:, n : n + 1], 0)
    return tokens.reshape(*shape, num_samples).to(input.device)


_MAKES: dict[str, Callable[..., Any]] = {
    "rand": _rand,
    "rand_like": _rand_like,
    "uniform_": _uniform_,
    "exponential_": _exponential_,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "multinomial": _multinomial,
}
