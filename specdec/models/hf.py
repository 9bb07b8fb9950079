"""Hugging Face causal LMs as ``LanguageModel``: ragged rows, KV in slots, rollback by length, trees in one pass.

The user's model is never modified: a *structural clone* that shares its storage runs this library's attention (docs/design.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import at_least
from specdec.cache.contiguous import KVShape, SlotCache, check_memory
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.prefixes import PrefixCache
from specdec.configs import runs_on, setting
from specdec.forward.compiled import compile_parts
from specdec.forward.families import SUPPORTED, UnsupportedModel, path_of, positions_of, refuse
from specdec.forward.pack import PackedBatch, PrefillChunk, feed, spans
from specdec.forward.probe import kv_shapes
from specdec.forward.runner import runner_for
from specdec.forward.taps import listening
from specdec.graphs.programs import Steps, steps_for
from specdec.models.check import Graphs, Options, check_arguments, narrowed, self_check
from specdec.models.clone import Wrapper, shares, structural_clone
from specdec.models.load import load, load_tokenizer
from specdec.models.shared_prompts import reading
from specdec.types import Context, Fed, Proposal, Round, Scores

__all__ = ["SUPPORTED", "HFModel", "Options", "UnsupportedModel"]

_NOTHING: Any = nullcontext()
Cache = SlotCache | PagedCache


class HFModel(Wrapper):
    """A transformers causal LM behind ``protocols.LanguageModel``.

    Args:
        model: any ``...ForCausalLM`` of a family in ``SUPPORTED``. It is not modified. Later in-place changes of its weights take effect; after moving, casting or replacing them (``load_state_dict(assign=True)``), wrap it again (``cache`` checks).
        tokenizer: needed for text and chat prompts only.
        prefill_chunk: the most tokens of prompts in one forward, over all rows; ``None``: 2048 on a GPU, else 512.
        unlisted: ``"packed"`` tries a family that is not listed, after comparing it with its own plain forward.
        attention: how attention is computed, a name of ``kernels.attention.BACKENDS``: ``"packed"``, ``"padded"`` to the longest row,
            ``"decomposed"`` into fragments (docs/decomposition.md), ``"native"`` (C, on the CPU), ``"cpu"`` (C where it can), or, on a GPU, ``"triton"``,
            ``"torch_flash"`` and ``"flash_attn"``; all compute the same. ``"auto"`` chooses for each layer (``kernels.attention.explain`` says which and why).
        page: slots of a page, for KV in pages that rows take as they grow (docs/models.md); ``None``: the same slots for every row.
        graphs: whether small steps (decoding, verification, a draft's tokens) are captured once for each shape and replayed as CUDA graphs. ``"auto"`` does so where possible, on a GPU, ``True`` refuses other models. For tests on any device, ``"eager"`` runs the same steps without
            capturing them and ``"recorded"`` replays a recording of their operators (docs/models.md).
        compile: ``torch.compile`` for norms and MLPs, of the private copy only; a mapping has its options (``{"backend": ...}``). It can pay on a GPU; on a CPU the C kernels that it replaces are faster. The first steps of each kind wait for the compiler.
        invariant: whether a row's logits must be bit for bit independent of the rest of the batch and of the step, prompts included (docs/kernels.md). Llama-like models on a CPU with C kernels support this, at a cost; others are refused, and so are trees.
        bf16_weights: whether products read bfloat16 copies of the weights of a float32 model: half the bytes to read, equal values, and arithmetic on matrix units (AMX) where the processor has them. ``None``
            makes copies where they are exact, that is for llama-like models on a CPU with C kernels whose weights bfloat16 can express, as those of a bfloat16 checkpoint; ``True`` refuses other models. Memory
            grows by half. Copies follow changes of the weights when the next cache is made (docs/kernels.md).
        kv_dtype: ``torch.float8_e4m3fn`` or ``float8_e5m2``: keys and values are rounded to it when they are stored, and read back in the dtype of the queries. It is then the
            model with a rounded cache: as a draft it changes what is accepted and never the output; a target's output differs from the full cache's, and drafts do not change it further (docs/models.md).
        prefix_cache: bytes in which keys and values of texts stay between calls, for prompts that begin alike (docs/models.md); ``None``: every call reads its prompts. ``prefixes`` says what was found.
    Raises:
        UnsupportedModel: the family cannot be run exactly; the message says why, and which families can.
        TypeError: an argument has the wrong type, such as the name of a tokenizer, or a page that is no whole number.
        ValueError: there is no such ``attention``, or it does not support this model's layers or pages of this size; pages or a
            ``kv_dtype`` for a family that runs padded, or another dtype; graphs for a model that does not support them.
        ImportError: ``attention`` needs a package that is not installed; the message says which.

    One thread at a time where steps are captured, which keep the state of a call in the object.
    """

    steps: Steps | None = None  # captured steps, if any
    readers: Sequence[int] | None = None  # which of its members reads each row, of a model that has members

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        prefill_chunk: int | None = None,
        unlisted: Literal["packed"] | None = None,
        attention: str = "auto",
        page: int | None = None,
        graphs: Graphs = "auto",
        compile: bool | Mapping[str, Any] = False,
        invariant: bool = False,
        bf16_weights: bool | None = None,
        kv_dtype: torch.dtype | None = None,
        prefix_cache: int | None = None,
    ):
        model = setting(model, "_orig_mod") or model  # torch.compile's wrapper
        check_arguments(
            model, tokenizer, prefill_chunk, attention, page, graphs, compile, invariant, bf16_weights,
            kv_dtype, prefix_cache,
        )  # fmt: skip
        path = path_of(model.config, unlisted)
        if model.get_output_embeddings() is None:
            raise refuse(
                model.config.model_type,
                f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM",
            )
        self.model, self.tokenizer, self.clone = model, tokenizer, structural_clone(model)
        self.page, self.prefill_chunk = page and int(page), prefill_chunk and int(prefill_chunk)
        self.attention, self.graphs, self.invariant, self.compile = attention, graphs, invariant, compile
        self.bf16_weights, self.kv_dtype = bf16_weights, kv_dtype
        self._path = runner_for(
            self.clone, path, attention, invariant=invariant, bf16_weights=bf16_weights,
            modules=compile is not False, page=page, kv_dtype=kv_dtype,
        )  # fmt: skip
        if compile is not False:
            compile_parts(self.clone, {} if compile is True else compile)
        self.unlisted, self._scores_trees, self.prefix_cache = unlisted, self._path.trees, prefix_cache
        self.prefixes: PrefixCache | None = None
        self.supports_trees = self._scores_trees and not invariant  # a tree's sums have another order
        where = self.clone.get_input_embeddings().weight
        self._wrapped_as = (where.dtype, where.device)
        self.steps = steps_for(graphs, self._path, self.clone, self.device, attention, kv_dtype)
        self._path.concurrent = self._path.concurrent and self.steps is None
        self.max_positions = positions_of(model.config)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        if attention != "auto" and path == "packed":
            try:  # feeds a token through all layers, which refuses layers that the backend does not support
                _ = self._shapes
            except ValueError as error:
                if isinstance(error, UnsupportedModel):
                    raise
                raise ValueError(f"attention is {attention!r} but {error}") from error
        if model.config.model_type not in SUPPORTED:
            self_check(self)
            if (narrow := narrowed(model)) is not None:
                HFModel(narrow, unlisted=unlisted, attention=attention, page=page, graphs=False)
        if prefix_cache is not None:
            self.prefixes = PrefixCache(prefix_cache, self.weights)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: Any = "auto",
        device_map: Any = None,
        tokenizer: Any = None,
        prefill_chunk: int | None = None,
        unlisted: Literal["packed"] | None = None,
        attention: str = "auto",
        page: int | None = None,
        graphs: Graphs = "auto",
        compile: bool | Mapping[str, Any] = False,
        invariant: bool = False,
        bf16_weights: bool | None = None,
        kv_dtype: torch.dtype | None = None,
        prefix_cache: int | None = None,
        **kwargs: Any,
    ) -> HFModel:
        """Load a hub id, a local folder or a pocket model (its "auto" is float32), with its tokenizer if it has one; ``kwargs`` go to ``from_pretrained``.

        Raises:
            FileNotFoundError: there is no such folder, or it has no config or weights. ImportError: it is an adapter, and peft is not installed.
            TypeError: ``from_pretrained`` does not know some of ``kwargs``.
            ValueError: files are truncated, or weights are missing; there is no such dtype, or no CUDA device.
        """
        model = load(name, dtype=dtype, device_map=device_map, **kwargs)
        if tokenizer is None:
            tokenizer = load_tokenizer(name)
        return cls(
            model, tokenizer, prefill_chunk=prefill_chunk, unlisted=unlisted, attention=attention, page=page,
            graphs=graphs, compile=compile, invariant=invariant, bf16_weights=bf16_weights, kv_dtype=kv_dtype,
            prefix_cache=prefix_cache,
        )  # fmt: skip

    @cached_property  # used in every step
    def device(self) -> torch.device:
        """The device of input ids and logits."""
        return runs_on(self.clone)

    @property
    def engine(self) -> object:
        """What runs the forwards; several wrappers may share it."""
        return self._path

    @property
    def concurrent(self) -> bool:
        """Whether several threads may use it at a time."""
        return self._path.concurrent

    @property
    def fast_chain(self) -> Literal["slots", "ring"] | None:
        """Where a drafted chain's keys and values are, if a captured step may bypass ``score`` for it; else ``None``. Each class declares
        this for itself: a subclass may change what a query sees, so its tokens go through ``score`` unless it declares otherwise."""
        return "slots" if type(self) is HFModel else None

    def __repr__(self) -> str:
        size, family = sum(p.numel() for p in self.clone.parameters()) / 1e6, self.clone.config.model_type
        dtypes = f"{self.dtype}" if self.kv_dtype is None else f"{self.dtype} with KV in {self.kv_dtype}"
        return f"HFModel({family}, {size:.3g}M parameters, {dtypes.replace('torch.', '')}, {self.device})"

    @cached_property
    def _shapes(self) -> list[KVShape]:
        """The shapes of each layer's keys and values, found by feeding one token."""
        try:
            return kv_shapes(self._path, self.page, self.device, self.kv_dtype)
        except LookupError as error:
            raise refuse(self.clone.config.model_type, str(error)) from None

    def check_room(self, batch: int, capacity: int, beside: Sequence[KVShape] = ()) -> list[KVShape]:
        """Raise what ``cache`` would, except about changed weights, which takes longer to find out. Returns what a token takes, with what it takes ``beside``."""
        self._check_storage(weights=False)
        shapes = [*beside, *(self._shapes if self.page is None else ())]
        check_memory(shapes, batch, capacity, self._path.spare)
        return shapes

    def _check_storage(self, weights: bool = True) -> None:
        where = self.clone.get_input_embeddings().weight
        if not shares(self.clone, self.model) or (where.dtype, where.device) != self._wrapped_as:
            raise RuntimeError(
                "the model was moved, cast or given other parameters after it was wrapped: make a new HFModel from it"
            )
        if weights:
            self._path.check()
            if self.steps is not None:
                self.steps.check(self.clone.modules())

    def bytes_per_token(self) -> int:
        """KV bytes of one token of one row in all layers."""
        return sum(shape.bytes for shape in self._shapes)

    @property
    def plain(self) -> HFModel:
        """The model that masks and whole rounds (``executors.Ahead``) run: itself. A subclass that only makes other caches returns its original."""
        return self

    def cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens, nodes included; in pages where the model has a ``page``.

        Raises:
            ValueError: the number of rows or tokens is negative.
            MemoryError: the cache would not fit, by an estimate before anything is allocated. (Pages are allocated when rows are fed.)
            RuntimeError: since it was wrapped, the user's model was moved, cast or given other parameters (with ``bf16_weights=True``, wider ones).
        """
        at_least(0, "batch", batch, "give a number of rows, 0 or more")
        at_least(0, "capacity", capacity, "give a number of tokens, 0 or more")
        self._check_storage()
        if self.prefixes is not None:
            self.prefixes.look_at_weights()
        if self.steps is not None:
            return self.steps.cache(self._shapes, batch, capacity, self.page)
        if self.page is not None:
            return PagedCache(PagePool(self._shapes, self.page), batch, capacity)
        check_memory(self._shapes, batch, capacity, self._path.spare)
        return SlotCache(self._shapes, batch, capacity, self._path.spare)

    def prefill(self, cache: Cache, context: Context, rows: Tensor | None = None) -> None:
        """Feed what the cache lacks of each row (or of ``rows [R]``) except its last committed token, without computing logits."""
        own = type(self)._pieces is HFModel._pieces
        with reading(self, cache, context, rows, (), own) as prompts:
            first, end = spans(cache, context, None, None, rows)
            packed = self._feed(cache, context, None, first, [max(e - 1, 0) for e in end])
            self._run(cache, packed, False, ())
            packed.remember(cache, context)
        prompts.keep(cache)

    def score(
        self,
        cache: Cache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """Logits after the last committed token and after every node, as in ``protocols.LanguageModel``.

        Only what the cache lacks is fed, packed without padding. ``taps``: layers whose output is wanted at every fed
        position, counted from 1; 0 is the input of the first.

        Raises:
            ValueError: rows do not match, the cache has no room, the family takes chains only, or nodes before ``start`` were not
                fed in this context.
        """
        own = start is None and type(self)._pieces is HFModel._pieces
        with reading(self, cache, context, rows, taps, own, partial(HFModel.score, self)) as prompts:
            packed, width = self._plan(cache, context, proposal, start, rows)
            made, layers = self._run(cache, packed, True, taps)
            if made is None:
                made = torch.zeros(0, self.vocab_size, dtype=self.dtype, device=self.device)
            # Returned logits may be changed: inference tensors may not, and a step overwrites its own.
            copy = self.steps is not None or not torch.is_inference_mode_enabled()
            logits = packed.spread(made, context.batch, width, -1 if start is None else start, copy)
            packed.remember(cache, context)
        fed = prompts.keep(cache, Fed(layers, *packed.owners()) if taps else None)
        return Scores(logits, fed, prompts.found)

    def keep_texts(self, cache: Cache, context: Context, rows: Sequence[int]) -> None:
        """As in ``protocols.KeepsTexts``, with a ``prefix_cache``."""
        if self.prefixes is not None and self._lends(cache):
            self.prefixes.keep_ended(cache, rows)

    def note(self, cache: Cache, round: Round) -> None:
        """As in ``protocols.NotesActivations``, with a ``prefix_cache``."""
        if self.prefixes is not None and self._lends(cache):
            self.prefixes.note(cache, round)

    def _lends(self, cache: Any) -> bool:
        return type(self)._pieces is HFModel._pieces and type(cache) in (SlotCache, PagedCache)

    def _plan(
        self, cache: Cache, context: Context, proposal: Proposal | None, at: int | None, rows: Tensor | None
    ) -> tuple[PackedBatch, int]:
        """What to feed, and how many rows of logits each row has; ``at``: the ``start`` of ``score``."""
        nodes = 0 if proposal is None else proposal.nodes
        first, end = spans(cache, context, proposal, at, rows)
        packed = self._feed(cache, context, proposal if nodes else None, first, end)
        for row in packed.rows if at is None else ():
            cache.forget_nodes(row.b)
        return packed, nodes + 1 if at is None else max(nodes - at, 0)

    def _feed(
        self,
        cache: Cache,
        context: Context,
        proposal: Proposal | None,
        first: Sequence[int],
        end: Sequence[int],
    ) -> PackedBatch:
        if end and max(end) > cache.capacity:
            raise ValueError(
                f"row {end.index(max(end))} needs {max(end)} slots (nodes included) and the cache has {cache.capacity}: make it with "
                "a larger capacity"
            )
        packed = feed(context, proposal, first, end)
        if packed.shape is not None and not self._scores_trees:
            raise ValueError(
                f"{self.clone.config.model_type} takes chains only: what a query sees depends on slots or a window here, not on ancestors"
            )
        return packed

    def _run(
        self, cache: Cache, packed: PackedBatch, wanted: bool, taps: Sequence[int]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Feed a packed batch; returns logits ``[K, V]`` after each row's last committed token and nodes, and tapped activations."""
        if not packed.rows:
            width = self.clone.config.get_text_config().hidden_size
            return None, {tap: torch.zeros(0, width, dtype=self.dtype, device=self.device) for tap in taps}
        chunk = self.prefill_chunk or (2048 if self.device.type == "cuda" else 512)
        limit = packed.limit(chunk, wanted)
        logits: list[Tensor] = []
        caught = listening(self.clone, taps) if taps else {}
        with _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode():
            step = self._captured(cache, packed, wanted, taps)
            if step is not None:
                out, seen = step()
                return out, {tap: x.clone() for tap, x in seen.items()}
            for store, piece in self._pieces(cache, packed, limit, wanted):
                out = self._path.forward(store, *piece, caught)
                if out is not None:
                    logits.append(out)
            made = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits)
        return made, {tap: torch.cat(parts).clone() for tap, parts in caught.items()} if taps else {}

    def _captured(self, cache: Any, packed: PackedBatch, wanted: bool, taps: Sequence[int] = ()) -> Any:
        """The captured step of a call; ``None`` if there is none, or if a subclass decides in ``_pieces`` what queries see."""
        if self.steps is None or type(self)._pieces is not HFModel._pieces:
            return None
        return self.steps.step(cache, packed, wanted, taps)

    def _pieces(
        self, cache: Any, packed: PackedBatch, limit: int, wanted: bool
    ) -> Iterator[tuple[Any, PrefillChunk]]:
        """The forwards to run, in order, each with the store of its keys and values."""
        if isinstance(cache, PagedCache):
            table = cache.hold(packed.rows)
            pieces = packed.pieces(cache.capacity, limit, wanted, self.device, table, cache.page)
        else:
            pieces = packed.pieces(cache.slots, limit, wanted, self.device)
        for piece in pieces:
            yield cache, piece

    def bare_step(
        self, cache: Cache, context: Context, proposal: Proposal | None = None
    ) -> Callable[[], Tensor | None]:
        """Only the model's forward of ``score(cache, context, proposal)``, to be timed and called repeatedly.

        Everything is prepared beforehand, and the token index does not change; what the cache lacks must fit one forward.
        """
        packed, _ = self._plan(cache, context, proposal, None, None)
        if self.steps is not None:
            for _ in range(2):  # shapes are captured when they occur again
                with torch.inference_mode():
                    step = self._captured(cache, packed, True)
                if step is not None:
                    return lambda: step()[0]
        ((store, piece),) = self._pieces(cache, packed, packed.tokens, True)

        @torch.inference_mode()
        def forward() -> Tensor | None:
            return self._path.forward(store, *piece)

        return forward
