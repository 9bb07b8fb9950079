"""Several models of one shape in one forward: each row is read by its own member, and a step's calls are made once for all.

The time of small drafts is in calls, not in arithmetic. Three specialists that draft five rows each cost almost as much as three batches;
stacked, their projections are consecutive small products of one forward, and attention, rotations and sampling are shared. Where a step
of a member is one C call (``forward.llama_c``), each member's rows are one such call, and only the work around the forward is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM

from specdec.cache.contract import KVStore
from specdec.configs import setting
from specdec.forward.block import Block, Eager, eager_angles, run_block
from specdec.forward.contract import Caught, Keep
from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.device import to_device
from specdec.kernels.native.step import Reader, step
from specdec.models.hf import HFModel


class StackedModel(HFModel):
    """``HFModel`` whose rows belong to members; ``read_as(member [B])`` sets each row's member before a call.

    A row's keys and values are those of the member that read it; they must be dropped when the member changes (as ``drafts.Stacked`` does).
    Without C kernels the members' weights are copied, and later changes of the users' models have no effect. One thread at a time.

    Args:
        members: ``HFModel`` of plain llama or mistral models, that differ only in their weights.
    Raises:
        ValueError: there are fewer than two, or they differ in shape or cannot be stacked.
    """

    def __init__(self, members: Sequence[HFModel]):
        if len(members) < 2:
            raise ValueError(f"members has {len(members)} models: a stack needs at least two")
        first = members[0]
        for i, model in enumerate(members):
            if not stackable(model):
                raise ValueError(
                    f"member {i} is a {_shown(model)}: only plain llama and mistral models "
                    " in float32 or float64 can be stacked; give the arms to pool() with stacked=False"
                )
            if shape_of(model) != shape_of(first):
                raise ValueError(
                    f"member {i} has another shape than member 0: only models that differ in nothing but their weights can be stacked"
                )
        super().__init__(
            first.model,
            first.tokenizer,
            prefill_chunk=first.prefill_chunk,
            page=first.page,
            graphs=False,
            bf16_weights=False,
            kv_dtype=first.kv_dtype,
        )
        self._path: Any = _Path([model.clone for model in members], [model.bf16_weights for model in members])
        self.members = len(members)

    def read_as(self, member: Tensor) -> None:
        """Set ``member [B]`` (on the host): which model reads each row in the next calls."""
        self._path.member = member.tolist()

    @property
    def readers(self) -> list[int]:  # type: ignore[override]
        """``[B]``: the member that reads each row."""
        return self._path.member

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
            setting(m, "_hf_hook") is not None or m._forward_hooks or m._forward_pre_hooks
            for m in clone.modules()
        )
    )


def shape_of(model: HFModel) -> tuple[Any, ...]:
    """The properties in which members must agree."""
    config = model.clone.config
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in model.clone.named_parameters())
    settings = (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps)
    return (
        type(model.clone),
        shapes,
        settings,
        str(config.rope_parameters),
        setting(config, "sliding_window"),
        model.max_positions,
        model.device,
        model.kv_dtype,
    )


def _shown(model: Any) -> str:
    clone = model.clone if isinstance(model, HFModel) else model
    return f"{clone!r:.40}" + (f" in {model.dtype}" if isinstance(model, HFModel) else "")


class Joined(NamedTuple):
    """Projections of the same input, joined for all members: ``weight [members, out, in]``, and how ``out`` is split."""

    weight: Tensor
    sizes: list[int]


class Stack(Eager):
    """Operators on the weights of all members: norms are ``[members, E]`` and projections ``Joined``.

    Args:
        eps: of the norms. groups: ``(member, first, end)`` of the tokens, whose members are ``member [T]``.
    """

    def __init__(self, eps: float, groups: Sequence[tuple[int, int, int]], member: Tensor):
        self.eps, self.groups, self.member = eps, groups, member

    def add_norm(self, x: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        x = x if more is None else x + more
        if len(self.groups) == 1:
            return x, F.rms_norm(x, (x.shape[-1],), norm[self.groups[0][0]], self.eps)
        return x, F.rms_norm(x, (x.shape[-1],), None, self.eps) * norm[self.member]

    def products(self, x: Tensor, *projections: Any) -> list[Tensor]:
        weight, sizes = projections[0]
        if len(self.groups) == 1:
            made = F.linear(x, weight[self.groups[0][0]])
        else:
            made = torch.cat([F.linear(x[first:end], weight[m]) for m, first, end in self.groups])
        return list(made.split(sizes, -1))


class _Path:
    """A ``Runner`` for a stack."""

    spare = 0
    trees = True
    concurrent = invariant = False

    def __init__(self, models: Sequence[Any], bf16_weights: Sequence[bool | None]):
        leans = [LlamaEager(model) for model in models]
        self.rotary = leans[0].body.rotary_emb
        self.eps = leans[0].body.norm.variance_epsilon
        self.vocabulary = models[0].config.vocab_size
        self.member: list[int] = [0]  # the probe of shapes feeds one row
        native = all(map(LlamaC.suits, models))
        read = zip(models, bf16_weights)
        self.natives = [LlamaC(model, bf16_weights=narrow) for model, narrow in read] if native else None
        if self.natives:
            return

        def joined(*projections: Sequence[Any]) -> Joined:
            rows = [torch.cat([p.weight.detach() for p in every]) for every in zip(*projections)]
            return Joined(torch.stack(rows), [p[0].weight.shape[0] for p in projections])

        def norms(modules: Sequence[Any]) -> Tensor:
            return torch.stack([module.weight.detach() for module in modules])

        with torch.no_grad():
            self.embedding = torch.cat([lean.body.embed_tokens.weight.detach() for lean in leans])
            self.head = joined([lean.head for lean in leans])
            self.last = norms([lean.body.norm for lean in leans])
            self.blocks = []
            for blocks in zip(*(lean.blocks for lean in leans)):
                every: Any = Block._make(zip(*blocks))
                self.blocks.append(
                    blocks[0]._replace(
                        query=joined(every.query, every.key, every.value),
                        out=joined(every.out),
                        gate=joined(every.gate, every.up),
                        down=joined(every.down),
                        before=norms(every.before),
                        after=norms(every.after),
                    )
                )

    @property
    def bf16_weights(self) -> bool:
        return any(lean.narrow is not None for lean in self.natives or ())

    def check(self) -> None:
        """As ``Runner.check``."""
        for lean in self.natives or ():
            lean.check()

    def capturable(self) -> str:
        """As ``Runner.capturable``."""
        return "which member reads a row is known on the host only"

    def forward(
        self,
        store: KVStore,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Keep,
        caught: Caught = None,
    ) -> Tensor | None:
        """As ``Forward.forward``. Tokens are computed member by member, and put into the plan's order for attention only."""
        if caught:
            raise ValueError("taps: a stack of models has no layers to tap")
        if self.natives:
            return self._by_member(self.natives, store, plan, ids, positions, keep)
        device = ids.device
        of = torch.tensor([self.member[b] for b, n in zip(plan.rows, plan.counts) for _ in range(n)])
        order, back, mixed = _sorted(of)
        here, there = to_device(order, device), to_device(back, device)
        ops = self._operations(of[order], device)
        x = F.embedding((ids + to_device(of, device) * self.vocabulary)[here], self.embedding)
        slots = plan.slots_on(device)[here]
        angles = eager_angles(*(t[0] for t in self.rotary(x, positions[here][None])))
        more: Tensor | None = None
        for b in self.blocks:

            def attend(query: Tensor, key: Tensor, value: Tensor, b: Block = b) -> Tensor:
                keys, values = store.append(b.layer, slots, *(t.transpose(0, 1)[None] for t in (key, value)))
                query = (query[there] if mixed else query).transpose(0, 1)[None]
                seen = attention(query, keys, values, plan, scale=b.scale, window=b.window)[0]
                return seen[here] if mixed else seen

            x, y = ops.add_norm(x, more, b.before)
            x, more = run_block(ops, b, x, y, angles, attend)
        assert more is not None
        x = x + more
        if keep is False:
            return None
        if keep is not None:
            mine = of[keep.cpu()]
            order, back, mixed = _sorted(mine)
            x = x[there[keep][to_device(order, device)]]
            ops, there = self._operations(mine[order], device), to_device(back, device)
        _, y = ops.add_norm(x, None, self.last)
        (logits,) = ops.products(y, self.head)
        return logits[there] if mixed else logits

    def _operations(self, of: Tensor, device: torch.device) -> Stack:
        """The operators for tokens of members ``of [T]``, which ascend."""
        return Stack(self.eps, _groups(of), to_device(of, device))

    def _by_member(
        self,
        natives: list[LlamaC],
        store: KVStore,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Keep,
    ) -> Tensor | None:
        """Feeds each member's rows through the member's own forward, over a shared cache."""
        of = [self.member[b] for b in plan.rows]
        if len(set(of)) == 1:
            return natives[of[0]].forward(store, plan, ids, positions, keep)
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
            reader = lean.reader(store, part, positions[at], asked)
            if reader is None:
                break
            readers.append(reader._replace(source=at, rows=mine if count else None))
        else:
            made = step(readers, ids, count)
            return made if count else None
        logits: Tensor | None = None
        for lean, part, at, mine, asked in parts:
            out = lean.forward(store, part, ids[at], positions[at], asked)
            if out is not None:
                if logits is None:
                    logits = out.new_empty(count, out.shape[1])
                logits[mine] = out
        return logits


def _sorted(of: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The order that groups tokens by member, its inverse, and whether it differs from the identity."""
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
