"""Hugging Face causal LMs as ``LanguageModel``: ragged rows, our own KV slots, rollback by length, trees in one pass.

The user's model object is never switched over: a *structural clone* that shares its storage runs our attention (see
docs/design.md), so that the user's ``generate`` works before, during and after.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.kernels.attention import AttentionPlan
from specdec.models.cache import KVShape, SlotCache
from specdec.models.fallback import Padded
from specdec.models.families import SUPPORTED, UnsupportedModel, path_of, positions_of, refuse
from specdec.models.feed import Feed, feed
from specdec.models.packed import Packed
from specdec.types import Context, Fed, Proposal, Scores

__all__ = ["SUPPORTED", "HFModel", "UnsupportedModel"]

_NOTHING: Any = nullcontext()


class HFModel:
    """A transformers causal LM behind ``protocols.LanguageModel``.

    Args:
        model: any ``...ForCausalLM`` of a family in ``SUPPORTED``. It is left as it is; later changes of its weights are seen.
        tokenizer: needed for text and chat prompts only.
        prefill_chunk: tokens of a prompt that are fed in one forward, all rows together.
        unlisted: ``"packed"`` tries a family that is not listed, after comparing it with its own plain forward.
    Raises:
        UnsupportedModel: the family cannot be run exactly; the message says why and what can.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        prefill_chunk: int = 512,
        unlisted: str | None = None,
    ):
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model is a {type(model).__name__}: give a transformers model, or use HFModel.from_pretrained"
            )
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}: it must be at least 1")
        path = path_of(model.config, unlisted)
        if model.get_output_embeddings() is None:
            raise refuse(
                model.config.model_type,
                f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM",
            )
        self.model, self.tokenizer, self.prefill_chunk = model, tokenizer, prefill_chunk
        self.clone = structural_clone(model)
        self._path = (
            Packed(self.clone) if path == "packed" else Padded(self.clone, trees="chains" not in path)
        )
        self.supports_trees = self._path.trees
        self.max_positions = positions_of(model.config)
        self.vocab_size: int = model.config.get_text_config().vocab_size
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
        **kwargs: Any,
    ) -> HFModel:
        """Load a hub id or a local folder, with its tokenizer if it has one; ``kwargs`` go to ``from_pretrained``.

        Raises:
            FileNotFoundError: no such folder, or one without a config or weights.
            ValueError: files are cut off, or weights are missing from them.
        """
        folder = Path(name).is_dir()
        if folder:
            _check_folder(Path(name))
        elif Path(name).is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
            raise FileNotFoundError(
                f"there is no folder {str(name)!r}: give the folder of a saved model, or a hub id"
            )
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, device_map=device_map, output_loading_info=True, **kwargs
            )
        except Exception as error:
            if not folder:
                raise
            raise ValueError(
                f"the model in {str(name)!r} cannot be loaded ({type(error).__name__}: {error}): a file may be cut off; copy or "
                "download the folder again"
            ) from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ValueError(
                f"{len(missing)} weights are missing from {str(name)!r}, {missing[0]!r} for one, and would be random: copy or "
                "download it again"
            )
        if tokenizer is None and (not folder or any(Path(name).glob("*token*"))):
            tokenizer = AutoTokenizer.from_pretrained(name)
        return cls(model, tokenizer, prefill_chunk=prefill_chunk)

    @cached_property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        device = self.clone.get_input_embeddings().weight.device
        hook = getattr(self.clone, "_hf_hook", None)
        if device.type == "meta" and hook is not None:  # accelerate keeps the weights elsewhere
            return torch.device(hook.execution_device)
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

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.clone.parameters())
        family, dtype = self.clone.config.model_type, str(self.dtype).removeprefix("torch.")
        return f"HFModel({family}, {size / 1e6:.3g}M parameters, {dtype}, {self.device})"

    # -- cache ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _shapes(self) -> list[KVShape]:
        """What each layer keeps, found by feeding one token."""
        probe = _Probe()
        plan = AttentionPlan([0], [0], [1], 1 + self._path.spare)
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._path.forward(probe, plan, token, token, False)
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise refuse(
                self.clone.config.model_type, f"only layers {sorted(probe.shapes)} keep keys and values"
            )
        return [probe.shapes[i] for i in range(len(probe.shapes))]

    def bytes_per_token(self) -> int:
        """KV bytes of one token of one row, all layers."""
        return sum(shape.bytes for shape in self._shapes)

    def cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens, nodes included.

        Raises:
            MemoryError: it would not fit; estimated before anything is allocated.
        """
        slots = capacity + self._path.spare
        for device in {shape.device for shape in self._shapes}:
            slot = sum(shape.bytes for shape in self._shapes if shape.device == device)
            free = free_bytes(device)
            if free is not None and slot * batch * slots > free:
                rows, tokens = free // (slot * slots), free // (slot * max(batch, 1)) - self._path.spare
                raise MemoryError(
                    f"a KV cache of {batch} rows x {capacity} tokens needs {slot * batch * slots / 2**30:.2f} GiB on {device} and "
                    f"{free / 2**30:.2f} GiB are free: batch {rows} would fit at this capacity, capacity {max(tokens, 0)} at "
                    "this batch"
                )
        return SlotCache(self._shapes, batch, capacity, self._path.spare)

    # -- forward -------------------------------------------------------------------------------------------------------

    def prefill(self, cache: SlotCache, context: Context) -> None:
        """Feed what the cache lacks of each row, all but its last committed token; no logits are computed."""
        packed = self._feed(cache, context, None, cache.matched(context), (context.length - 1).tolist())
        if packed.rows:
            self._run(cache, packed, False, ())
            self._remember(cache, context, packed)

    def score(
        self,
        cache: SlotCache,
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
        made, layers = self._run(cache, packed, True, taps) if packed.rows else (None, {})
        if made is not None and made.shape[0] == B * width:
            logits = made.view(B, width, -1).clone()  # a tensor that may be changed: the forward's may not
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
                logits.index_copy_(0, torch.tensor(at).to(device), made)
            logits = logits.view(B, width, V)
        if packed.rows:
            self._remember(cache, context, packed)
        return Scores(logits, Fed(layers, *packed.owners()) if taps else None)

    def _plan(
        self,
        cache: SlotCache,
        context: Context,
        proposal: Proposal | None,
        start: int | None,
        rows: Tensor | None,
    ) -> tuple[Feed, int]:
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
            return self._feed(cache, context, proposal, cache.matched(context), end), nodes + 1
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
        cache: SlotCache,
        context: Context,
        proposal: Proposal | None,
        first: Sequence[int],
        end: Sequence[int],
    ) -> Feed:
        if end and max(end) > cache.capacity:
            raise ValueError(
                f"row {end.index(max(end))} needs {max(end)} slots (nodes included) and the cache has {cache.capacity}: make it with "
                "a larger capacity"
            )
        packed = feed(context, proposal, first, end)
        if packed.shape is not None and not self.supports_trees:
            raise ValueError(
                f"{self.clone.config.model_type} takes chains only: its attention goes by slot, not by position"
            )
        return packed

    def _run(
        self, cache: SlotCache, packed: Feed, wanted: bool, taps: Sequence[int]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Feed packed tokens; logits ``[K, V]`` after the last committed token and nodes of each row, and tapped activations."""
        # Only prompts are fed in pieces: a draft's nodes and the tokens before them are verified in one pass.
        limit = self.prefill_chunk
        if wanted and packed.tokens > limit:
            limit = max(limit, 2 * sum(r.end - max(r.first, r.length - 1) for r in packed.rows))
        logits: list[Tensor] = []
        with torch.inference_mode(), self._tapped(taps) if taps else _NOTHING as caught:
            for piece in packed.pieces(cache.slots, limit, wanted, self.device):
                out = self._path.forward(cache, *piece)
                if out is not None:
                    logits.append(out)
            made = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits)
        return made, {tap: torch.cat(parts).clone() for tap, parts in caught.items()} if taps else {}

    def _remember(self, cache: SlotCache, context: Context, packed: Feed) -> None:
        """Note what was fed in the memo; only after the forward, so that one that fails leaves the memo true."""
        text = context.tokens.numpy()
        for b, first, length, end in packed.rows:
            cache.remember(b, text[b], first, min(length, end), max(end - length, 0))

    def bare_step(
        self, cache: SlotCache, context: Context, proposal: Proposal | None = None
    ) -> Callable[[], Tensor | None]:
        """The model's forward for ``score(cache, context, proposal)`` and nothing else, to be timed and called repeatedly.

        Everything is prepared beforehand, nothing is remembered afterwards; what the cache lacks must fit one forward.
        """
        packed, _ = self._plan(cache, context, proposal, None, None)
        (piece,) = packed.pieces(cache.slots, packed.tokens, True, self.device)
        return lambda: self._path.forward(cache, *piece)

    @cached_property
    def _blocks(self) -> torch.nn.ModuleList:
        layers = self.clone.config.get_text_config().num_hidden_layers
        for module in self.clone.base_model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
                return module
        raise ValueError(f"taps: no list of {layers} blocks found in a {type(self.clone).__name__}")

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
        """Collects what the tapped layers give, packed, one tensor a forward."""
        caught: dict[int, list[Tensor]] = {tap: [] for tap in taps}
        blocks, hooks = self._blocks, []
        wrong = [tap for tap in caught if not 0 <= tap <= len(blocks)]
        if wrong:
            raise ValueError(
                f"taps: layer {wrong[0]} does not exist; this model has 0 (the embedding) to {len(blocks)}"
            )

        def before(module: Any, args: Any, kwargs: Any) -> None:
            caught[0].append(self._path.unpack(args[0] if args else kwargs["hidden_states"]))

        def after(tap: int) -> Callable[[Any, Any, Any], None]:
            def hook(module: Any, args: Any, out: Any) -> None:
                caught[tap].append(self._path.unpack(out if isinstance(out, Tensor) else out[0]))

            return hook

        try:
            for tap in caught:
                if tap == 0:
                    hooks.append(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
                else:
                    hooks.append(blocks[tap - 1].register_forward_hook(after(tap)))
            yield caught
        finally:
            for hook in hooks:
                hook.remove()


class _Probe:
    """Stands in for a cache while one token is fed, and notes what each layer would keep."""

    capacity = 1

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        return key.transpose(1, 2), value.transpose(1, 2)


def structural_clone(model: PreTrainedModel) -> Any:
    """A model of the same structure on the same storage: its own modules and config, the user's parameters and buffers.

    Rotary frequencies are copied, because dynamic scaling writes them in place.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    shared |= {id(b): b for name, b in model.named_buffers() if "inv_freq" not in name}
    clone = copy.deepcopy(model, shared)
    clone.eval()
    config = clone.config
    config.use_cache, config.output_hidden_states, config.output_attentions, config.return_dict = (
        False,
        False,
        False,
        True,
    )
    return clone


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on a device, or ``None`` where it cannot be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


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


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no config.json: it is not the folder of a saved model, or is incomplete"
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise FileNotFoundError(f"{str(folder)!r} has no weights (*.safetensors): copy or download it again")
