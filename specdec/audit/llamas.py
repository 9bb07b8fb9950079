"""The part of the catalogue whose target is a transformers model: a tiny llama in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import drafts
from specdec.audit.composed import Composition
from specdec.builder import decoder
from specdec.drafts.heads import MTP, Chain, DDTree, DFlash, DSpark, DynamicTree, Eagle3, Medusa, StaticTree
from specdec.drafts.spire.model import SpireModel
from specdec.executors import Optimistic
from specdec.masks import Causal, Window
from specdec.models import HFModel, Masked, Windowed
from specdec.pruning import SnapKV


def pairs() -> Iterator[Composition]:
    """Drafts for a float64 llama; the target's distribution is from transformers' own forward."""
    target, draft = llama(0), llama(1)

    def logits(prefixes: list[list[int]]) -> Tensor:
        with torch.inference_mode():
            return target(torch.tensor(prefixes)).logits[:, -1]

    base, other, said = decoder(HFModel(target)), HFModel(draft), {"logits": logits, "batch": 256}
    rest, starts = ((4, 3), ((0, 1), (2,)), said), ((0, 1, 2, 0, 1), (2, 1))
    yield Composition("float64 llama, chain k=2", base.draft(other, length=2), *rest)
    yield Composition("float64 llama, tree (2, 1)", base.draft(drafts.Tree(other, (2, 1)), length=2), *rest)
    head = Eagle3.from_target(target, (0, 1, "final"), vocabulary=[0, 2], blocks=2, norm_output=True)
    flash = DFlash.from_target(target, (0, 1), vocabulary=[0, 2], blocks=1, block_size=3)
    spark = DSpark.from_target(target, (0, 1), blocks=1, block_size=2, rank=4, markov="rnn")
    torch.nn.init.normal_(spark.markov_head.markov_w1.weight, std=30)  # on which its confidence depends
    mtp = MTP.from_target(target, vocabulary=[0, 2])
    medusa = Medusa.from_target(target, vocabulary=[0, 2], heads=2)
    for weight in medusa.layers.parameters():
        torch.nn.init.normal_(weight)  # a new one is the identity
    for name, sparse in {
        "windowed chain k=2": drafts.Model(Windowed(other, window=2, block=2)),
        "chain k=2 under a mask of its own": drafts.Model(Masked(other, Causal() & (Window(1) | _even))),
        "MagicDec k=2": drafts.MagicDec(window=2),
        "MagicDec k=2, a mask of its own": drafts.MagicDec(mask=Causal() & (Window(1) | _even), block=2),
        "MagicDec k=2, positions in the cache": drafts.MagicDec(window=1, positions="in_cache"),
        "MagicDec k=2, SnapKV every 2 rounds": drafts.MagicDec(
            window=1, pruner=SnapKV(), budget=2, observation=1, refresh=2
        ),
        "SPIRe k=2": drafts.Spire(SpireModel.from_target(target, 1, window=2), block=2),
        "SPIRe k=2, all layers, no feedback": drafts.Spire(
            SpireModel.from_target(target, 2, sinks=0, window=3, feedback=False), block=2
        ),
        "SPIRe k=2, a mask of its own": drafts.Spire(
            SpireModel.from_target(target, 1, mask=Causal() & (Window(1) | _even)), block=2
        ),
        "EAGLE-3 k=2, two ids": drafts.Head(head),
        "EAGLE-2's tree": drafts.Head(head, DynamicTree(2, 2, 3)),
        "DFlash k=2, two ids": drafts.Head(flash),
        "DDTree": drafts.Head(flash, DDTree(3)),
        "DSpark k=2, ended by its confidence": drafts.Head(spark, Chain(stop=0.5)),
        "MTP k=2, two ids": drafts.Head(mtp),
        "MTP, EAGLE-2's tree": drafts.Head(mtp, DynamicTree(2, 2, 3)),
        "Medusa k=2, two ids": drafts.Head(medusa),
        "Medusa, static tree": drafts.Head(medusa, StaticTree(((0,), (1,), (1, 0)))),
    }.items():
        builder = base.draft(sparse, length=2)  # type: ignore[arg-type]
        yield Composition(f"float64 llama, {name}", builder, (4, 3), starts, said)
    builder = base.draft(drafts.Head(head), length=2).executor(Optimistic())
    yield Composition("float64 llama, optimistic, EAGLE-3 k=2", builder, (4, 3), starts, said)


def _even(b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
    """A mask of a user's own: every second position."""
    return kv_position % 2 == 0


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.8,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()
