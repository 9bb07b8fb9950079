"""One call that trains a draft for a target: ``train(draft, target, data)``.

Weights are float32 and the arithmetic bf16, where the processor has it; Muon (Jordan, 2024) updates the matrices of the blocks, AdamW the rest; gradients are
clipped. A checkpoint holds weights, optimisers and the position in the data, so that the same call continues after an interruption
and ends with the same weights (except for a draft with dropout). Devices and data parallelism are accelerate's: under
``accelerate launch`` every process takes its share of each batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.arguments import at_least
from specdec.configs import parallel_token
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.spire.model import SpireModel
from specdec.forward.ends import Ends
from specdec.models.fingerprint import fingerprint, unwrapped
from specdec.training import checkpoints
from specdec.training.block_losses import ChoiceLoss, WithBlock
from specdec.training.forward import Blocks, Corrected, KPass, Parallel, drafted
from specdec.training.losses import ByDepth, CombinedLoss, MixedLoss, needs_target, reads
from specdec.training.muon import quick
from specdec.training.parallel_blocks import ParallelBlocks
from specdec.training.sources import Masked, check_ids, order, source_of
from specdec.training.states import States
from specdec.training.validation import Judge
from specdec.training.weights import Weights, lowered

ONE_PASS = 16  # the longest block by default of heads that draft it in one pass


@dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Attributes:
        steps: optimiser steps; if a checkpoint was made with fewer, its training continues at the rates of the longer run.
        batch: sequences per step, over all processes. muon_lr, adam_lr: peak learning rates of the blocks' matrices and of all
            other weights. weight_decay: of the matrices, times the rate. warmup, decay: shares of the steps in which the rate rises
            and falls linearly. clip: largest gradient norm. precision: of forward and backward; ``None``: that of the
            checkpoint, or bfloat16 on GPUs and on CPUs with instructions for it (AMX, AVX-512-BF16), else float32. Muon's products follow the processor.
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
    precision: torch.dtype | None = None
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
    """The result of a run.

    Attributes:
        settings: of the run. tokens: the number of training tokens. seconds: of training, validation included.
        curve: a row per validation: step, tokens, loss; with validation data also its loss, acceptance, τ, and acceptance by depth
            (``acceptance_1``, ...).
    """

    settings: Settings
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)

    def frame(self) -> Any:
        """The curve as a ``pandas.DataFrame``, a row per validation."""
        try:
            import pandas
        except ImportError as missing:
            raise ImportError("frame() needs pandas: pip install pandas (or use curve)") from missing
        return pandas.DataFrame(self.curve)


def train(
    draft: Any,
    target: Any,
    data: States | Masked | Tensor | Sequence[Sequence[int]],
    *,
    loss: Callable[..., Tensor] | None = None,
    forward: Any = None,
    settings: Settings | None = None,
    validation: States | Masked | Tensor | Sequence[Sequence[int]] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    on_validation: Callable[[dict[str, float]], None] | None = None,
    on_step: Callable[[dict[str, float]], None] | None = None,
    accelerator: Any = None,
) -> Trained:
    """Train ``draft`` in place for ``target``, which is neither changed nor moved.

    The draft trains on the accelerator's device, the GPU if there is one, and is back on its own device afterwards.

    Args:
        draft: a head of ``drafts.heads``, a ``SpireModel``, or any transformers causal LM. Weights that require no gradient are kept.
        target: a transformers causal LM; its head computes the logits.
        data: ``States``, or sequences of equally many ids ``[N, L + 1]`` (the target then runs in every step), or either as
            ``sources.Masked`` with the tokens to learn. All sequences are used once in random order, then again in another order.
        loss: called with the draft's and the target's logits ``[B, A, k, V]`` and the tokens ``[B, A, k]`` of blocks (``k`` is 1 where the
            forward has none); with ``Masked`` data also with ``kept [B, A, k]``, the tokens that count, and with the keywords in its tuple ``reads`` (``losses.READS``), if it has one. By default ``MixedLoss()``, for heads weighted by ``ByDepth`` with a factor of 0.8, and DSpark's own for a
            head with a confidence.
        forward: ``(draft, batch) -> logits`` with ``layers(draft)``; by default ``Blocks()`` for a head, of at most 5
            tokens, or of at most 16 for a head that drafts in one pass (``Corrected()`` if the loss reads a block), ``KPass()`` for a ``SpireModel``, ``ParallelBlocks()`` for a model whose config names a mask token, and ``Parallel()`` otherwise.
        validation: as ``data``. checkpoint: a file to continue from and to write.
        on_validation: called with each row of the curve. on_step: called after each step with its step, tokens, loss and rate.
        accelerator: an ``accelerate.Accelerator``, such as ``Accelerator(cpu=True)``, or one with trackers (``log_with=...``): they get what
            the two calls get. The trackers are ended by its owner (``end_training``).
    Raises:
        ValueError: data without sequences or of another target, a checkpoint of another run, a draft that would train weights of
            the target or whose forward is not computed here, or a loss of a confidence, a block or rounds that the draft or the forward does not have.
        FloatingPointError: the loss is not finite.
        TypeError: ids that are not whole numbers, or ``settings`` of another type.
    """
    from accelerate import Accelerator

    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings is {settings!r}: give Settings(...)")
    settings, own_forward = settings or Settings(), forward is not None
    head, spire = isinstance(draft, HeadModel), isinstance(draft, SpireModel)
    loss = loss or _loss(draft)
    forward = forward or _forward(draft, loss)
    if head or spire:
        draft.check_target(target)
    target = unwrapped(target)
    kept = {id(p) for p in target.parameters()}
    shared = [name for name, p in draft.named_parameters() if id(p) in kept and p.requires_grad]
    if shared:
        raise ValueError(
            f"draft has the target's own {shared[0]!r}, which training would change: give a copy (copy.deepcopy), or freeze it with "
            "requires_grad_(False)"
        )
    if "confidence" in reads(loss) and not (head and draft.confident):
        raise ValueError(
            f"loss is {loss!r}, which trains a confidence that this {type(draft).__name__} does not have"
        )
    if {"block", "rounds"} & set(reads(loss)) or isinstance(forward, Corrected):
        _check_corrected(draft, loss, forward)
    accelerator = Accelerator() if accelerator is None else accelerator
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    if settings.batch % world:
        raise ValueError(f"batch is {settings.batch}: it must be a multiple of the {world} processes")
    needs = needs_target(loss)
    if head:
        ends = Ends.of(target)
        draft.bound(target)  # raises for ends that are not known
    else:
        _same_head(target)
        ends = Ends(target.get_input_embeddings(), None, target.get_output_embeddings(), 1.0, None, 0)
    vocab_size = len(target.get_input_embeddings().weight)
    if not (own_forward or head or spire):
        theirs = len(draft.get_input_embeddings().weight)
        if theirs != vocab_size and parallel_token(draft.config) != vocab_size:
            raise ValueError(
                f"draft has a vocabulary of {theirs} and the target one of {vocab_size}: train a draft with the target's vocabulary"
            )
    if isinstance(forward, ParallelBlocks) and not (head or spire):
        forward.check(draft)
    check_ids("data", data, vocab_size)
    check_ids("validation", validation, vocab_size)
    layers = tuple(forward.layers(draft))
    source = source_of(data, target if needs or head or layers else None, layers)
    held = None if validation is None else source_of(validation, target, layers)
    path = None if checkpoint is None else Path(checkpoint)
    identity = {
        "loss": repr(loss),
        "forward": repr(forward),
        "target": fingerprint(target),
        "sequences": str(len(source)),
        "data": checkpoints.content(data),
        "draft": checkpoints.described(draft),
    }
    state = None
    if path is not None and path.exists():
        state = checkpoints.load(path, asdict(settings), identity)
    products = quick(device)
    precision = settings.precision or (products if state is None else state["settings"]["precision"])
    if world > 1:  # the processors may differ
        from accelerate.utils import broadcast_object_list

        precision, products = broadcast_object_list([precision, products])
    settings = replace(settings, precision=precision)
    report, ends = Trained(settings), lowered(ends, device, precision)
    run = Weights(draft, settings, device, ends, products)
    recent: list[Tensor] = []
    between = False  # two steps: what is kept then can be continued

    def keep() -> None:
        if path is not None and rank == 0:
            done = {"tokens": report.tokens, "seconds": report.seconds, "curve": report.curve}
            done["recent"] = [loss.cpu() for loss in recent]
            checkpoints.save(path, {**run.state(), **done}, asdict(settings), identity)

    try:
        run.share(accelerator)
        judge = Judge(draft, loss, ends.logits, settings.compile, None if head or spire else vocab_size)
        if state is not None:
            run.restore(state)
            report.tokens, report.seconds, report.curve = (state[n] for n in ("tokens", "seconds", "curve"))
            recent = [loss.to(device) for loss in state.get("recent", ())]  # absent in older checkpoints
        if accelerator.log_with and not accelerator.trackers:
            accelerator.init_trackers(
                "specdec", config={n: str(value) for n, value in asdict(settings).items()}
            )
        started, saved, before = time.monotonic(), time.monotonic(), report.seconds
        bar = tqdm(
            total=settings.steps,
            initial=run.step,
            desc="compiling the loss" if settings.compile else "training",
            unit="step",
            disable=not (progress and rank == 0),
            mininterval=5,
        )
        between = True  # two steps
        while run.step < settings.steps:
            which = order(len(source), settings.batch, settings.seed, run.step)[rank::world]
            places = range(run.step * settings.batch, (run.step + 1) * settings.batch)[rank::world]
            draws = [np.random.default_rng((settings.seed, 1, place)) for place in places]
            batch = source.take(which).to(device, precision)
            value = judge(drafted(forward, draft, batch, draws), batch, run.step / settings.steps)
            value.backward()
            between = False
            recent = [*recent[-49:], value.detach()]
            rate = settings.rate(run.step)
            run.update(rate, accelerator)
            run.step += 1
            report.tokens += settings.batch * (batch.tokens.shape[1] - 1)
            report.seconds = before + time.monotonic() - started
            between = True
            bar.set_description("training", refresh=False)
            bar.update()
            last = run.step == settings.steps
            if on_step is not None or accelerator.trackers:
                row = {"step": run.step, "tokens": report.tokens, "loss": float(recent[-1]), "rate": rate}
                accelerator.log(row, run.step)
                if on_step is not None:
                    on_step(row)
            if run.step % 10 == 0 or last:
                mean = float(torch.stack(recent).mean())
                if not math.isfinite(mean):
                    raise FloatingPointError(
                        f"the loss is {mean} at step {run.step}: lower muon_lr and adam_lr"
                    )
                bar.set_postfix(loss=f"{mean:.4f}")
            if last or (settings.validate_every and run.step % settings.validate_every == 0):
                mean = float(torch.stack(recent).mean())
                row = {"step": run.step, "tokens": report.tokens, "loss": mean}
                if held is not None:
                    row |= judge.validate(draft, held, forward, settings.batch, device, precision)
                report.curve.append(row)
                if accelerator.trackers:
                    accelerator.log({f"validation/{name}": value for name, value in row.items()}, run.step)
                if on_validation is not None:
                    on_validation(row)
            if last or time.monotonic() - saved > 60 * settings.checkpoint_minutes:
                keep()
                saved = time.monotonic()
        bar.close()
    except KeyboardInterrupt:
        if between and run.step:
            keep()
        raise
    finally:
        run.finish()
    return report


def _forward(draft: Any, loss: Any) -> Any:
    if isinstance(draft, HeadModel):
        k = min(ONE_PASS if draft.block_slots else 5, draft.longest or 5)
        wide = {"block", "rounds"} & set(reads(loss))
        return Corrected(k, rounds=3 * ("rounds" in wide)) if wide else Blocks(k)
    if isinstance(draft, SpireModel):
        return KPass()
    return Parallel() if parallel_token(draft.config) is None else ParallelBlocks()


def _check_corrected(draft: Any, loss: Any, forward: Any) -> None:
    """Refuse a loss of a block and its correction, or a forward that gives both, where something is lacking."""
    if not (isinstance(draft, HeadModel) and draft.corrected):
        raise ValueError(
            f"draft is a {type(draft).__name__}, which has no block of logits that it corrects: give another loss than {loss!r}, and Blocks as forward"
        )
    if isinstance(forward, Blocks) and not isinstance(forward, Corrected):
        raise ValueError(
            f"loss is {loss!r}, which reads a block before it is corrected, or rounds: give forward=Corrected(...) in place of {forward!r}"
        )
    if isinstance(forward, Corrected) and "rounds" in reads(loss) and not forward.rounds:
        raise ValueError(f"loss is {loss!r}, which reads rounds: give forward=Corrected(..., rounds=3)")
    choice = loss.loss if isinstance(loss, WithBlock) else loss
    if isinstance(choice, ChoiceLoss) and choice.top_k != draft.top_k:
        raise ValueError(
            f"top_k of {choice!r} is {choice.top_k}, and this {type(draft).__name__} "
            + ("has no candidates" if draft.top_k is None else f"chooses among {draft.top_k} candidates")
        )


def _loss(draft: Any) -> Any:
    if not isinstance(draft, HeadModel):
        return MixedLoss()
    if draft.confident:
        return ByDepth(CombinedLoss(hard=0.1, variation=1.8, confidence=1.0), math.exp(-1 / 4))
    return ByDepth(MixedLoss())


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
