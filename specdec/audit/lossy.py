"""Verifiers that are declared lossy, with the total variation that each has on a small example."""

from __future__ import annotations

from collections.abc import Iterator

from specdec import drafts
from specdec.audit.composed import Composition, distribution
from specdec.builder import decoder
from specdec.models import TableModel
from specdec.verifiers import FLy, Mixture, Synthetic, TypicalAcceptance


def lossy() -> Iterator[Composition]:
    """Target (.45, .45, .1) and draft (.2, .3, .5), whose total variation is .4.

    Where one token is drafted, the distance is that of ``law``: typical acceptance gives (.425, .525, .05), a mixture of equal parts (.325, .375, .3). FLy
    needs two: with probability .4 the first is rejected, it is always the third token, and it is kept if the second passes (.6).
    """
    base = decoder(TableModel([0.45, 0.45, 0.1]))
    draft = TableModel(distribution(0.2, 0.3, 0.5))
    one, two = (base.draft(draft, length=k) for k in (1, 2))
    pair = base.draft(drafts.Tree(draft, (2,)), length=1)
    typical, half = TypicalAcceptance(epsilon=0.2, delta=0.3), Mixture(0.5)
    for name, builder, tokens, distance in (
        ("typical acceptance, chain k=1", one.verifier(typical), 3, 0.075),
        ("mixture of equal parts, chain k=1", one.verifier(half), 3, 0.2),
        ("mixture of equal parts, 2 candidates", pair.verifier(half), 3, 0.2),
        ("mixture of the target alone, chain k=1", one.verifier(Mixture(1.0)), 3, 0.0),
        ("synthetic acceptance .5, chain k=1", one.verifier(Synthetic(0.5)), 3, 0.2),
        ("FLy, window 1, chain k=1", one.verifier(FLy(window=1)), 3, 0.0),
        ("FLy, window 1, chain k=2", two.verifier(FLy(window=1)), 4, 0.24),
    ):
        yield Composition(name, builder, tokens, lossless=False, distance=distance)
