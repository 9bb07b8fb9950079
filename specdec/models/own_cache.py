"""Any Hugging Face causal LM through its own forward and its own cache, row by row: recurrent and hybrid models, and whatever cannot run packed.

What others keep as keys and values can be cut at any length; a recurrent state cannot. Here nothing is cut: after a rejection, the
model goes on from an older state (``cache.states``) and reads the accepted tokens again, together with the next proposal.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import at_least, whole
from specdec.cache.kept_states import KeptStates
from specdec.cache.states import State, StateCache
from specdec.configs import cache_name, setting
from specdec.forward.families import (
    ONE_BY_ONE,
    OWN_CACHE,
    UnsupportedModel,
    own_cache,
    positions_of,
    refuse,
)
from specdec.forward.taps import listening, tapped
from specdec.models.check import check_own, check_prefix_cache, check_tokenizer, narrowed
from specdec.models.clone import Wrapper, structural_clone
from specdec.models.load import load, load_tokenizer
from specdec.types import Context, Fed, Proposal, Scores

__all__ = ["OWN_CACHE", "OwnCache"]


class OwnCache(Wrapper):
    """A transformers causal LM with its own forward and cache, behind ``protocols.LanguageModel``; for families that ``HFModel`` refuses.

    Rows are read one after another, each without padding, so a batch saves no time. Proposals are chains.

    Args:
        model: a ``...ForCausalLM`` of a family in ``models.OWN_CACHE``, or another one. It is compared with its forward without a cache first.
            It is not modified; later changes of its weights in place take effect.
        tokenizer: needed for text and chat prompts only.
        prefill_chunk: the most tokens of a prompt in one forward; ``None``: 512.
        refeed: the most accepted tokens that are read again in a verification. If there are more, they are read for good in a forward of their own.
        prefix_cache: bytes in which states of texts stay between calls, for prompts that begin with an earlier one (docs/models.md); ``None``: every
            call reads its prompts. ``prefixes`` says what was found.
    Raises:
        UnsupportedModel: the family is no causal LM of text, or a forward in pieces gives other logits than one without a cache.
        TypeError, ValueError: the model is no transformers model, a number is out of range, or there is a ``prefix_cache`` for a family that reads one token
            at a time.
    """

    supports_trees = False
    concurrent = True
    prefixes: KeptStates | None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        prefill_chunk: int | None = None,
        refeed: int = 8,
        prefix_cache: int | None = None,
    ):
        model = setting(model, "_orig_mod") or model  # torch.compile's wrapper
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model is a {type(model).__name__}: give a transformers model, or use OwnCache.from_pretrained"
            )
        check_tokenizer(tokenizer)
        for name, value, least in (
            ("prefill_chunk", 512 if prefill_chunk is None else prefill_chunk, 1),
            ("refeed", refeed, 0),
        ):
            whole(name, value)
            at_least(least, name, value, f"give a number of tokens, at least {least}")
        own_cache(model.config)
        self.model, self.tokenizer, self.clone = model, tokenizer, structural_clone(model)
        self.prefill_chunk, self.refeed = prefill_chunk and int(prefill_chunk), int(refeed)
        takes = inspect.signature(type(self.clone).forward).parameters
        self._memory = cache_name(self.clone)
        self._keeps, self._places = "logits_to_keep" in takes, "position_ids" in takes
        self.one_by_one = model.config.model_type in ONE_BY_ONE
        check_prefix_cache(prefix_cache)
        if prefix_cache is not None and self.one_by_one:
            raise ValueError(
                f"prefix_cache is set and {model.config.model_type} reads what follows a state one token at a time, slower than from the beginning: leave it out"
            )
        self.prefix_cache, self.prefixes = prefix_cache, None
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_positions = positions_of(model.config)
        try:
            check_own(self)
        except RuntimeError as error:
            if "inference tensor" not in str(error):
                raise
            raise UnsupportedModel(
                "model has weights of a class that cannot be viewed in inference mode, in which states are kept (quanto's of 4 bits): quantise it to "
                "8 bits, or with another library"
            ) from error
        if (narrow := narrowed(model)) is not None:
            OwnCache(narrow, prefill_chunk=prefill_chunk, refeed=refeed)
        if prefix_cache is not None:
            self.prefixes = KeptStates(prefix_cache, self.weights)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: Any = "auto",
        device_map: Any = None,
        tokenizer: Any = None,
        prefill_chunk: int | None = None,
        refeed: int = 8,
        prefix_cache: int | None = None,
        **kwargs: Any,
    ) -> OwnCache:
        """Load a hub id or a local folder, with its tokenizer if it has one; ``kwargs`` go to ``from_pretrained``. Errors as of ``HFModel``."""
        model = load(name, dtype=dtype, device_map=device_map, **kwargs)
        tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
        return cls(model, tokenizer, prefill_chunk=prefill_chunk, refeed=refeed, prefix_cache=prefix_cache)

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.clone.parameters()) / 1e6
        dtype = str(self.dtype).removeprefix("torch.")
        return f"OwnCache({self.clone.config.model_type}, {size:.3g}M parameters, {dtype}, {self.device})"

    def cache(self, batch: int, capacity: int) -> StateCache:
        """Empty states of ``batch`` rows of up to ``capacity`` tokens, nodes included. Memory is taken as rows are read.

        Raises:
            ValueError: the number of rows or tokens is negative.
        """
        at_least(0, "batch", batch, "give a number of rows, 0 or more")
        at_least(0, "capacity", capacity, "give a number of tokens, 0 or more")
        if self.prefixes is not None:
            self.prefixes.look_at_weights()
        begun = [] if self.prefixes is None else [self.prefixes.version] * batch
        return StateCache([(State(),) for _ in range(batch)], capacity, begun)

    def keep_texts(self, cache: StateCache, context: Context, rows: Sequence[int]) -> None:
        """As in ``protocols.KeepsTexts``, with a ``prefix_cache``."""
        if self.prefixes is not None and type(cache) is StateCache:
            for i, b in enumerate(rows):
                text = context.row(i)
                self.prefixes.keep(self._longest(cache.rows[b], text, len(text)), cache.begun[b])

    @torch.inference_mode()
    def prefill(self, cache: StateCache, context: Context, rows: Tensor | None = None) -> None:
        """Read all but the last committed token of each row (or of ``rows [R]``); of rows with equal texts, the first one only."""
        read: dict[tuple[int, ...], State] = {}
        for b in self._rows(cache, context, rows):
            text = tuple(context.row(b)[:-1])
            state = read.get(text)
            if state is None:
                states, cache.rows[b] = cache.rows[b], (State(),)
                state = self._longest(self._begun(states, text)[0], text, len(text))
                if len(state.tokens) < len(text):
                    state = self._read(state, text, 0)[0]
                if self.prefixes is not None and not states[-1].tokens:
                    self.prefixes.keep(state)
                read[text] = state
            else:
                state = state.copy()
            cache.rows[b] = (state,)

    def score(
        self,
        cache: StateCache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """Logits after the last committed token and after every node, as in ``protocols.LanguageModel``.

        ``taps``: layers whose output is wanted, as for ``HFModel``. What is read again is in ``Scores.fed`` again, and the last committed token is
        always read, even if its logits are known.

        Raises:
            ValueError: rows do not match, the cache has no room, the proposal is no chain, or a tapped layer does not exist or has no vector for
                each token.
        """
        asked = self._rows(cache, context, rows)
        caught, fed = listening(self.clone, taps) if taps else {}, [torch.zeros(3, 0, dtype=torch.long)]
        nodes = [] if proposal is None else proposal.ids
        sizes = [0] * context.batch if proposal is None else proposal.size.tolist()
        first = 0 if start is None else start + 1
        width = max(len(nodes[0]) if nodes else 0, 0) + 1 - first
        logits = torch.zeros(
            context.batch, max(width, 0), self.vocab_size, dtype=self.dtype, device=self.device
        )
        read: dict[tuple[int, ...], State] = {}  # prompts of this call
        known: dict[tuple[int, ...], int] = {}  # tokens of them that were kept
        found = [0] * context.batch
        with tapped(self.clone, caught, self._of_one_row):
            for b in asked:
                text, chain = context.row(b), nodes[b][: sizes[b]] if nodes else []
                if proposal is not None and proposal.parents[b, : len(chain)].tolist() != list(
                    range(-1, len(chain) - 1)
                ):
                    raise ValueError(
                        f"row {b} proposes a tree, and {self.clone.config.model_type} takes chains only: its state has read one path"
                    )
                if len(text) + len(chain) > cache.capacity:
                    raise ValueError(
                        f"row {b} needs {len(text) + len(chain)} slots (nodes included) and the cache has {cache.capacity}: make it with a "
                        "larger capacity"
                    )
                if first <= len(chain):
                    # A forward that fails leaves no half-read state.
                    states, cache.rows[b] = cache.rows[b], (State(),)
                    whole, twin = tuple(text), None
                    # Taps want the activations of every token.
                    prompt = not (taps or chain or states[-1].tokens)
                    if prompt:
                        twin = read.get(whole)
                        if twin is None:
                            states, known[whole] = self._begun(states, whole)
                        else:
                            states = (twin.copy(),)
                        found[b] = known[whole]
                    # The logits after the last token to be read may be known; its activations are not.
                    begin = self._longest(states, (*text, *chain), len(text) + first - bool(taps))
                    cache.rows[b], made = self._score(states, begin, text, chain, first)
                    if prompt:
                        (read[whole],) = cache.rows[b]
                        if self.prefixes is not None and twin is None:
                            self.prefixes.keep(read[whole])
                    logits[b, : len(made)] = made
                    at = torch.arange(len(begin.tokens), len(text) + len(chain))
                    fed.append(torch.stack([torch.full_like(at, b), at, (at - len(text)).clamp(min=-1)]))
        if not taps:
            return Scores(logits, found=() if self.prefixes is None else tuple(found))
        empty = logits.new_zeros(0, self.clone.config.get_text_config().hidden_size)
        layers = {tap: torch.cat(parts or [empty]) for tap, parts in caught.items()}
        return Scores(logits, Fed(layers, *torch.cat(fed, 1)))

    @torch.inference_mode()
    def _begun(self, states: tuple[State, ...], text: tuple[int, ...]) -> tuple[tuple[State, ...], int]:
        """The states from which a row reads ``text``, and how many of its tokens were kept. An empty row gets a copy of what earlier texts left. If the text parts
        from a kept one further on, it is read to there, and that state is kept."""
        if self.prefixes is None or states[-1].tokens:
            return states, 0
        state, end = self.prefixes.find(text)
        kept = len(state.tokens)
        if end < len(text):  # where another text parts from this one, a state is kept
            state = self._read(state, text[:end], 0)[0]
            self.prefixes.keep(state)
        return (state,), kept

    def _of_one_row(self, hidden: Tensor) -> Tensor:
        """``[T, E]`` of a block's ``hidden [1, T, E]``."""
        if hidden.dim() != 3:
            raise ValueError(
                f"taps: a block of this {self.clone.config.model_type} gives {list(hidden.shape)}, no vector for each token: use a draft without taps"
            )
        return hidden[0]

    @torch.inference_mode()
    def _score(
        self, states: tuple[State, ...], state: State, text: list[int], chain: list[int], first: int
    ) -> tuple[tuple[State, ...], Tensor]:
        """A row's states after a call that goes on from ``state``, and the logits after ``text`` and the first ``first`` nodes, and after every
        further node."""
        tokens, n = (*text, *chain), len(text)
        if n - len(state.tokens) > (self.refeed if chain and not self.one_by_one else 0):
            state = self._read(state, text, 1)[0]
        if len(state.tokens) > n:  # a state with some of the nodes goes on; the one behind it stays
            behind = tuple(s for s in states if s is not state)
        else:
            behind = (state,) if len(state.tokens) < len(tokens) else ()
            state = state.copy() if behind else state
        known = [state.logits[None]] if len(state.tokens) == n + first and state.logits is not None else []
        made = known
        if len(state.tokens) < len(tokens):
            state, new = self._read(state, tokens, len(tokens) - n - first + 1 - len(known))
            made = [*known, new]
        return (*behind, state), torch.cat(made)

    @staticmethod
    def _longest(states: tuple[State, ...], tokens: Sequence[int], known: int) -> State:
        """The state from which the fewest tokens are to be read; if none will do, an empty one."""
        return max(
            (s for s in states if s.begins(tokens, known)), key=lambda s: len(s.tokens), default=State()
        )

    def _rows(self, cache: StateCache, context: Context, rows: Tensor | None) -> list[int]:
        if context.batch != len(cache.rows):
            raise ValueError(
                f"the context has {context.batch} rows and the cache {len(cache.rows)}: select the same rows of both"
            )
        return list(range(context.batch)) if rows is None else rows.tolist()

    def _read(self, state: State, tokens: Sequence[int], keep: int) -> tuple[State, Tensor]:
        """The state after ``tokens``, whose beginning ``state`` has read, and the last ``keep`` logits ``[keep, V]``. ``state`` is used up."""
        at, memory, made = len(state.tokens), state.memory, []
        while at < len(tokens):
            piece = self.prefill_chunk or 512 if not self.one_by_one else 1 if at else len(tokens)
            end = min(at + piece, len(tokens))
            kept = min(end - at, max(keep - (len(tokens) - end), 1))
            given: dict[str, Any] = {"logits_to_keep": kept} if self._keeps else {}
            if self._places:  # some families count wrongly where their first layer has a state
                given["position_ids"] = torch.arange(at, end, device=self.device)[None]
            ids = torch.tensor([tokens[at:end]], device=self.device)
            out = self.clone(input_ids=ids, use_cache=True, **{self._memory: memory}, **given)
            memory, at = setting(out, self._memory), end
            if memory is None:
                raise refuse(self.clone.config.model_type, "its forward returns no cache")
            made.append(out.logits[0, -kept:])
        logits = torch.cat(made)[-max(keep, 1) :]
        return State(tuple(tokens), memory, logits[-1].clone()), logits[len(logits) - keep :]
