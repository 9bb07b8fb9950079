"""Several models of one shape as one: every row is read by its own member, and the calls of a step are paid once.

Small drafts wait for calls, not for arithmetic. Three specialists that draft five rows each cost almost what three batches do; stacked,
their projections are small products one after another in one forward, and attention, rotations and sampling are shared. Where a step of
a member is one call of C (``forward.llama_c``), its rows are one such call, and only what lies around the forward is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM

from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.device import to_device
from specdec.kernels.native.step import Reader, Steps
from specdec.models.hf import HFModel


class StackedModel(HFModel):
    """``HFModel`` whose rows belong to members: ``read_as(member [B])`` says to which, before each call.

    A row's keys and values are those of the member that read it; who changes a row's member forgets them (``drafts.Stacked`` does).
    Without C kernels the members' weights are copied, and later changes of the users' models are not seen. One thread at a time.

    Args:
        members: ``HFModel`` of plain llama or mistral models, equal in everything but their weights.
    Raises:
        ValueError: fewer than two, or models that differ in shape or cannot be stacked.
    """

    def __init__(self, members: Sequence[HFModel]):
        if len(members) < 2:
            raise ValueError(f"members has {len(members)} models: a stack needs at least two")
        first = members[0]
        for i, model in enumerate(members):
            if not stackable(model):
                raise ValueError(
                    f"member {i} is a {getattr(model, 'clone', model)!r:.40} in {getattr(model, 'dtype', '?')}: only plain llama and mistral "
                    "models in float32 or float64 can be stacked; give the arms to pool() with stacked=False"
                )
            if shape_of(model) != shape_of(first):
                raise ValueError(
                    f"member {i} has another shape than member 0: only models that differ in nothing but their weights can be stacked"
                )
        super().__init__(first.model, first.tokenizer, prefill_chunk=first.prefill_chunk, page=first.page)
        self._path: Any = _Path([model.clone for model in members], [model.bf16_weights for model in members])
        self.members = len(members)

    def read_as(self, member: Tensor) -> None:
        """``member [B]`` on the host: which model reads each row of the next calls."""
        self._path.member = member.tolist()

    def __repr__(self) -> str:
        return f"StackedModel({self.members} x {super().__repr__()})"


def stackable(model: Any) -> bool:
    """Whether a model can be a member: an ``HFModel`` of a plain llama or mistral in float32 or float64."""
    if type(model) is not HFModel:
        return False
    clone = model.clone
    return (
        type(clone) in (LlamaForCausalLM, MistralForCausalLM)
        and clone.config.hidden_act == "silu"
        and clone.dtype in (torch.float32, torch.float64)
        and not any("bias" in name for name, _ in clone.named_parameters())
        and all(type(p) is torch.nn.Parameter for p in clone.parameters())
        and not any(
            hasattr(m, "_hf_hook") or m._forward_hooks or m._forward_pre_hooks for m in clone.modules()
        )
    )


def shape_of(model: HFModel) -> tuple[Any, ...]:
    """What members must have in common."""
    config = model.clone.config
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in model.clone.named_parameters())
    settings = (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps)
    return (
        type(model.clone),
        shapes,
        settings,
        str(config.rope_parameters),
        getattr(config, "sliding_window", None),
        model.max_positions,
        model.device,
    )


class _Path:
    """``packed.Packed`` for a stack."""

    spare = 0
    trees = True
    concurrent = False

    def __init__(self, models: Sequence[Any], bf16_weights: Sequence[bool]):
        leans = [LlamaEager(model) for model in models]
        self.rotary = leans[0].body.rotary_emb
        self.eps = leans[0].body.norm.variance_epsilon
        self.vocabulary = models[0].config.vocab_size
        self.member: list[int] = [0]  # the probe for shapes feeds one row
        native = all(map(LlamaC.suits, models))
        read = zip(models, bf16_weights)
        self.natives = [LlamaC(model, bf16_weights=narrow) for model, narrow in read] if native else None
        if self.natives:
            return

        def stacked(*weights: Tensor) -> Tensor:
            return torch.stack([w.detach() for w in weights])

        with torch.no_grad():
            self.embedding = torch.cat([lean.body.embed_tokens.weight.detach() for lean in leans])
            self.head = stacked(*(lean.head.weight for lean in leans))
            self.last = stacked(*(lean.body.norm.weight for lean in leans))
            self.blocks = []
            for blocks in zip(*(lean.blocks for lean in leans)):
                projections = [
                    stacked(*(torch.cat([p.weight for p in parts(b)]) for b in blocks)) for parts in _PARTS
                ]
                norms = [
                    stacked(*(n.weight for n in (b.before for b in blocks))),
                    stacked(*(b.after.weight for b in blocks)),
                ]
                self.blocks.append((blocks[0], *projections, *norms))

    def forward(
        self,
        memo: Any,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Any,
        caught: dict[int, list[Tensor]] | None = None,
    ) -> Tensor | None:
        """As ``Packed.forward``. Tokens are computed member by member and put into the plan's order for attention only."""
        if caught:
            raise ValueError("taps: a stack of models has no layers to tap")
        if self.natives:
            return self._by_member(self.natives, memo, plan, ids, positions, keep)
        device = ids.device
        of = torch.tensor([self.member[b] for b, n in zip(plan.rows, plan.counts) for _ in range(n)])
        order, back, mixed = _sorted(of)
        groups = _groups(of[order] if mixed else of)
        here, there = to_device(order, device), to_device(back, device)
        member = to_device(of[order] if mixed else of, device)
        ids = (ids + to_device(of, device) * self.vocabulary)[here]
        x = F.embedding(ids, self.embedding)
        T, slots = len(ids), plan.slots_on(device)[here]
        cos, sin = (t[0][:, None] for t in self.rotary(x, positions[here][None]))
        half = sin.shape[-1] // 2
        turn = torch.cat([-sin[..., :half], sin[..., half:]], -1)

        def norm(x: Tensor, weights: Tensor) -> Tensor:
            if len(groups) == 1:
                return F.rms_norm(x, (x.shape[-1],), weights[groups[0][0]], self.eps)
            return F.rms_norm(x, (x.shape[-1],), None, self.eps) * weights[member]

        for b, qkv, out, up, down, before, after in self.blocks:
            width, kv = b.query.out_features, b.key.out_features
            q, k, v = _linear(norm(x, before), qkv, groups).split((width, kv, kv), -1)
            q, k, v = (t.view(T, -1, b.size) for t in (q, k, v))
            q = q * cos + q.roll(half, -1) * turn
            k = k * cos + k.roll(half, -1) * turn
            keys, values = memo.append(b.layer, slots, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            query = (q[there] if mixed else q).transpose(0, 1)[None]
            seen = attention(query, keys, values, plan, scale=b.scale, window=b.window)[0].reshape(T, -1)
            x = x + _linear(seen[here] if mixed else seen, out, groups)
            gate, wide = _linear(norm(x, after), up, groups).chunk(2, -1)
            x = x + _linear(F.silu(gate) * wide, down, groups)
        if keep is False:
            return None
        x = norm(x, self.last)
        if keep is None:
            logits = _linear(x, self.head, groups)
            return logits[there] if mixed else logits
        mine = of[keep.cpu()]
        order, back, mixed = _sorted(mine)
        x = x[there[keep][to_device(order, device)]]
        return _linear(x, self.head, _groups(mine[order]))[to_device(back, device)]

    def _by_member(
        self, natives: list[LlamaC], memo: Any, plan: AttentionPlan, ids: Tensor, positions: Tensor, keep: Any
    ) -> Tensor | None:
        """Each member's rows through its own forward, over the cache that they share."""
        of = [self.member[b] for b in plan.rows]
        if len(set(of)) == 1:
            return natives[of[0]].forward(memo, plan, ids, positions, keep)
        parts = []
        for m in sorted(set(of)):
            part, at = plan.part([r for r, other in enumerate(of) if other == m])
            mine, asked = at, keep
            if isinstance(keep, Tensor):
                mine = torch.isin(keep, at).nonzero()[:, 0]
                asked = torch.searchsorted(at, keep[mine])
            parts.append((natives[m], part, at, mine, asked))
        count = len(ids) if keep is None else 0 if keep is False else len(keep)
        readers: list[Reader] = []
        for lean, part, at, mine, asked in parts:
            reader = lean.reader(memo, part, positions[at], asked)
            if reader is None:
                break
            readers.append(reader._replace(source=at, rows=mine if count else None))
        else:
            made = Steps(readers, len(ids), count)(0, ids)
            return made if count else None
        logits: Tensor | None = None
        for lean, part, at, mine, asked in parts:
            out = lean.forward(memo, part, ids[at], positions[at], asked)
            if out is not None:
                if logits is None:
                    logits = out.new_empty(count, out.shape[1])
                logits[mine] = out
        return logits


_PARTS = (
    lambda b: (b.query, b.key, b.value),
    lambda b: (b.out,),
    lambda b: (b.gate, b.up),
    lambda b: (b.down,),
)


def _sorted(of: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The order that puts members together, its inverse, and whether it changes anything."""
    order = of.argsort(stable=True)
    mixed = bool((order[1:] < order[:-1]).any())
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return order, back, mixed


def _groups(of: Tensor) -> list[tuple[int, int, int]]:
    """``(member, first, end)`` of each run of equal members."""
    members, counts = of.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    return [(m, e - n, e) for m, n, e in zip(members.tolist(), counts.tolist(), ends)]


def _linear(x: Tensor, weights: Tensor, groups: Sequence[tuple[int, int, int]]) -> Tensor:
    """``x [T, in]`` times each token's own ``weights [members, out, in]``."""
    if len(groups) == 1:
        return F.linear(x, weights[groups[0][0]])
    return torch.cat([F.linear(x[first:end], weights[m]) for m, first, end in groups])
