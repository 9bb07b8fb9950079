"""Why two greedy texts of one target differ: a tie, which rounding decides, or a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.builder import Builder
from specdec.capabilities import ModelInfo
from specdec.decoder import Decoder
from specdec.generation import Generation
from specdec.models.check import Plain
from specdec.models.hf import HFModel
from specdec.models.own_cache import OwnCache
from specdec.protocols import LanguageModel
from specdec.types import Context, Proposal

SLACK = 2.0
"""A gap of up to so many times the measured rounding error is a tie, because each of the two scores may be off by that error."""


@dataclass(frozen=True)
class Difference:
    """The first place where two texts of a row differ.

    Attributes:
        row: of the batch. position: number of the generated token, the first is 0. tokens: the token of each text there, ``None`` where the text has ended.
        gap: how much larger the target's largest score (a logit, after processors) is than the smaller one of the two tokens'. rounding: the largest change
            of such a score when the forward has another shape, or (with ``HFModel`` and ``OwnCache``) when the result of every matrix product is off by one more rounding error. Both are
            NaN where one of the texts has ended.
        probable: which of the texts has the target's most probable token there, 0 or 1; ``None``: neither.
    """

    row: int
    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    rounding: float
    probable: int | None

    @property
    def ended(self) -> bool:
        """One of the texts ends where the other goes on, so budgets or stops differ."""
        return None in self.tokens

    @property
    def tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= SLACK * self.rounding

    def __str__(self) -> str:
        place, (a, b) = f"row {self.row}, token {self.position}", self.tokens
        if self.ended:
            return f"{place}: the {'first' if a is None else 'second'} text has ended, so budgets or stops differ"
        said = f"{place}: {a} and {b}, a gap of {self.gap:.2g} where rounding explains {SLACK * self.rounding:.2g}"
        if self.tie:
            return f"{said}: a tie"
        whose = (
            "neither text has"
            if self.probable is None
            else f"the {('first', 'second')[self.probable]} text has"
        )
        return f"{said}: no tie; {whose} the most probable token"


@dataclass(frozen=True, repr=False)
class Differences(Sequence[Difference]):
    """What ``differences`` found: a ``Difference`` for each examined row whose texts differ.

    Attributes:
        found: the differences, in the order of rows. rows: how many were compared. differ: in how many of them the texts differ.
    """

    found: tuple[Difference, ...]
    rows: int
    differ: int

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    @property
    def explained(self) -> bool:
        """Whether all differences are ties, but for texts that one budget or stop has ended earlier."""
        return all(one.tie or one.ended for one in self.found)

    def __repr__(self) -> str:
        if not self.found:
            return f"the texts of all {self.rows} rows are equal"
        more = "" if self.differ == len(self) else f"; the first {len(self)}"
        return "\n".join([f"{self.differ} of {self.rows} rows differ{more}:", *map(str, self.found)])


def differences(
    decoder: Decoder | Builder, one: Generation, other: Generation, rows: int = 16
) -> Differences:
    """Where two greedy generations of the same prompts differ first, and whether rounding explains it.

    In bfloat16 the logits of a position depend on the shape of the batch in which it was computed. Where the two most probable tokens are nearly equal, speculative and
    plain decoding may take different ones. The target computes the logits of the first differing position in several shapes, and once more with every
    product rounded again. A gap within this error is a tie. A larger one means that a text is not the target's: a mistake in a part, or other weights.

    Args:
        decoder: a greedy decoder of the target that wrote both texts; if they were made in different precisions, of the target in the lower one, whose
            rounding errors are the larger ones. one, other: what ``generate`` returned. rows: how many of the differing rows are examined, at most.
    Returns:
        ``Differences``, a sequence of ``Difference``; ``explained`` says whether all of them are ties.
    Raises:
        TypeError: an argument has the wrong type. ValueError: the decoder samples, or the generations have different prompts.
    """
    if not isinstance(decoder, (Decoder, Builder)):
        raise TypeError(
            f"decoder is a {type(decoder).__name__}: give a decoder, of a model sd.decoder(model).greedy()"
        )
    for name, given in (("one", one), ("other", other)):
        if not isinstance(given, Generation):
            raise TypeError(f"{name} is a {type(given).__name__}: give what decoder.generate returned")
    at_least(1, "rows", rows, "give how many rows are looked at, at least 1")
    made = decoder.build() if isinstance(decoder, Builder) else decoder
    if not made.sampling.greedy:
        raise ValueError(
            "decoder samples, and sampled texts differ by their random numbers: give a decoder with .greedy(), or certify a decoder that samples"
        )
    if one.prompt_ids != other.prompt_ids:
        raise ValueError("one and other have different prompts: give two generations of the same ones")
    differ = [row for row, (a, b) in enumerate(zip(one.ids, other.ids)) if a != b]
    found = [
        _first(made, row, list(one.prompt_ids[row]), list(one.ids[row]), list(other.ids[row]))
        for row in differ[:rows]
    ]
    return Differences(tuple(found), len(one.ids), len(differ))


def _first(decoder: Decoder, row: int, prompt: list[int], a: list[int], b: list[int]) -> Difference:
    position = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    x, y = (ids[position] if position < len(ids) else None for ids in (a, b))
    if x is None or y is None:
        return Difference(row, position, (x, y), float("nan"), float("nan"), None)
    text = prompt + a[:position]
    context = Context.of([text])
    with torch.inference_mode():
        ways = torch.stack(list(_ways(decoder.target, text)))
        scores = torch.cat([decoder.sampling.scores(way[None, None], context, None)[0] for way in ways])
        error = _apart(scores, scores[0])
        if isinstance(decoder.target, HFModel | OwnCache):
            plain = Plain(decoder.target)
            once, twice = (
                decoder.sampling.scores(logits[-1:][None].cpu(), context, None)[0]
                for logits in (plain(text), plain(text, rounded=True))
            )
            error = max(error, _apart(twice, once))
    exact = scores.mean(0)
    gap = float(exact.max() - torch.minimum(exact[x], exact[y]))
    best = int(exact.argmax())
    return Difference(row, position, (x, y), gap, error, (x, y).index(best) if best in (x, y) else None)


def _apart(scores: Tensor, others: Tensor) -> float:
    """The largest difference of scores, of those that are not -inf."""
    known = scores.isfinite() & others.isfinite()
    return float((scores - others).where(known, 0).abs().max())


def _ways(target: LanguageModel, text: list[int], tokens: int = 4) -> Iterator[Tensor]:
    """``[V]`` float64 the logits after a text, computed in forwards of several shapes: alone, in a batch, as a verified chain, token by token."""
    size = len(text) + tokens + 1
    for copies in (1, 3):
        context = Context.of([text] * copies, size)
        yield target.score(target.cache(copies, size), context, None).logits[0, 0].double().cpu()
    info = ModelInfo.of(target)
    last = min(tokens, len(text) - 1, tokens if info.longest_chain is None else info.longest_chain)
    if last < 1:
        return
    before, after = text[:-last], text[-last:]
    cache, context = target.cache(1, size), Context.of([before], size)
    chain = Proposal.chain(torch.tensor([after]), torch.tensor([last]))
    if info.device is not None:
        chain = chain.to(info.device)
    yield target.score(cache, context, chain).logits[0, last].double().cpu()
    cache = target.cache(1, size)
    for n in range(len(before), len(text) + 1):
        out = target.score(cache, Context.of([text[:n]], size), None).logits[0, 0]
    yield out.double().cpu()
