"""Pretrains a small Llama for a given time: Muon and AdamW on float32 weights, bf16 arithmetic where the processor has it, resumable."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from specdec.data.corpus import DOMAINS
from specdec.data.tokens import Batches, write
from specdec.lab.loading import in_dtype
from specdec.lab.options import option
from specdec.lab.streams import Streams
from specdec.training.muon import muon, quick


class Sizes(NamedTuple):
    """Sizes of a Llama: hidden size, layers, heads (as many KV heads), intermediate size, and head size (0: hidden / heads)."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    head: int = 0


@dataclass(frozen=True)
class Pretraining(Streams):
    """Training settings."""

    micro_batch: int = option(4, "sequences in one forward")
    batch: int = option(4, "sequences in one optimiser step")
    muon_lr: float = option(0.02, "body matrices")
    adam_lr: float = option(0.006, "learning rate of embedding and norms")
    weight_decay: float = option(0.02, "weight decay times the learning rate, body matrices only")
    warmup: float = option(0.02, "share of the time in which the learning rate rises")
    decay: float = option(0.7, "share of the time in which the learning rate falls linearly to zero")
    attention: str = option("block", '"block": matmuls by query block, faster on CPU; "sdpa": PyTorch\'s')
    compile: bool = option(True, "torch.compile")
    checkpoint_minutes: float = option(4.0, "time between checkpoints")

    def model(self, sizes: Sizes) -> LlamaForCausalLM:
        """An untrained model in float32, its weights drawn with the seed."""
        made: Any = LlamaConfig  # its signature lacks the keywords of its base class
        config = made(
            vocab_size=self.vocabulary, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads, intermediate_size=sizes.intermediate,
            head_dim=sizes.head or sizes.hidden // sizes.heads, max_position_embeddings=2048, rms_norm_eps=1e-6,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0, attn_implementation=self.attention,
        )  # fmt: skip
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(config)

    def rate(self, progress: float) -> float:
        """Learning-rate factor at a share of the training time: warmup, constant, then linear decay to zero."""
        return max(0.0, min(1.0, progress / self.warmup, (1 - progress) / self.decay))

    def train(
        self,
        name: str,
        sizes: Sizes,
        minutes: float,
        snapshot: tuple[float, Callable[[Any, Any], None]] | None = None,
    ) -> tuple[LlamaForCausalLM, dict[str, Any]]:
        """Train for a given time, from the last checkpoint in the work folder if there is one.

        Args:
            name: of the checkpoint. minutes: of wall time; the schedule follows the clock. snapshot: minutes, and a function that is
                called then with the model so far and its summary.
        Returns:
            the model, in bf16 where that is fast (:func:`quick`), and ``step``, ``tokens``, ``minutes``, ``budget`` and ``curve`` of the run.
        Raises:
            FloatingPointError: the loss is not finite.
        """
        run = _Training(self, name, sizes)
        budget, before, start = 60 * minutes, run.elapsed, time.monotonic()
        saved, early = start, 60 * snapshot[0] if snapshot else 0.0
        bar = tqdm(total=round(budget), initial=round(before), desc=name, unit="s", mininterval=20)
        while run.elapsed < budget:
            run.advance(self.rate(run.elapsed / budget))
            previous, run.elapsed = run.elapsed, before + time.monotonic() - start
            bar.update(min(round(budget), round(run.elapsed)) - bar.n)
            if run.step % 10 == 0:
                bar.set_postfix(step=run.step, loss=f"{run.recent():.3f}", tokens=f"{run.tokens / 1e6:.1f}M")
            if run.elapsed >= budget * (len(run.curve) + 1) / 20:
                run.validate()
                tqdm.write(json.dumps(run.curve[-1]))
            if time.monotonic() - saved > 60 * self.checkpoint_minutes:
                run.save()
                saved = time.monotonic()
            if snapshot and previous < early <= run.elapsed:
                snapshot[1](run.model, run.summary(minutes))
        run.save()
        return run.model, run.summary(minutes)


class _Training:
    """float32 weights, the copies used in matrix products (bf16 where that is fast), optimisers, data, and progress."""

    def __init__(self, s: Pretraining, name: str, sizes: Sizes):
        self.s, self.path = s, Path(s.work) / f"{name}.pt"
        self.name, self.device = name, "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = s.model(sizes).to(self.device)  # type: ignore[arg-type]
        self.master = {n: p.detach().clone().requires_grad_() for n, p in self.model.named_parameters()}
        body = [p for n, p in self.master.items() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in self.master.items() if p.ndim != 2 or "embed" in n]
        self.muon = muon(quick(self.device), body, s.muon_lr, s.weight_decay)
        self.adam = torch.optim.AdamW(rest, lr=s.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        in_dtype(self.model, quick(self.device))
        self.batches: Batches = s.batches("train")
        self.step, self.elapsed, self.losses = 0, 0.0, list[Tensor]()
        self.curve: list[dict[str, float]] = []
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device, weights_only=False)
            for key, value in state["master"].items():
                self.master[key].data.copy_(value)
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])
            self.batches.cursor, self.curve = state["cursor"], state["curve"]
            self.step, self.elapsed = state["step"], state["elapsed"]
        self.pairs = [(low, self.master[n]) for n, low in self.model.named_parameters()]
        self._copy()
        self.loss: Any = torch.compile(self.plain_loss) if s.compile else self.plain_loss

    @property
    def tokens(self) -> int:
        return self.step * self.s.batch * self.s.length

    def _copy(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_([low for low, _ in self.pairs], [high for _, high in self.pairs])

    def plain_loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits = F.linear(hidden, self.model.lm_head.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def advance(self, factor: float) -> None:
        """One optimiser step at ``factor`` times the learning rates."""
        s = self.s
        self.muon.param_groups[0]["lr"], self.adam.param_groups[0]["lr"] = (
            s.muon_lr * factor,
            s.adam_lr * factor,
        )
        parts = self.batches.take(s.batch).to(self.device).split(s.micro_batch)
        losses = []
        for part in parts:
            loss = self.loss(part)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
            for low, high in self.pairs:  # accumulated in float32
                high.grad = low.grad.float() if high.grad is None else high.grad.add_(low.grad)
                low.grad = None
        torch.nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        self.muon.step()
        self.adam.step()
        for high in self.master.values():
            high.grad = None
        self._copy()
        self.step += 1
        self.losses = [*self.losses[-49:], torch.stack(losses).mean()]

    def recent(self) -> float:
        """The mean loss of recent steps."""
        value = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        if self.losses and not math.isfinite(value):
            raise FloatingPointError(
                f"{self.name}: the loss is not finite at step {self.step}; lower the learning rates"
            )
        return value

    def validate(self) -> None:
        """Add a row to the curve."""
        held = self.s.batches("validation")
        row = {"minutes": self.elapsed / 60, "step": self.step, "tokens": self.tokens, "train": self.recent()}
        with torch.no_grad():
            for domain, label in enumerate(DOMAINS):
                each = [held.read(domain, i) for i in range(2 * self.s.micro_batch)]
                parts = torch.stack(each).to(self.device).split(self.s.micro_batch)
                row[label] = sum(float(self.plain_loss(part)) for part in parts) / len(parts)
        self.curve.append(row)

    def save(self) -> None:
        state: dict[str, Any] = {
            "master": self.master,
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        state |= {
            "cursor": self.batches.cursor,
            "step": self.step,
            "elapsed": self.elapsed,
            "curve": self.curve,
        }
        write(self.path, lambda file: torch.save(state, file))

    def summary(self, minutes: float) -> dict[str, Any]:
        seen = {"step": self.step, "tokens": self.tokens, "minutes": self.elapsed / 60}
        return {**seen, "budget": minutes, "curve": self.curve}


def block_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, block: int = 256, **_: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention for training, one block of queries at a time against the keys that it may see.

    PyTorch's CPU flash attention has a slow backward in bf16; plain matmuls of blocks run on the matrix units.

    Args:
        query, key, value: ``[B, H, T, D]``, as transformers gives them.
    """
    query, key = query * scaling, key.transpose(2, 3)
    hidden = torch.full((block, block), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    outputs = []
    for start in range(0, query.shape[2], block):
        stop = min(start + block, query.shape[2])
        weights = query[:, :, start:stop] @ key[..., :stop]
        weights = weights + F.pad(hidden[: stop - start, : stop - start], (start, 0))
        outputs.append(weights.softmax(-1) @ value[:, :, :stop])
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("block", block_attention)
