"""Mixed workloads (SPIN's experiments): held-out prompts of three domains, ragged lengths, and a classifier of prompts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.arguments import at_least
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import prompts
from specdec.types import Context

DISTRIBUTIONS = ("equal", "lognormal", "bimodal", "one_long")
"""Of ``lengths``."""

SHORTEST = 8
"""Tokens of a row of ``lengths``."""


class Workload(NamedTuple):
    """``rows`` of ids and the ``domain`` of each."""

    rows: list[list[int]]
    domain: list[str]


def halves(sources: Sequence[Hashable], groups: Sequence[str]) -> np.ndarray:
    """``[C]`` 0 or 1: two halves of C texts that share no source, balanced within each group (of texts, as far as their sources allow).

    Sources with many texts are assigned first, each to the half that has fewer of its group's texts.
    """
    half: dict[Hashable, int] = {}
    for group in dict.fromkeys(groups):
        filled = [0, 0]
        for source, count in Counter(s for s, g in zip(sources, groups) if g == group).most_common():
            at = half.setdefault(source, int(filled[1] < filled[0]))
            filled[at] += count
    return np.array([half[source] for source in sources])


def workload(
    tokenizer: Any, batch: int, longest: int = 900, seed: int = 0, median: int = 200, split: str = "test"
) -> Workload:
    """``batch`` prompts of alternating domains; lengths are lognormal (``median``, sigma 0.8), clipped to 32 ... ``longest`` tokens.

    Args:
        split: ``"test"``, or ``"validation"`` for prompts to learn and choose on; the two share no package (``data.prompts``).
    """
    rng = np.random.default_rng((seed, batch))
    lengths = np.clip(np.exp(rng.normal(np.log(median), 0.8, batch)), 32, longest).astype(int)
    texts = {domain: prompts(domain, split=split) for domain in DOMAINS}
    order = {domain: rng.permutation(len(texts[domain])) for domain in DOMAINS}
    rows, domains = [], []
    for i, length in enumerate(lengths.tolist()):
        domain = DOMAINS[i % len(DOMAINS)]
        text = texts[domain][order[domain][i // len(DOMAINS) % len(texts[domain])]]
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"][:length])
        domains.append(domain)
    return Workload(rows, domains)


def lengths(name: str, batch: int, mean: int, seed: int, longest: int = 1990) -> list[int]:
    """Tokens of each row in random order, ``mean`` on average (for ``"bimodal"`` over seeds), at least 8 and at most ``longest``.

    Args:
        name: one of ``DISTRIBUTIONS``. Long rows of ``"bimodal"`` and ``"one_long"`` are shorter where the mean leaves the others fewer than 8 tokens;
            a single row has ``mean``.
    Raises:
        ValueError: no such distribution, no rows, or a mean below 8 or above ``longest``.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"name is {name!r}: give one of {', '.join(DISTRIBUTIONS)}")
    at_least(1, "batch", batch, "give at least 1")
    if not SHORTEST <= mean <= longest:
        raise ValueError(f"mean is {mean}: give {SHORTEST} to longest, {longest}")
    rng = random.Random(f"{name} {batch} {seed}")
    if name == "equal" or batch == 1:
        return [mean] * batch
    if name == "one_long":
        long = min(float(longest), mean * batch - SHORTEST * (batch - 1))
        made = [long] + [(mean * batch - long) / (batch - 1)] * (batch - 1)
    elif name == "bimodal":
        long = max(1, round(batch / 6))
        made = [rng.uniform(0.85, 1.0) * longest for _ in range(long)]
        share = min(1.0, (mean * batch - SHORTEST * (batch - long)) / sum(made))
        made = [max(n * share, float(mean)) for n in made]
        rest = (mean * batch - sum(made)) / (batch - long)
        spread = max(0.0, min(0.2, longest / rest - 1, 1 - SHORTEST / rest))
        made += [rest * rng.uniform(1 - spread, 1 + spread) for _ in range(batch - long)]
    else:
        made = [rng.lognormvariate(0.0, 1.0) for _ in range(batch)]
        for _ in range(50):  # clip, and give what is too much to the others
            scale = mean * batch / sum(made)
            made = [min(max(n * scale, SHORTEST), longest) for n in made]
    rng.shuffle(made)
    return [max(SHORTEST, round(n)) for n in made]


CODE = re.compile(
    r"^\s*(?:def |class |import |from \w|return\b|(?:if|elif|for|while|with|except) ?.*:$|else:|try:|raise |self\.|@)"
    r"|\w\(.*\)\s*$|\w = |\w\.\w+\(",
    re.MULTILINE,
)


def temperatures(given: Sequence[float], batch: int) -> tuple[float, ...]:
    """A temperature for each of ``batch`` rows of a workload: every domain gets each of ``given`` in turn."""
    return tuple(given[i // len(DOMAINS) % len(given)] for i in range(batch))


class ByDomain:
    """The kind of a request is the domain that its prompt looks like, by its characters: no labels are needed.

    Tables end in lines of digits and quotes; code has lines that are statements; prose has neither.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, context: Context) -> Sequence[str]:
        return [self.of(context.tokens[b, : int(n)].tolist()) for b, n in enumerate(context.prompt_length)]

    def of(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids)
        end = self.tokenizer.decode(ids[-512:])
        solid = max(1, sum(not c.isspace() for c in end))
        digits = sum(c.isdigit() for c in end) / solid
        marks = sum(c in "()[]{}=:._'\"," for c in end) / solid
        if digits > 0.1 or (marks > 0.22 and end.count("(") < 0.012 * solid):
            return "table"
        lines = [line for line in text.splitlines() if line.strip()]
        return "code" if sum(bool(CODE.search(line)) for line in lines) > 0.15 * len(lines) else "text"
