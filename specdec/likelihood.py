"""How probable generated tokens are: the target reads the finished texts once, with the generated tokens as proposed chains.

No draft, verifier or executor takes part, so the result is the same whichever of them wrote the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least, listed
from specdec.builder import Builder
from specdec.capabilities import ModelInfo
from specdec.decoder import Decoder
from specdec.executors.round import staying
from specdec.generation import Generation
from specdec.kernels.device import own_precision, to_device
from specdec.kernels.topk import topk
from specdec.prompts import Prompts, rows_of
from specdec.protocols import LanguageModel
from specdec.sampling import Sampling, widened
from specdec.serving.requests import Finished
from specdec.types import Context, Proposal, Verdict

ENTRIES = 2**26
"""The most logits of a forward (256 MiB in float32), unless there are more rows than that allows."""


@dataclass(frozen=True, eq=False, repr=False)
class LogProbs(Sequence[Any]):
    """Natural logarithms of the probabilities of generated tokens: a sequence of ``[n]``, one for each prompt, in order.

    All tensors are on the host, in float32 (float64 for a target with float64 logits). A token of probability 0 has -inf.

    Attributes:
        values: for each row ``[n]``, one number for each generated token.
        top_ids, top_values: for each row ``[n, top]``: the most probable tokens in the place of each generated one, the most probable first,
            and their log-probabilities; ``None`` without ``top``.
    """

    values: list[Tensor]
    top_ids: list[Tensor] | None = None
    top_values: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: Any) -> Any:
        """``[n]`` of a row, or a list of them for a slice of rows."""
        return self.values[row]

    @property
    def totals(self) -> Tensor:
        """``[B]`` float64: the log-probability of each row's generated text, the sum over its tokens."""
        return torch.stack([values.double().sum() for values in self.values])

    def __repr__(self) -> str:
        tokens = sum(map(len, self.values))
        mean = f", mean {float(self.totals.sum()) / tokens:.3f}" if tokens else ""
        return f"LogProbs({len(self)} rows, {tokens} tokens{mean})"


class _Text(NamedTuple):
    """A prompt, the ids that were generated for it, the number of its request, and the sampling that this request had of its own."""

    prompt: list[int]
    ids: list[int]
    request: int
    sampling: Sampling | None = None


class _Piece(NamedTuple):
    """Some consecutive tokens of a row: ``[n]``, and ``[n, top]`` twice."""

    values: Tensor
    top_ids: Tensor
    top_values: Tensor


def log_probs(
    decoder: Decoder | Builder,
    generation: Generation | Sequence[Finished] | tuple[Prompts, Sequence[Sequence[int]]],
    *,
    sampled: bool = False,
    top: int | None = None,
    batch_size: int | None = None,
    chunk: int = 256,
) -> LogProbs:
    """The log-probability of every generated token, given the prompt and the tokens before it.

    The target reads the texts once, however they were written, so this takes about the time of reading them as prompts. The decoder may be another one
    than the one that wrote them, a reference model's for example, if it has the same vocabulary.

    Args:
        decoder: whose target's probabilities are asked for.
        generation: what ``generate`` returned; or a list of what ``serve`` yielded; or a pair ``(prompts, ids)``, prompts as for ``generate`` and the
            generated ids of each.
        sampled: by default probabilities are the target's own, the softmax of its logits. With ``True`` they are those of the decoder's sampling, from
            which tokens are drawn: after processors, grammar, temperature and truncations. At temperature 0 the most probable token then has 0, all others -inf.
            A finished request that had a sampling of its own has that one's. A pair does not say what its tokens were drawn from: row b has the settings
            that the decoder has for request b.
        top: also return so many of the most probable tokens in each place; ``None``: none.
        batch_size: read at most so many rows at a time; ``None``: all of them.
        chunk: the most generated tokens of a row in one forward. It is less where the vocabulary is large or the model takes shorter chains only.
    Returns:
        ``LogProbs``, a sequence of tensors ``[n]``. They carry no gradient, and may be used where gradients are computed.
    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a list is empty, or has a request whose prompt is not known, the numbers of prompts and of rows of ids differ, ids are outside the target's
            vocabulary, a text has more tokens than the target has positions, ``top`` is more than the vocabulary, a number is below 1, the sampling has settings for fewer requests than there are or is made for another target, or logits
            have no distribution.
        MemoryError: the texts' keys and values do not fit the memory; a smaller ``batch_size`` may.
    """
    if not isinstance(decoder, (Decoder, Builder)):
        raise TypeError(
            f"decoder is a {type(decoder).__name__}: give a decoder, of a model sd.decoder(model).build()"
        )
    if not isinstance(sampled, bool):
        raise TypeError(f"sampled is {sampled!r}: give True or False")
    decoder = decoder.build() if isinstance(decoder, Builder) else decoder
    target = decoder.target
    texts = _texts(target, generation)
    if top is not None:
        at_least(1, "top", top, "give how many tokens are wanted, at least 1", ", or None")
        if top > target.vocab_size:
            raise ValueError(f"top is {top}: the target's vocabulary has {target.vocab_size} tokens")
    if batch_size is not None:
        at_least(1, "batch_size", batch_size, "give the most rows of a batch", ", or None for all of them")
    at_least(1, "chunk", chunk, "give the most tokens of a row in one forward, at least 1")
    drawn = _Drawn.of(decoder, texts) if sampled else None
    parts: list[list[_Piece]] = [[] for _ in texts]
    some = torch.tensor([b for b, text in enumerate(texts) if text.ids], dtype=torch.long)
    size = max(len(some), 1) if batch_size is None else int(batch_size)
    for numbers in some.split(size) if len(some) else ():
        with own_precision():
            _read(target, drawn, [texts[b] for b in numbers.tolist()], numbers, top or 0, chunk, parts)
    # Made outside inference mode, so that the results may be used where gradients are computed.
    dtype = next((pieces[0].values.dtype for pieces in parts if pieces), torch.float32)
    none = torch.zeros(0, top or 0, dtype=dtype)
    nothing = _Piece(torch.zeros(0, dtype=dtype), none.long(), none)
    made = [_Piece(*map(torch.cat, zip(*(pieces or [nothing])))) for pieces in parts]
    values, top_ids, top_values = map(list, zip(*made))
    return LogProbs(values) if top is None else LogProbs(values, top_ids, top_values)


def _texts(target: LanguageModel, generation: Any) -> list[_Text]:
    """The prompts and the generated ids of every row, which the target can read."""
    if isinstance(generation, Generation):
        prompts, rows = generation.prompt_ids, generation.ids
    elif isinstance(generation, Sequence) and any(isinstance(one, Finished) for one in generation):
        return _readable(target, [_finished(b, one) for b, one in enumerate(generation)])
    elif isinstance(generation, tuple) and len(generation) == 2:
        prompts, rows = rows_of(target, generation[0]), _ids(generation[1])
    elif isinstance(generation, Sequence) and not len(generation):
        raise ValueError("generation is empty: give at least one finished request, or what generate returned")
    else:
        raise TypeError(
            f"generation is a {type(generation).__name__}: give what decoder.generate returned, a list of what decoder.serve yielded "
            "(list(decoder.serve(...))), or a pair (prompts, ids) with the generated ids of each prompt"
        )
    if len(prompts) != len(rows):
        raise ValueError(
            f"generation has {len(prompts)} prompts and ids of {len(rows)} rows: give the ids of each prompt"
        )
    return _readable(target, [_Text(*both, b) for b, both in enumerate(zip(prompts, rows))])


def _finished(b: int, one: Any) -> _Text:
    """The text of a finished request, entry b of a list."""
    if not isinstance(one, Finished):
        raise TypeError(
            f"generation has a {type(one).__name__} at {b} and finished requests elsewhere: give only what decoder.serve yielded"
        )
    if one.ids and not one.prompt_ids:
        raise ValueError(
            f"generation has at {b} a finished request without prompt_ids: give what decoder.serve yielded, or a pair (prompts, ids)"
        )
    return _Text(one.prompt_ids, one.ids, one.index, one.request.sampling)


def _readable(target: LanguageModel, texts: list[_Text]) -> list[_Text]:
    """The same texts; raises ValueError for one that the target cannot read."""
    limit, V = ModelInfo.of(target).max_positions, target.vocab_size
    for b, (prompt, ids, *_) in enumerate(texts):
        outside = next((i for i in (*prompt, *ids) if not 0 <= i < V), None)
        if outside is not None:
            raise ValueError(
                f"generation has the id {outside} in row {b}, and the target's vocabulary has ids 0 to {V - 1}: give a decoder whose target has the "
                "tokenizer that these ids are of"
            )
        if limit is not None and len(prompt) + len(ids) > limit:
            raise ValueError(
                f"generation has {len(prompt) + len(ids)} tokens in row {b}, prompt included, and the target has {limit} positions: give a shorter text"
            )
    return texts


def _ids(given: Any) -> list[list[int]]:
    """The rows of ids of a pair."""
    given = listed(given)
    rows: list[Any] = [listed(row) for row in given] if isinstance(given, Sequence) else [None]
    for b, row in enumerate(rows):
        if not isinstance(row, Sequence) or not all(isinstance(i, Integral) for i in row):
            raise TypeError(
                f"generation has ids that are no rows of whole numbers (row {b}): give a list of the generated ids of each prompt"
            )
    return [[int(i) for i in row] for row in rows]


@torch.inference_mode()
def _read(
    target: LanguageModel,
    drawn: _Drawn | None,
    texts: list[_Text],
    numbers: Tensor,
    top: int,
    chunk: int,
    parts: list[list[_Piece]],
) -> None:
    """Let the target read texts, each a prompt and at least one generated token; appends to ``parts`` of the rows' ``numbers [B]``.

    Each forward is a round in which everything is accepted: of the next n tokens the first n - 1 are proposed, and the last one is the bonus.
    """
    info = ModelInfo.of(target)
    full = Context.of([text.prompt + text.ids for text in texts], request=numbers)
    length = torch.tensor([len(text.prompt) for text in texts])
    context, end = replace(full, length=length, prompt_length=length), full.length
    cache = target.cache(context.batch, full.tokens.shape[1])
    while context.batch:
        most = min(chunk, max(ENTRIES // (context.batch * target.vocab_size), 1))
        if info.longest_chain is not None:
            most = min(most, info.longest_chain + 1)
        count = (end - context.length).clamp(max=most)
        place = torch.arange(int(count.max()))
        tokens = context.tokens.gather(
            1, (context.length[:, None] + place).clamp(max=full.tokens.shape[1] - 1)
        )
        tokens = torch.where(place < count[:, None], tokens, 0)
        proposal = Proposal.chain(tokens[:, :-1], count - 1)
        if info.device is not None and proposal.nodes:
            proposal = proposal.to(info.device)
        logits = target.score(cache, context, proposal if proposal.nodes else None).logits
        if drawn is None:
            # Not the logarithm of a softmax, which has no numbers below 1e-45.
            scores = widened(logits).log_softmax(-1)
        else:
            scores = drawn(logits, context, proposal, count)
        _keep(parts, scores, tokens, context, count, top)
        path = torch.where(place < count[:, None] - 1, place, -1)[:, :-1]
        bonus = tokens.gather(1, count[:, None] - 1)[:, 0]
        cache.commit(context, Verdict(path, count - 1, bonus, tokens))
        context = replace(context, length=context.length + count)
        finished = context.length == end
        if bool(finished.any()):
            stay = staying(finished)
            context, end = context.select(stay), end[stay]
            if len(stay):
                cache = cache.select(stay)


def _keep(
    parts: list[list[_Piece]], scores: Tensor, tokens: Tensor, context: Context, count: Tensor, top: int
) -> None:
    """Append what is wanted of log-probabilities ``scores [B, R, V]``, of ``count[b]`` tokens of each row."""
    values = scores.gather(2, to_device(tokens, scores.device)[..., None])[..., 0].cpu()
    best = topk(scores, top) if top else None
    top_values = values[..., None][..., :0] if best is None else best.values.cpu()
    top_ids = torch.zeros(top_values.shape, dtype=torch.long) if best is None else best.indices.cpu()
    for b, (row, n) in enumerate(zip(context.request.tolist(), count.tolist())):
        wrong = values[b, :n].isnan()
        if bool(wrong.any()):
            raise ValueError(
                f"logits of row {row}, at token {int(context.length[b]) + int(wrong.int().argmax())} of the text, have no distribution: they contain NaN or inf, "
                "or nothing but -inf (a model in float16 may need bfloat16 or float32)"
            )
        parts[row].append(_Piece(values[b, :n], top_ids[b, :n], top_values[b, :n]))


@dataclass(frozen=True)
class _Drawn:
    """What the tokens of each row were drawn from: ``samplings`` has one for each row, and ``requests [B]`` their numbers."""

    samplings: list[Sampling]
    requests: Tensor

    @staticmethod
    def of(decoder: Decoder, texts: list[_Text]) -> _Drawn:
        """Raises TypeError and ValueError for a request's own sampling that does not fit the decoder's target."""
        tokenizer = ModelInfo.of(decoder.target).tokenizer
        for one in {id(text.sampling): text.sampling for text in texts}.values():
            if one is not None:
                one.probe(decoder.target.vocab_size, decoder.device or "cpu", tokenizer)
        return _Drawn(
            [decoder.sampling if text.sampling is None else text.sampling for text in texts],
            torch.tensor([text.request for text in texts], dtype=torch.long),
        )

    def __call__(self, logits: Tensor, context: Context, proposal: Proposal, count: Tensor) -> Tensor:
        """As ``_drawn_from``, for rows of several samplings; ``context.request`` has the numbers of rows."""
        rows: dict[int, list[int]] = {}
        for b, row in enumerate(context.request.tolist()):
            rows.setdefault(id(self.samplings[row]), []).append(b)
        asked, out = replace(context, request=self.requests[context.request]), logits
        for some in rows.values():
            one, which = self.samplings[int(context.request[some[0]])], torch.tensor(some)
            if len(rows) == 1:
                return _drawn_from(one, logits, asked, proposal, count)
            at = to_device(which, logits.device)
            chain = Proposal.chain(
                proposal.tokens[to_device(which, proposal.tokens.device)], count[which] - 1
            )
            out = torch.zeros_like(widened(logits)) if out is logits else out
            out[at] = _drawn_from(one, logits[at], asked.select(which), chain, count[which]).to(out.dtype)
        return out


def _drawn_from(
    sampling: Sampling, logits: Tensor, context: Context, proposal: Proposal, count: Tensor
) -> Tensor:
    """``[B, R, V]`` the logarithms of the probabilities that the sampling makes of ``logits``.

    With processors or a grammar, and for a subclass of ``Sampling``, each token has a call with exactly the text before it, as in plain decoding. In a call for a chain, tokens after
    a forbidden one would get the model's own logits, and the result would depend on where a chunk begins.
    """
    if not sampling.reads_text and not sampling.overridden:
        return _logs(sampling, logits, context, proposal)
    out = torch.zeros_like(widened(logits))
    for r in range(out.shape[1]):
        rows = (count > r).nonzero()[:, 0]
        some, at = context.select(rows), to_device(rows, out.device)
        before = replace(some, length=some.length + r)
        made = _logs(sampling, logits[at, r : r + 1], before, Proposal.none(len(rows), out.device))
        out[at, r] = made[:, 0].to(out.dtype)
    return out


def _logs(sampling: Sampling, logits: Tensor, context: Context, proposal: Proposal) -> Tensor:
    """``[B, R, V]`` in one call; not the logarithm of a softmax where that is possible."""
    if sampling.overridden:
        return sampling(logits, context, proposal).log()
    logs = sampling.scores(widened(logits), context, proposal).log_softmax(-1)
    greedy = sampling.greedy_rows(context)
    if not bool(greedy.any()):
        return logs
    chosen = sampling(logits, context, proposal).log().to(logs.dtype)
    return torch.where(to_device(greedy, logs.device)[:, None, None], chosen, logs)
