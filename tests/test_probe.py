"""Functions of uniforms that cannot be looked into: the cube is cut where they change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec as sd
from specdec.audit.certify import certify
from specdec.audit.external import CannotWalk, External, takes_uniforms
from specdec.audit.external.probe import boxes

P, Q = [0.45, 0.45, 0.1], [0.2, 0.3, 0.5]


def opaque(tokens, q, p, u, same=False):
    """Rejection on numpy arrays: tests with ``u[:-1]``, and the next token by the inverse distribution function at ``u[-1]``."""
    tokens, q, p, u = (x.numpy() for x in (tokens, q, p, u))
    for n, x in enumerate(tokens):
        if not u[n] < p[n, x] / q[n, x]:
            left = np.clip(p[n] - q[n], 0, None)
            return [
                *tokens[:n],
                np.searchsorted(np.cumsum(left / left.sum()), u[n] if same else u[-1], "right"),
            ]
    return [*tokens, np.searchsorted(np.cumsum(p[-1])[:-1], u[-1], "right")]


def one_number(tokens, q, p, u):
    return opaque(tokens, q, p, u, same=True)


def products(tokens, q, p, u):
    chance = np.minimum(1, p.numpy()[np.arange(2), tokens.numpy()] / q.numpy()[np.arange(2), tokens.numpy()])
    return [*tokens.numpy()[: 2 * int(u[0] * u[1] < chance.prod())], 0]


def found(f, k, **settings):
    target, draft = sd.TableModel(P), sd.TableModel(Q)
    rule = External(takes_uniforms(f, lambda k: k + 1, **settings))
    return certify(sd.decoder(target).draft(draft, length=k).verifier(rule).build(), max_new_tokens=k + 2)


def test_an_opaque_rule_is_exact_and_a_wrong_one_is_seen():
    assert found(opaque, 1).lossless
    assert found(one_number, 1).total_variation == pytest.approx(0.0375, abs=1e-9)  # B8 of the museum


def test_boxes_of_known_functions():
    law, rest = boxes(lambda u: (int(u[0] < 0.3), int(u[1] >= 0.6)), 2)
    assert rest == 0
    assert law == pytest.approx({(0, 0): 0.42, (0, 1): 0.28, (1, 0): 0.18, (1, 1): 0.12}, abs=1e-12)
    assert boxes(lambda u: (7,), 0) == ({(7,): 1.0}, 0.0)
    between = lambda u: (int(0.4 < u[0] < 0.5),)  # noqa: E731
    assert boxes(between, 1)[0] == {(0,): 1.0}  # not monotone: nothing is seen without a hint
    assert boxes(between, 1, hints=(0.45,))[0][1,] == pytest.approx(0.1, abs=1e-12)


def test_what_is_not_constant_on_boxes_is_refused():
    law, rest = boxes(lambda u: (int(u[0] * u[1] < 0.5),), 2, most=2000)
    exact = 0.5 * (1 + np.log(2))
    assert 0 < rest < 0.1
    assert law[1,] <= exact <= law[1,] + rest
    with pytest.raises(CannotWalk, match="products is not constant on boxes of its uniforms"):
        found(products, 2, most=500)
    with pytest.raises(ValueError, match="from 0 to 8 uniforms"):
        boxes(lambda u: (0,), 9)


def test_float32_code_has_a_floor():
    law, rest = boxes(lambda u: (int(u.float()[0] < torch.tensor(0.3)),), 1)
    assert rest == 0
    assert law[1,] == pytest.approx(0.3, abs=1e-7)
