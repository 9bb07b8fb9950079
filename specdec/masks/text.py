"""Masks as text: ``repr`` of the library's masks and back, so that a trained draft's folder can store its mask."""

from __future__ import annotations

import ast
from typing import Any

from specdec.masks.block import Block
from specdec.masks.causal import Causal
from specdec.masks.mask import And, Mask, Or
from specdec.masks.sinks import Sinks
from specdec.masks.strided import Strided
from specdec.masks.window import Window

_KNOWN = {cls.__name__: cls for cls in (Block, Causal, Sinks, Strided, Window)}


def known(mask: Any) -> bool:
    """Whether a mask is made of the library's masks only, so that its ``repr`` is complete."""
    if type(mask) in (And, Or):
        return known(mask.a) and known(mask.b)
    return type(mask) in _KNOWN.values()


def parse(text: str) -> Mask:
    """The mask whose ``repr`` is ``text``.

    Raises:
        ValueError: the text has anything but the library's masks, ``&`` and ``|``.
    """
    try:
        return _parsed(ast.parse(text, mode="eval").body)
    except (SyntaxError, _Unknown) as error:
        raise ValueError(
            f"{text!r} is no mask of the library's ({', '.join(sorted(_KNOWN))}, joined by & and |)"
        ) from error


class _Unknown(Exception):
    pass


def _parsed(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return And(_parsed(left), _parsed(right))
        case ast.BinOp(left, ast.BitOr(), right):
            return Or(_parsed(left), _parsed(right))
        case ast.Call(ast.Name(name), args, keywords) if name in _KNOWN:
            if all(isinstance(a, ast.Constant) for a in [*args, *(k.value for k in keywords)]):
                return _KNOWN[name](
                    *(ast.literal_eval(a) for a in args),
                    **{str(k.arg): ast.literal_eval(k.value) for k in keywords},
                )
    raise _Unknown
