"""Stage f of the GPU suite: batch-invariant bf16, how often bits differ without it, and its cost.

Matrix products, norms and attention choose their order of summation by shape, and a verification pass has other shapes than a plain
step (He, "Defeating nondeterminism in LLM inference", 2025). Two measures remove that:

- **one shape**: every small forward is padded to the same number of packed tokens, so that each operator except attention runs the
  same kernel on the same shape; a token's result then depends on that token alone, if the kernel treats all rows alike;
- **fixed chunks**: the library's attention cuts rows at multiples of a fixed number of slots (``triton_backend``).

Both decoders read prompts in the same way, so prompts may have other shapes. With equal logits, ``Coupled`` verification gives plain
sampling's tokens. Logits and texts are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.utils import logging

import specdec as sd
from recipes.gpu.stage import Part, Stage
from recipes.gpu.steps import filled, floor, llama
from specdec.cost import Shape
from specdec.drafts.stateless import Stateless
from specdec.forward.packed import CALL, slot_attention
from specdec.rng import Rng
from specdec.types import Context, Proposal

K = 5  # drafted tokens per round
WRONG = 5  # one in this many drafted tokens is wrong
ATTENTION = "specdec_one_shape"


def one_shape_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """``slot_attention`` of the plan's tokens; the tokens after them are padding, and get zeros."""
    call = CALL.get()
    assert call is not None
    T = sum(call.plan.counts)
    parts = (t[:, :, :T] for t in (query, key, value))
    out, _ = slot_attention(module, *parts, attention_mask, **more)
    return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - T)), None


AttentionInterface.register(ATTENTION, one_shape_attention)


class OneShape:
    """A path of ``HFModel`` whose forwards of up to ``tokens`` packed tokens all have that many; fixed chunks of ``chunk`` slots.

    Args:
        path: a ``Packed``. tokens: 0 leaves shapes as they are and only fixes chunks. chunk: ``None`` leaves these, too.
    """

    def __init__(self, path: Any, tokens: int, chunk: int | None):
        self.path, self.tokens, self.chunk = path, tokens, chunk
        self.spare, self.trees, self.lean, self.model = path.spare, path.trees, None, path.model
        path.lean = None
        path.model.set_attn_implementation(ATTENTION)

    concurrent = invariant = bf16_weights = False

    def check(self) -> None:
        """Nothing was copied."""

    def capturable(self) -> str:
        """Why there is no such forward."""
        return "a forward of one shape pads its tokens by itself"

    def forward(
        self, store: Any, plan: Any, ids: Tensor, positions: Tensor, keep: Any, caught: Any = None
    ) -> Tensor | None:
        if caught:
            raise ValueError("a forward of one shape has no taps: use a draft that does not read its target")
        plan.fragment = self.chunk
        spare = self.tokens - len(ids)
        if spare < 0:  # a prompt, or ``tokens`` is 0
            return self.path.forward(store, plan, ids, positions, keep)
        whole = False if keep is False else None  # the head gets the same shape, too
        out = self.path.forward(store, plan, F.pad(ids, (0, spare)), F.pad(positions, (0, spare)), whole)
        if out is None:
            return None
        return out[: len(ids)] if keep is None else out[keep]


class OneShapeModel(sd.HFModel):
    """A model that runs on ``OneShape``; ``tokens`` and ``chunk`` are its."""

    def __init__(self, raw: Any, tokens: int, chunk: int | None):
        super().__init__(raw, prefill_chunk=1024, attention="triton", graphs=False)
        self._path: Any = OneShape(self._path, tokens, chunk)


INVARIANT = "fixed chunks and one shape"
MODULES = "modules as they come"  # the forward of the other two, without what they fix: what their price is compared with
VARIANTS = ("as it comes", "fixed chunks", INVARIANT)


def models(raw: Any, tokens: int, chunk: int) -> dict[str, sd.HFModel]:
    """Models with the same weights: unchanged, with fixed chunks, and with fixed chunks and one shape."""
    plain = sd.HFModel(raw, prefill_chunk=1024, attention="triton", graphs=False)
    return dict(zip(VARIANTS, (plain, OneShapeModel(raw, 0, chunk), OneShapeModel(raw, tokens, chunk))))


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    _ = stage.rates
    raw = llama(stage)
    if raw is None:
        return
    batch, context, chunk, k = (2, 20, 32, 2) if stage.toy else (16, 1024, 512, K)
    made = models(raw, batch * (k + 1), chunk)
    stage.parts(
        {
            "logits": Part(0.25, lambda stage: logits(stage, made, batch, context, k)),
            "cost": Part(
                0.25,
                lambda stage: cost(
                    stage,
                    {MODULES: OneShapeModel(raw, 0, None)} | made,
                    Shape.of(raw.config),
                    batch,
                    context,
                    k,
                ),
            ),
            "texts": Part(0.5, lambda stage: texts(stage, made, batch, context, k)),
        }
    )


# -- logits -----------------------------------------------------------------------------------------------------------------


def logits(stage: Stage, made: dict[str, sd.HFModel], batch: int, context: int, k: int) -> None:
    """A verification pass against plain steps over the same text, and a row in the batch against the row alone."""
    for name, model in made.items():
        with stage.case(f"logits: {name}", "invariant" if name == INVARIANT else None):
            cache, text = filled(stage, model, batch, context, k + 2)
            drafted = text.tokens[:, context : context + k].to(model.device)
            nodes = sd.Proposal.chain(drafted, torch.full((batch,), k))
            verify = model.score(cache, text, nodes).logits.clone()
            alone = model.score(cache, text, nodes, rows=torch.tensor([batch - 1])).logits[-1].clone()
            plain = []
            for i in range(k + 1):
                more = Context(text.tokens, text.length + i, text.prompt_length, text.request)
                plain.append(model.score(cache, more).logits[:, 0].clone())
            told(stage, f"logits of a verify pass and of plain steps: {name}", verify, torch.stack(plain, 1))
            told(stage, f"logits of a row in a batch of {batch} and alone: {name}", verify[-1], alone)


def told(stage: Stage, case: str, a: Tensor, b: Tensor) -> None:
    """The shares of logits, and of rows of them, that differ in any bit. Those of ``INVARIANT`` must be 0."""
    differ = a.view(torch.int16) != b.view(torch.int16)
    numbers, rows = float(differ.double().mean()), float(differ.any(-1).double().mean())
    tokens = float((a.argmax(-1) != b.argmax(-1)).double().mean())
    stage.row(
        case, error=float((a.double() - b.double()).norm() / b.double().norm()), differing_numbers=numbers,
        differing_rows=rows, differing_argmax=tokens, note=f"{rows:.1%} of rows differ in a bit, {numbers:.1%} of numbers",
        **({"bar": "invariant", "differ": numbers} if case.endswith(INVARIANT) else {}),
    )  # fmt: skip


# -- cost -------------------------------------------------------------------------------------------------------------------


def cost(stage: Stage, made: dict[str, sd.HFModel], shape: Shape, batch: int, context: int, k: int) -> None:
    """Seconds of a plain and a verification step."""
    for tokens in (1, k + 1):
        what = "plain step" if tokens == 1 else f"verify {tokens}"
        least, *_ = floor(stage, shape, batch, tokens, context)
        base: float | None = None
        for name, model in made.items():
            case = f"{what}, {batch} x {context}: {name}"
            if stage.late(case):
                continue
            with stage.case(case):
                cache, text = filled(stage, model, batch, context, k + 2)
                nodes = None
                if tokens > 1:
                    drafted = text.tokens[:, context : context + k].to(model.device)
                    nodes = sd.Proposal.chain(drafted, torch.full((batch,), k))
                time = stage.clock([model.bare_step(cache, text, nodes)], seconds=0.5)
                base = base or time.seconds
                stage.row(case, time.seconds, least, eager_seconds=time.eager, clock=time.how,
                        over_modules=time.seconds / base, note=f"{time.seconds / base:.2f} x {MODULES}")  # fmt: skip
                del cache


# -- texts --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told(Stateless):
    """A draft that proposes a given text with occasional errors, so that acceptance is the same for all models.

    Args:
        texts: the continuation of each request.
    """

    texts: list[list[int]]
    vocab_size: int
    name = "told"
    trees = False

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        rows = []
        for request, n, most in zip(
            context.request.tolist(), (context.length - context.prompt_length).tolist(), budget.tolist()
        ):
            known = enumerate(self.texts[request][n : n + most], n)
            rows.append([(t + (i % WRONG == WRONG - 1)) % self.vocab_size for i, t in known])
        size = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), max(1, int(size.max())), dtype=torch.long)
        for b, row in enumerate(rows):
            tokens[b, : len(row)] = torch.tensor(row, dtype=torch.long)
        if not int(size.max()):
            return Proposal.none(context.batch), None
        return Proposal.chain(tokens, size), None


def texts(stage: Stage, made: dict[str, sd.HFModel], batch: int, context: int, k: int) -> None:
    """Sampled at temperature 1: speculative output beside plain decoding's."""
    new = 6 if stage.toy else 64
    host = torch.Generator().manual_seed(stage.seed + 1)
    for name in (INVARIANT, *VARIANTS[:-1]):
        model, case = made[name], f"sampled text, speculative and plain: {name}"
        if stage.late(case) or (stage.toy and name == "fixed chunks"):
            continue
        with stage.case(case, "invariant" if name == INVARIANT else None):
            ids = torch.randint(0, model.vocab_size, (batch, context), generator=host)
            base = sd.decoder(model).sampling(temperature=1.0).verifier(sd.Coupled())
            seeds = list(range(batch))
            plain = base.build().generate(ids, new, seed=seeds, eos_token_id=())
            draft: Any = Told(plain.ids, model.vocab_size)
            fast = base.draft(draft, length=k).build().generate(ids, new, seed=seeds, eos_token_id=())
            a, b = torch.tensor(plain.ids), torch.tensor(fast.ids)
            differ, rows = float((a != b).double().mean()), float((a != b).any(1).double().mean())
            stage.row(
                case, differ=differ, differing_rows=rows, tau=fast.stats.tau,
                note=f"{differ:.1%} of tokens and {rows:.1%} of rows differ, tau {fast.stats.tau:.2f}",
                **({"bar": "invariant"} if name == INVARIANT else {}),
            )  # fmt: skip
