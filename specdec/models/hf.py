"""Hugging Face causal LMs as ``LanguageModel``: ragged rows, our own KV slots, rollback by length, trees in one pass.

The user's model object is never switched over: a *structural clone* that shares its storage runs our attention (see
docs/design.md), so that the user's ``generate`` works before, during and after.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import whole
from specdec.cache.contiguous import KVShape, SlotCache, check_memory
from specdec.cache.paged import PagedCache, Pool
from specdec.forward.families import SUPPORTED, UnsupportedModel, path_of, positions_of, refuse
from specdec.forward.pack import PackedBatch, PrefillChunk, feed
from specdec.forward.packed import Packed
from specdec.forward.padded import Padded
from specdec.forward.taps import listening
from specdec.graphs.programs import Steps, steps_for
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.attention.api import check as check_backend
from specdec.kernels.device import to_device
from specdec.models.clone import structural_clone
from specdec.models.compiled import compile_parts
from specdec.models.load import load, load_tokenizer
from specdec.types import Context, Fed, Proposal, Scores

__all__ = ["SUPPORTED", "HFModel", "UnsupportedModel"]

_NOTHING: Any = nullcontext()
Cache = SlotCache | PagedCache

Graphs = bool | Literal["auto", "eager", "recorded"]


class Options(TypedDict, total=False):
    """The settings of ``HFModel`` by name, where they are passed on to it."""

    prefill_chunk: int
    unlisted: Literal["packed"] | None
    attention: str
    page: int | None
    graphs: Graphs
    compile: bool | Mapping[str, Any]
    invariant: bool
    bf16_weights: bool


class HFModel:
    """A transformers causal LM behind ``protocols.LanguageModel``.

    Args:
        model: any ``...ForCausalLM`` of a family in ``SUPPORTED``. It is left as it is. Later in-place changes of its weights are
            seen; after moving, casting or replacing them (``load_state_dict(assign=True)``), wrap it again: ``cache`` refuses.
        tokenizer: needed for text and chat prompts only.
        prefill_chunk: tokens of a prompt that are fed in one forward, all rows together.
        unlisted: ``"packed"`` tries a family that is not listed, after comparing it with its own plain forward.
        attention: how it is computed, a name of ``kernels.attention.BACKENDS``: ``"packed"``, ``"padded"`` to the longest row,
            ``"decomposed"`` into fragments (docs/decomposition.md), ``"native"`` (C, on the CPU), ``"cpu"`` (C where it can), or, on a GPU, ``"triton"``,
            ``"torch_flash"`` and ``"flash_attn"``; all give the same. ``"auto"`` takes what can serve each layer
            (``kernels.attention.explain`` says what, and why not the others).
        page: slots of a page, for KV in pages that rows take as they grow (docs/models.md); ``None``: as many slots for every row.
        graphs: whether small steps (decoding, verification, a draft's tokens) are captured once for each shape and replayed as CUDA graphs.
            ``"auto"`` does it where it can be done, ``True`` refuses a model that cannot. ``"eager"`` runs the same steps without
            capturing them and ``"recorded"`` by a recording of their operators, on any device, for tests (docs/models.md).
        compile: ``torch.compile`` for norms and MLPs, of the private copy only; a mapping is handed to it (``{"backend": ...}``). It can pay on
            a GPU; on a CPU the C kernels that it takes the place of are faster. The first steps of each kind wait for the compiler.
        invariant: whether a row's logits must not depend, to the bit, on what else is in the batch or in the step, prompts included
            (docs/kernels.md). Llama-like models on a CPU with C kernels can be so, at a price; others are refused.
        bf16_weights: whether products read bfloat16 copies of the weights of a float32 model, made now, beside them: half the bytes to read, the
            same numbers (a weight that bfloat16 would round is refused; a checkpoint in bfloat16 that was loaded in float32 has none),
            and arithmetic on matrix units (AMX) where the processor has them. For llama-like models on a CPU with C kernels; after
            changing weights, wrap the model again (docs/kernels.md).
    Raises:
        UnsupportedModel: the family cannot be run exactly; the message says why and what can.
        TypeError: an argument of another kind: the tokenizer's name, a page that is no whole number.
        ValueError: no such ``attention``, or one that this model's layers cannot be computed by, or not over pages of this size;
            pages for a family that runs padded; graphs for a model that cannot have them.
        ImportError: ``attention`` needs a package that is not installed; the message says which.

    One thread at a time: families that run padded keep the call at hand in the object, and so do captured steps.
    """

    steps: Steps | None = None  # captured steps, where there are any

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        prefill_chunk: int = 512,
        unlisted: Literal["packed"] | None = None,
        attention: str = "auto",
        page: int | None = None,
        graphs: Graphs = False,
        compile: bool | Mapping[str, Any] = False,
        invariant: bool = False,
        bf16_weights: bool = False,
    ):
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model is a {type(model).__name__}: give a transformers model (of a PEFT wrapper, what merge_and_unload() returns), "
                "or use HFModel.from_pretrained"
            )
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(
                f"tokenizer is {tokenizer!r}: give the object, AutoTokenizer.from_pretrained(...), or use HFModel.from_pretrained"
            )
        whole("prefill_chunk", prefill_chunk)
        if page is not None:
            whole("page", page, ", or None for slots of every row")
        if not isinstance(compile, (bool, Mapping)):
            raise TypeError(
                f"compile is {compile!r}: give True, False, or a mapping of torch.compile's options"
            )
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}: it must be at least 1")
        check_backend(attention, "attention")
        path = path_of(model.config, unlisted)
        if model.get_output_embeddings() is None:
            raise refuse(
                model.config.model_type,
                f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM",
            )
        self.model, self.tokenizer, self.prefill_chunk = model, tokenizer, prefill_chunk
        self.clone = structural_clone(model)
        self._path = (
            Packed(self.clone, attention, invariant, compile is not False, bf16_weights)
            if path == "packed"
            else Padded(self.clone, trees="chains" not in path)
        )
        self.attention, self.bf16_weights = attention, bf16_weights
        if not isinstance(bf16_weights, bool):
            raise TypeError(f"bf16_weights is {bf16_weights!r}: give True or False")
        if bf16_weights and (graphs or getattr(getattr(self._path, "lean", None), "narrow", None) is None):
            raise ValueError(
                f"bf16_weights is True but this {model.config.model_type} cannot read such copies: llama-like models in float32, with sizes that "
                "are multiples of 16, can, on a CPU where specdec.kernels.native.reason() is None, without graphs or compile; leave it False, or "
                "load the model with dtype=torch.float32"
            )
        if compile is not False:
            if invariant or graphs == "recorded":
                other = "invariant is True" if invariant else "graphs is 'recorded'"
                raise ValueError(
                    f"compile is set and {other}: compiled parts are not bit-invariant and have no operators to record"
                )
            compile_parts(self.clone, {} if compile is True else compile)
        if path != "packed" and attention not in ("auto", "padded"):
            raise ValueError(
                f"attention is {attention!r} but {model.config.model_type} computes its own, on padded rows: leave it 'auto'"
            )
        if invariant and not getattr(getattr(self._path, "lean", None), "invariant", False):
            raise ValueError(
                f"invariant is True but this {model.config.model_type} cannot be: llama-like models in float32 or bfloat16, with sizes that are "
                "multiples of 16, can, on a CPU where specdec.kernels.native.reason() is None; leave it False"
            )
        if invariant and page is not None and page % 16:
            raise ValueError(f"page is {page}: with invariant=True give a multiple of 16, or None")
        if page is not None and page < 1:
            raise ValueError(f"page is {page}: slots of a page, at least 1, or None for slots of every row")
        if page is not None and path != "packed":
            raise ValueError(
                f"page is {page} but {model.config.model_type} computes its own attention, on padded rows of slots: leave it None"
            )
        self.page = page
        self.supports_trees = self._path.trees
        where = self.clone.get_input_embeddings().weight
        self._wrapped_as = (where.dtype, where.device)
        self.steps = steps_for(graphs, self._path, self.clone, self.device, attention, page)
        if self.steps is not None:
            self._path.concurrent = False
        self.max_positions = positions_of(model.config)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        if attention != "auto" and path == "packed":
            try:  # a token through all layers: one that the backend cannot compute is refused here
                _ = self._shapes
            except ValueError as error:
                if isinstance(error, UnsupportedModel):
                    raise
                raise ValueError(f"attention is {attention!r} but {error}") from error
        if model.config.model_type not in SUPPORTED:
            self_check(self)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: Any = "auto",
        device_map: Any = None,
        tokenizer: Any = None,
        prefill_chunk: int = 512,
        unlisted: Literal["packed"] | None = None,
        attention: str = "auto",
        page: int | None = None,
        graphs: Graphs = False,
        compile: bool | Mapping[str, Any] = False,
        invariant: bool = False,
        bf16_weights: bool = False,
        **kwargs: Any,
    ) -> HFModel:
        """Load a hub id or a local folder, with its tokenizer if it has one; ``kwargs`` go to ``from_pretrained``.

        Raises:
            FileNotFoundError: no such folder, or one without a config or weights.
            TypeError: ``kwargs`` that ``from_pretrained`` does not know.
            ValueError: files are cut off, or weights are missing from them; no such dtype, or a CUDA device where there is none.
        """
        model = load(name, dtype=dtype, device_map=device_map, **kwargs)
        if tokenizer is None:
            tokenizer = load_tokenizer(name)
        return cls(
            model,
            tokenizer,
            prefill_chunk=prefill_chunk,
            unlisted=unlisted,
            attention=attention,
            page=page,
            graphs=graphs,
            compile=compile,
            invariant=invariant,
            bf16_weights=bf16_weights,
        )

    @cached_property  # asked for in every step
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        device = self.clone.get_input_embeddings().weight.device
        hook = getattr(self.clone, "_hf_hook", None)
        if device.type == "meta" and hook is not None:  # accelerate keeps the weights elsewhere
            hooks = [hook, *(getattr(m, "_hf_hook", None) for m in self.clone.modules())]
            runs_on = [h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None]
            return torch.device(runs_on[0]) if runs_on else device
        return device

    @property
    def dtype(self) -> torch.dtype:
        return self.clone.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, as the user's model says at this moment."""
        settings = getattr(self.model, "generation_config", None) or self.model.config
        eos = settings.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def generation_processors(self) -> dict[str, Any]:
        """Settings of the model's generation config that transformers would turn into processors, and this library does not."""
        settings = getattr(self.model, "generation_config", None)
        neutral: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}
        neutral |= dict.fromkeys(
            ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")
        )
        asked = {name: getattr(settings, name, None) for name in neutral}
        return {name: value for name, value in asked.items() if value and value != neutral[name]}

    @property
    def generation_sampling(self) -> dict[str, Any]:
        """How the model's generation config says that tokens are drawn, where that is not the softmax of the logits."""
        settings = getattr(self.model, "generation_config", None)
        if not getattr(settings, "do_sample", False):
            return {}
        neutral = {"temperature": (None, 1), "top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0)}
        asked = {name: getattr(settings, name, None) for name in neutral}
        return {name: value for name, value in asked.items() if value not in neutral[name]}

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.clone.parameters())
        family, dtype = self.clone.config.model_type, str(self.dtype).removeprefix("torch.")
        return f"HFModel({family}, {size / 1e6:.3g}M parameters, {dtype}, {self.device})"

    # -- cache ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _shapes(self) -> list[KVShape]:
        """What each layer keeps, found by feeding one token."""
        probe = _Probe(self.page or 1)
        if self.page is None:
            plan = AttentionPlan([0], [0], [1], 1 + self._path.spare)
        else:
            plan = AttentionPlan([0], [0], [1], self.page, table=[[0]], page=self.page)
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._path.forward(probe, plan, token, token, False)
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise refuse(
                self.clone.config.model_type, f"only layers {sorted(probe.shapes)} keep keys and values"
            )
        return [probe.shapes[i] for i in range(len(probe.shapes))]

    def _check_storage(self) -> None:
        mine, users = self.clone.parameters(), self.model.parameters()
        where = self.clone.get_input_embeddings().weight
        if any(a is not b for a, b in zip(mine, users)) or (where.dtype, where.device) != self._wrapped_as:
            raise RuntimeError(
                "the model was moved, cast or given other parameters after it was wrapped: make a new HFModel from it"
            )
        for lean in getattr(self._path, "natives", None) or [getattr(self._path, "lean", None)]:
            if getattr(lean, "narrow", None) is not None:
                lean.narrow.check()

    def bytes_per_token(self) -> int:
        """KV bytes of one token of one row, all layers."""
        return sum(shape.bytes for shape in self._shapes)

    def cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens, nodes included; in pages where the model has a ``page``.

        Raises:
            ValueError: a negative number of rows or tokens.
            MemoryError: it would not fit; estimated before anything is allocated. (Pages are allocated when rows are fed.)
            RuntimeError: the user's model was moved, cast or given other parameters since it was wrapped; with ``bf16_weights``, its
                weights were changed.
        """
        for name, n in (("batch", batch), ("capacity", capacity)):
            if n < 0:
                raise ValueError(
                    f"{name} is {n}: give a number of {'rows' if name == 'batch' else 'tokens'}, 0 or more"
                )
        self._check_storage()
        if self.page is not None:
            return PagedCache(Pool(self._shapes, self.page), batch, capacity)
        if self.steps is not None:
            return self.steps.cache(self._shapes, batch, capacity)
        check_memory(self._shapes, batch, capacity, self._path.spare)
        return SlotCache(self._shapes, batch, capacity, self._path.spare)

    # -- forward -------------------------------------------------------------------------------------------------------

    def prefill(self, cache: Cache, context: Context, rows: Tensor | None = None) -> None:
        """PackedBatch what the cache lacks of each row (or of ``rows [R]``), all but its last committed token; no logits are computed."""
        end = (context.length - 1).tolist()
        if rows is not None:
            asked = set(rows.tolist())
            end = [e if b in asked else 0 for b, e in enumerate(end)]
        packed = self._feed(cache, context, None, cache.matched(context), end)
        self._run(cache, packed, False, ())
        self._remember(cache, context, packed)

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
            ValueError: rows that do not match, no room in the cache, a tree for a family that takes chains only, or a ``start``
                whose earlier nodes were not fed in this context.
        """
        packed, width = self._plan(cache, context, proposal, start, rows)
        B, begin = context.batch, -1 if start is None else start
        made, layers = self._run(cache, packed, True, taps)
        if made is not None and made.shape[0] == B * width:
            logits = made.view(B, width, -1)
            if self.steps is not None or not torch.is_inference_mode_enabled():
                # One that may be changed: the forward's may not, and a step's will be.
                logits = logits.clone()
        else:
            V, dtype, device = self.vocab_size, self.dtype, self.device
            if made is not None:
                V, dtype, device = made.shape[1], made.dtype, made.device
            logits = torch.zeros(B * width, V, dtype=dtype, device=device)
            if made is not None:
                at = [
                    r.b * width + node - begin
                    for r in packed.rows
                    for node in range(max(r.first - r.length, -1), r.end - r.length)
                ]
                logits.index_copy_(0, to_device(torch.tensor(at), device), made)
            logits = logits.view(B, width, V)
        self._remember(cache, context, packed)
        return Scores(logits, Fed(layers, *packed.owners()) if taps else None)

    def _plan(
        self,
        cache: Cache,
        context: Context,
        proposal: Proposal | None,
        start: int | None,
        rows: Tensor | None,
    ) -> tuple[PackedBatch, int]:
        """What to feed, and how many rows of logits each row has."""
        nodes = 0 if proposal is None else proposal.nodes
        length = context.length.tolist()
        end = length
        if proposal is None or not nodes:
            proposal = None
        elif len(proposal.size) != len(length):
            raise ValueError(f"the proposal has {len(proposal.size)} rows and the context {len(length)}")
        else:
            end = [n + size for n, size in zip(length, proposal.size.tolist())]
        if rows is not None:
            asked = set(rows.tolist())
            end = [e if b in asked else 0 for b, e in enumerate(end)]
        if start is None:
            packed = self._feed(cache, context, proposal, cache.matched(context), end)
            for row in packed.rows:
                cache.forget_nodes(row.b)
            return packed, nodes + 1
        if start < 0:
            raise ValueError(
                f"start is {start}: the first node to feed, or None to begin with the committed tokens"
            )
        for b, (n, e) in enumerate(zip(length, end)):
            if n + start < e and not cache.has_nodes(b, n, start):
                raise ValueError(
                    f"start is {start} but row {b} has not been fed the nodes before it in this context: score without start first"
                )
        return self._feed(cache, context, proposal, [n + start for n in length], end), max(nodes - start, 0)

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
        if packed.shape is not None and not self.supports_trees:
            raise ValueError(
                f"{self.clone.config.model_type} takes chains only: what a query sees goes by slot or by a window here, not by ancestors"
            )
        return packed

    def _run(
        self, cache: Cache, packed: PackedBatch, wanted: bool, taps: Sequence[int]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """PackedBatch packed tokens; logits ``[K, V]`` after the last committed token and nodes of each row, and tapped activations."""
        if not packed.rows:
            width = self.clone.config.get_text_config().hidden_size
            return None, {tap: torch.zeros(0, width, dtype=self.dtype, device=self.device) for tap in taps}
        # Only prompts are fed in pieces: a draft's nodes and the tokens before them are verified in one pass.
        limit = self.prefill_chunk
        if wanted and packed.tokens > limit:
            limit = max(limit, 2 * sum(r.end - max(r.first, r.length - 1) for r in packed.rows))
        logits: list[Tensor] = []
        mode = _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()
        caught = listening(self.clone, taps) if taps else {}
        with mode:
            if self.steps is not None:
                step = self.steps.step(cache, packed, wanted, taps)
                if step is not None:
                    out, seen = step()
                    return out, {tap: x.clone() for tap, x in seen.items()}
            for memo, piece in self._pieces(cache, packed, limit, wanted):
                out = self._path.forward(memo, *piece, caught)
                if out is not None:
                    logits.append(out)
            made = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits)
        return made, {tap: torch.cat(parts).clone() for tap, parts in caught.items()} if taps else {}

    def _pieces(
        self, cache: Any, packed: PackedBatch, limit: int, wanted: bool
    ) -> Iterator[tuple[Any, PrefillChunk]]:
        """What to run, in order, each with what its keys and values go to."""
        if isinstance(cache, PagedCache):
            table = cache.hold(packed.rows)
            pieces = packed.pieces(cache.capacity, limit, wanted, self.device, table, cache.page)
        else:
            pieces = packed.pieces(cache.slots, limit, wanted, self.device)
        for piece in pieces:
            yield cache, piece

    def _remember(self, cache: Cache, context: Context, packed: PackedBatch) -> None:
        """Note what was fed in the memo; only after the forward, so that one that fails leaves the memo true."""
        text = context.tokens.numpy()
        for b, first, length, end in packed.rows:
            cache.remember(b, text[b], first, min(length, end), max(end - length, 0))

    def bare_step(
        self, cache: Cache, context: Context, proposal: Proposal | None = None
    ) -> Callable[[], Tensor | None]:
        """The model's forward for ``score(cache, context, proposal)`` and nothing else, to be timed and called repeatedly.

        Everything is prepared beforehand, nothing is remembered afterwards; what the cache lacks must fit one forward.
        """
        packed, _ = self._plan(cache, context, proposal, None, None)
        if self.steps is not None:
            for _ in range(2):  # shapes are captured when they are met again
                with torch.inference_mode():
                    step = self.steps.step(cache, packed, True)
                if step is not None:
                    return lambda: step()[0]
        ((memo, piece),) = self._pieces(cache, packed, packed.tokens, True)

        @torch.inference_mode()
        def forward() -> Tensor | None:
            return self._path.forward(memo, *piece)

        return forward


class _Probe:
    """Stands in for a cache while one token is fed, and notes what each layer would keep."""

    capacity = 1

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.shapes: dict[int, KVShape] = {}

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        spare = (0, 0, 0, 0, 0, self.slots - 1)  # a page is whole
        keys, values = (torch.nn.functional.pad(t.transpose(1, 2), spare) for t in (key, value))
        return keys, values


def self_check(wrapped: HFModel, tokens: int = 24, seed: int = 0) -> float:
    """Compare with the model's own plain forward on random ids, in pieces and with a tree; returns the largest relative error.

    Raises:
        UnsupportedModel: they differ by more than rounding in the model's dtype.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, wrapped.vocab_size, (2, tokens), generator=draw)
    rows = [ids[0].tolist(), ids[1, : tokens // 2].tolist()]
    spare = ids[:, -3:].to(wrapped.device)
    proposal = Proposal(spare, torch.tensor([[-1, 0, 0]] * 2), torch.tensor([3, 3]))
    cache = wrapped.cache(2, tokens + 3)
    wrapped.prefill(cache, Context.of([row[: len(row) // 2] for row in rows]))
    logits = wrapped.score(cache, Context.of(rows), proposal).logits
    plain, error = structural_clone(wrapped.model), 0.0  # with its own attention, and without dropout
    for b, row in enumerate(rows):
        a, x, y = spare[b].tolist()
        for nodes, path in (((0, 1, 2), [a, x]), ((0, 1, 3), [a, y])):
            with torch.no_grad():
                expected = plain(torch.tensor([row + path], device=wrapped.device)).logits[0, -3:]
            error = max(error, float((logits[b, list(nodes)] - expected).abs().max() / expected.abs().max()))
    if not error < 64 * torch.finfo(wrapped.dtype).eps ** 0.75:
        raise refuse(
            wrapped.model.config.model_type,
            f"its packed forward differs from its own by {error:.1e} (relative)",
        )
    return error
