"""One call that trains a draft for a target: ``train(draft, target, data)``.

Weights are float32 and the arithmetic bf16; Muon (Jordan, 2024) updates the matrices of the blocks, AdamW the rest; gradients are
clipped. A checkpoint holds weights, optimisers and the position in the data, so that the same call continues after an interruption
and ends with the same weights (except for a draft with dropout). Devices and data parallelism are accelerate's: under
``accelerate launch`` every process takes its share of each batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from specdec.arguments import at_least
from specdec.drafts.spire.model import SpireModel
from specdec.models.fingerprint import fingerprint, unwrapped
from specdec.training import checkpoints
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import MixedLoss, acceptance
from specdec.training.sources import check_ids, order, source_of
from specdec.training.states import States


@dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Attributes:
        steps: optimiser steps; if a checkpoint was made with fewer, its training continues at the rates of the longer run.
        batch: sequences per step, over all processes. muon_lr, adam_lr: peak learning rates of the blocks' matrices and of all
            other weights. weight_decay: of the matrices, times the rate. warmup, decay: shares of the steps in which the rate rises
            and falls linearly. clip: largest gradient norm. precision: of the arithmetic.
        compile: torch.compile of the loss (its passes over the vocabulary cost as much as the draft on a CPU). seed: of the order
            of the sequences.
        validate_every: steps between validations (0: at the end only). checkpoint_minutes: time between checkpoints.
    Raises:
        TypeError: steps or a batch that is not a whole number. ValueError: a number that is out of range.
    """

    steps: int = 1000
    batch: int = 4
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warmup: float = 0.05
    decay: float = 0.7
    clip: float = 1.0
    precision: torch.dtype = torch.bfloat16
    compile: bool = False
    seed: int = 0
    validate_every: int = 0
    checkpoint_minutes: float = 4.0

    def __post_init__(self) -> None:
        said = vars(self)
        for name in ("steps", "batch"):
            at_least(1, name, said[name], "give at least 1")
        for name in ("muon_lr", "adam_lr", "weight_decay"):
            if not said[name] >= 0:
                raise ValueError(f"{name} is {said[name]}: give a number >= 0")
        for name in ("warmup", "decay", "clip"):
            if not said[name] > 0:
                raise ValueError(f"{name} is {said[name]}: give a number above 0")

    def rate(self, step: int) -> float:
        """Factor of the learning rates at a step: linear warmup, constant, linear decay to zero."""
        share = step / self.steps
        return max(0.0, min(1.0, (share + 1 / self.steps) / self.warmup, (1 - share) / self.decay))


@dataclass
class Trained:
    """The result of a run: ``curve`` has a row per validation (step, loss, validation loss, acceptance, τ); ``tokens`` is the number of training tokens."""

    settings: Settings
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def train(
    draft: Any,
    target: Any,
    data: States | Tensor | Sequence[Sequence[int]],
    *,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    forward: Any = None,
    settings: Settings | None = None,
    validation: States | Tensor | Sequence[Sequence[int]] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    on_validation: Callable[[dict[str, float]], None] | None = None,
) -> Trained:
    """Train ``draft`` in place for ``target``, which is not changed.

    Args:
        draft: a ``SpireModel``, or any transformers causal LM. target: a transformers causal LM; its head computes the logits.
        data: ``States``, or sequences of equally many ids ``[N, L + 1]`` (the target then runs in every step). All sequences are
            used once in random order, then again in another order.
        loss: by default ``MixedLoss()``. forward: ``(draft, batch) -> logits`` with ``layers(draft)``; by default ``KPass()`` for a
            ``SpireModel`` and ``Parallel()`` otherwise.
        validation: as ``data``. checkpoint: a file to continue from and to write.
        on_validation: called with each row of the curve.
    Raises:
        ValueError: data without sequences or of another target, a checkpoint of another run, or a draft that would train weights of
            the target.
        FloatingPointError: the loss is not finite.
        TypeError: ids that are not whole numbers, or ``settings`` of another type.
    """
    from accelerate import Accelerator

    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings is {settings!r}: give Settings(...)")
    settings, loss = settings or Settings(), loss or MixedLoss()
    own_forward = forward is not None
    spire = isinstance(draft, SpireModel)
    forward = forward or (KPass() if spire else Parallel())
    if spire:
        draft.check_target(target)
    target = unwrapped(target)
    kept = {id(p) for p in target.parameters()}
    shared = [name for name, p in draft.named_parameters() if id(p) in kept and p.requires_grad]
    if shared:
        raise ValueError(
            f"draft has the target's own {shared[0]!r}, which training would change: give a copy (copy.deepcopy), or freeze it with "
            "requires_grad_(False)"
        )
    accelerator = Accelerator()
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    if settings.batch % world:
        raise ValueError(f"batch is {settings.batch}: it must be a multiple of the {world} processes")
    needs = getattr(loss, "needs_target", True)
    _same_head(target)
    vocab_size = len(target.get_input_embeddings().weight)
    if not own_forward and not spire:
        theirs = len(draft.get_input_embeddings().weight)
        if theirs != vocab_size:
            raise ValueError(
                f"draft has a vocabulary of {theirs} and the target one of {vocab_size}: train a draft with the target's vocabulary"
            )
    check_ids("data", data, vocab_size)
    check_ids("validation", validation, vocab_size)
    source = source_of(data, target if needs or forward.layers(draft) else None, forward.layers(draft))
    held = None if validation is None else source_of(validation, target, forward.layers(draft))
    run = _Run(draft, settings, device)
    run.share(accelerator)
    head = target.get_output_embeddings()
    weight = head.weight.detach().to(device, settings.precision)
    bias = None if head.bias is None else head.bias.detach().to(device, settings.precision)

    def compare(logits: Tensor, final: Tensor, tokens: Tensor) -> Tensor:
        return loss(logits.float(), F.linear(final, weight, bias).float() if needs else logits, tokens)

    compare = torch.compile(compare, dynamic=False) if settings.compile else compare

    def validate() -> dict[str, float]:
        return (
            _validate(draft, held, forward, loss, weight, bias, settings, device) if held is not None else {}
        )

    run.identity = {
        "loss": repr(loss),
        "forward": repr(forward),
        "target": fingerprint(target),
        "sequences": str(len(source)),
        "draft": checkpoints.described(draft),
    }
    report, path = Trained(settings), None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        run.load(path, report)
    started, saved, before = time.monotonic(), time.monotonic(), report.seconds
    recent: list[Tensor] = []
    bar = tqdm(
        total=settings.steps,
        initial=run.step,
        desc="training",
        unit="step",
        disable=not (progress and rank == 0),
        mininterval=5,
    )
    while run.step < settings.steps:
        which = order(len(source), settings.batch, settings.seed, run.step)[rank::world]
        batch = source.take(which).to(device, settings.precision)
        logits = forward(draft, batch)
        T = logits.shape[1]
        final = batch.final[:, :T] if needs else batch.final  # empty where no target ran
        value = compare(logits, final, batch.tokens[:, 1 : T + 1])
        value.backward()
        recent = [*recent[-49:], value.detach()]
        run.update(settings.rate(run.step), accelerator)
        run.step += 1
        report.tokens += settings.batch * (batch.tokens.shape[1] - 1)
        report.seconds = before + time.monotonic() - started
        bar.update()
        last = run.step == settings.steps
        if run.step % 10 == 0 or last:
            mean = float(torch.stack(recent).mean())
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {run.step}: lower muon_lr and adam_lr")
            bar.set_postfix(loss=f"{mean:.4f}")
        if last or (settings.validate_every and run.step % settings.validate_every == 0):
            mean = float(torch.stack(recent).mean())
            report.curve.append({"step": run.step, "tokens": report.tokens, "loss": mean, **validate()})
            if on_validation is not None:
                on_validation(report.curve[-1])
        if (
            path is not None
            and rank == 0
            and (last or time.monotonic() - saved > 60 * settings.checkpoint_minutes)
        ):
            run.save(path, report)
            saved = time.monotonic()
    bar.close()
    run.finish()
    return report


class _Run:
    """Float32 weights, their optimisers, and the low-precision copy that the forward uses."""

    def __init__(self, draft: Any, settings: Settings, device: torch.device):
        if not any(p.ndim == 2 and "layers." in n for n, p in draft.named_parameters()):
            raise ValueError(
                f"draft: no blocks named 'layers.' in a {type(draft).__name__}: use a llama-like causal LM"
            )
        self.draft, self.settings, self.step = draft, settings, 0
        self.dtypes = {name: p.dtype for name, p in draft.named_parameters()}
        draft.to(device)
        self.master = {
            name: p.detach().float().clone().requires_grad_() for name, p in draft.named_parameters()
        }
        draft.train()
        # Parameters only: draft.to(...) would round the rotary embedding's frequencies too.
        for p in draft.parameters():
            p.data = p.data.to(settings.precision)
            p.requires_grad_(True)
        self.identity: dict[str, str] = {}
        self.pairs = [(p, self.master[name]) for name, p in draft.named_parameters()]
        self.matrices = [p for n, p in self.master.items() if p.ndim == 2 and "layers." in n]
        rest = [p for n, p in self.master.items() if not (p.ndim == 2 and "layers." in n)]
        self.muon = torch.optim.Muon(
            self.matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=settings.weight_decay
        )
        self.adam = torch.optim.AdamW(rest, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def share(self, accelerator: Any) -> None:
        """All processes begin with the first one's weights."""
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for low, high in self.pairs:
                    high.copy_(broadcast(high.detach()))
                    low.copy_(high)

    def update(self, rate: float, accelerator: Any) -> None:
        for low, high in self.pairs:
            high.grad = torch.zeros_like(high) if low.grad is None else low.grad.float()
            low.grad = None
            if accelerator.num_processes > 1:
                high.grad = accelerator.reduce(high.grad, "mean")
        torch.nn.utils.clip_grad_norm_(self.master.values(), self.settings.clip)
        self.muon.param_groups[0]["lr"] = self.settings.muon_lr * rate
        self.adam.param_groups[0]["lr"] = self.settings.adam_lr * rate
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_([low for low, _ in self.pairs], [high for _, high in self.pairs])

    def save(self, path: Path, report: Trained) -> None:
        state = {
            "master": self.master,
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
        }
        progress = {"tokens": report.tokens, "seconds": report.seconds, "curve": report.curve}
        checkpoints.save(path, {**state, **progress}, asdict(self.settings), self.identity)

    def load(self, path: Path, report: Trained) -> None:
        state = checkpoints.load(path, asdict(self.settings), self.identity)
        with torch.no_grad():
            for name, value in state["master"].items():
                self.master[name].copy_(value)
            torch._foreach_copy_([low for low, _ in self.pairs], [high for _, high in self.pairs])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, report.tokens, report.seconds, report.curve = (
            state[n] for n in ("step", "tokens", "seconds", "curve")
        )

    def finish(self) -> None:
        """Copy the float32 weights into the draft, in its original precision."""
        self.draft.eval()
        with torch.no_grad():
            for name, p in self.draft.named_parameters():
                p.data = self.master[name].detach().to(self.dtypes[name])
                p.grad = None


@torch.no_grad()
def _same_head(target: Any) -> None:
    """Refuse a target that applies more than its head to the final hidden state (a scale, a soft cap)."""
    table = target.get_input_embeddings().weight
    ids = torch.arange(8, device=table.device)[None] % len(table)
    final = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    said, ours = target(input_ids=ids, use_cache=False).logits, target.get_output_embeddings()(final)
    if not torch.allclose(said.float(), ours.float(), rtol=1e-2, atol=1e-2 * float(said.abs().max())):
        raise ValueError(
            f"target: a {type(target).__name__} does more to its logits than its head (a scale or a soft cap), which training "
            "from final hidden states does not know: use a target without"
        )


@torch.no_grad()
def _validate(draft, held, forward, loss, weight, bias, settings, device) -> dict[str, float]:
    """Loss, mean acceptance, and τ estimated from natural text: ``1 + sum_j prod_{i <= j} a_i`` over whole blocks."""
    k = getattr(forward, "k", 4)
    totals = torch.zeros(3, dtype=torch.float64)
    count = 0
    draft.eval()
    for start in range(0, len(held), settings.batch):
        batch = held.take(range(start, min(start + settings.batch, len(held)))).to(device, settings.precision)
        logits = forward(draft, batch).float()
        T = logits.shape[1] // k * k
        logits, wanted = logits[:, :T], F.linear(batch.final[:, :T], weight, bias).float()
        accepted = acceptance(logits, wanted)
        tau = 1 + accepted.view(len(logits), -1, k).cumprod(-1).sum(-1).mean()
        n = len(logits)
        totals += n * torch.tensor(
            [float(loss(logits, wanted, batch.tokens[:, 1 : T + 1])), float(accepted.mean()), float(tau)]
        )
        count += n
    draft.train()
    return dict(zip(("validation_loss", "acceptance", "tau"), (totals / count).tolist()))
