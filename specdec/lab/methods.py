"""SPIRe and the methods it is compared with, for a target and its drafts: decoders, shapes for the throughput model, and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from specdec import drafts, zoo
from specdec.builder import decoder
from specdec.cost import Method, Shape, Window, magicdec, spire, vanilla
from specdec.data.prompts import prompts
from specdec.decoder import Decoder
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Serial
from specdec.executors.contract import Checks
from specdec.lab.calibrated import Model
from specdec.lab.grid_rows import K
from specdec.lab.loading import load
from specdec.lab.options import option
from specdec.lab.prefill import Group, group, prefilled
from specdec.lab.steady import capacity
from specdec.models import HFModel, Windowed
from specdec.models.fingerprint import fingerprint
from specdec.training.checkpoints import hash_of
from specdec.training.forward import Parallel

EXECUTORS: dict[str, Serial | Ahead] = {"serial": Serial(), "ahead": Ahead()}
LEAST_ROWS = 4
"""Smaller batches decode several groups of prompts, to reduce the noise of single prompts."""


@dataclass(frozen=True)
class MethodSettings:
    """Settings of models and decoding."""

    target: str = option("pocket-target", "pocket model, hub id or folder")
    draft: str = option("pocket-vanilla", "the vanilla draft, likewise")
    distilled: str = option(
        "", "a second draft that reads the whole context, as method distilled_vanilla (default: none)"
    )
    in_cache: bool = option(
        False,
        "also MagicDec with positions inside its cache, the paper's baseline, as method magicdec_in_cache",
    )
    spire: str = option(
        "pocket-spire",
        "a SPIRe draft of the target: pocket model or folder; or 'untrained' (default: pocket-spire)",
    )
    contexts: tuple[int, ...] = option((128, 256, 512, 1024), "prompt tokens")
    lengths: tuple[int, ...] = option(
        (1, 2, 3, 4, 6, 8), "candidates for the best k; 4 is always measured (default: 1 2 3 4 6 8)"
    )
    new_tokens: int = option(20, "new tokens per row, on average")
    temperature: float = option(1.0, "0 is greedy (default: 1)")
    device: str = option("cpu", "cpu or cuda")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "of weights and caches")
    bf16_weights: bool | None = option(
        None,
        "float32 models' products read bfloat16 copies of their weights (docs/kernels.md), in all methods (default: where they are exact)",
    )
    graphs: Literal["", "auto", "eager"] = option(
        "", "CUDA graphs of small steps (auto), or the same steps without capturing them (default: neither)"
    )
    executor: Literal["serial", "ahead"] = option(
        "serial",
        "of all methods, plain decoding too: step after step (serial), or whole rounds as captured steps, launched a round ahead, without the "
        "methods that have none (ahead; needs --graphs)",
    )
    joined: bool = option(False, "join prompts for contexts that are longer than a prompt")
    seed: int = option(0, "seed of the first row")

    def model(self, name: str) -> HFModel:
        """A model by name, with these settings."""
        raw, tokenizer = load(name, getattr(torch, self.dtype), self.device)
        return HFModel(
            raw, tokenizer, graphs=self.graphs or False,
            prefill_chunk=512 if self.device == "cpu" else 8192, bf16_weights=self.bf16_weights,
        )  # fmt: skip

    def spire_model(self, target: HFModel) -> SpireModel:
        """The trained SPIRe draft, or an untrained one, whose times are the same.

        Raises:
            SystemExit: no such draft.
        """
        if self.spire == "untrained":
            return SpireModel.from_target(target)
        folder = zoo.FOLDER / self.spire
        if not folder.is_dir():
            folder = Path(self.spire)
        try:
            return SpireModel.from_pretrained(folder, target, dtype=target.dtype).to(target.device).eval()
        except FileNotFoundError as missing:
            raise SystemExit(
                f"--spire {self.spire}: {missing}; or --spire untrained, for times without meaningful multipliers"
            ) from None


class Methods:
    """Decoders of each method and k, over models whose prompts are fed once for all of them.

    Attributes:
        names: ``plain`` first. left_out: other methods, which the executor refuses, with the reason that it gives. lengths: block
            lengths, 4 included. model: the shapes, for the throughput model.
    Raises:
        SystemExit: a row would exceed a model's positions, no prompt is long enough, or the executor refuses plain decoding or SPIRe.
    """

    def __init__(self, s: MethodSettings):
        self.s = s
        self.lengths = sorted({K, *s.lengths})
        longest = self._room(max(s.contexts))
        loaded = {"target": s.model(s.target), "draft": s.model(s.draft)}
        if s.distilled:
            loaded["distilled draft"] = s.model(s.distilled)
        for who, one in loaded.items():
            if one.max_positions is not None and longest > one.max_positions:
                raise SystemExit(
                    f"the {who} has {one.max_positions} positions and a row may come to {longest}: choose a smaller --contexts, "
                    "--new-tokens or --lengths"
                )
        target, draft = loaded["target"], loaded["draft"]
        block, small = max(self.lengths), s.spire_model(target)
        sinks, window = small.sinks, small.window or max(s.contexts)
        self.target = prefilled(target, taps=small.layers)
        windowed = Windowed(draft, window, sinks, block=block)
        self.caching = {"vanilla": prefilled(draft), "windowed": prefilled(windowed)}
        slots = Window(sinks + window + block - 1)  # a ring is read as a whole, whatever a query sees of it
        big, little = Shape.of(target.model), Shape.of(draft.model)
        costs = {"vanilla": vanilla(little), "windowed": Method("windowed", little, slots)}
        if s.distilled:
            self.caching["distilled_vanilla"] = prefilled(loaded["distilled draft"])
            costs["distilled_vanilla"] = vanilla(Shape.of(loaded["distilled draft"].model))
        self.drafts: dict[str, Any] = {
            **self.caching,
            "magicdec": drafts.MagicDec(window=window, sinks=sinks, block=block),
            "spire": drafts.Spire(small, block=block, graphs=s.graphs or False, bf16_weights=s.bf16_weights),
        }
        costs["magicdec"] = magicdec(big, slots)
        if s.in_cache:
            self.drafts["magicdec_in_cache"] = drafts.MagicDec(
                window=window, sinks=sinks, block=block, positions="in_cache"
            )
            costs["magicdec_in_cache"] = magicdec(big, slots)
        costs["spire"] = spire(Shape.of(small.body), slots, feedback=small.memory is not None)
        engine: Any = target.engine
        self.model = Model(
            big, costs, target.dtype.itemsize, 2 if engine.bf16_weights else target.dtype.itemsize
        )
        self._small, self._loaded, self._mask = small, loaded, (window, sinks)
        self._decoders: dict[tuple[str, int, str], Decoder] = {}
        every = ["plain", *self.drafts]
        self.left_out = {method: why for method in every if (why := self._refused(method)) is not None}
        self.names = [method for method in every if method not in self.left_out]
        for method in ("plain", "spire"):
            if method in self.left_out:
                raise SystemExit(
                    f"--executor {s.executor} cannot run {method}: {self.left_out[method]}. Whole rounds need --graphs auto on a GPU, and "
                    "--graphs eager elsewhere"
                )
        if s.executor == "ahead":  # the rounds of all methods and k are programs of the target
            self.target.steps.most += 2 * len(self.names) * len(self.lengths)  # in two buckets of lengths

    def _refused(self, method: str) -> str | None:
        """Why the executor cannot run a method, in its own words; ``None`` if it can."""
        executor = EXECUTORS[self.s.executor]
        if isinstance(executor, Checks):
            composition = self.decoder(method, 0 if method == "plain" else K, "serial")
            try:
                executor.check(composition)
            except ValueError as why:
                return str(why)
        return None

    def _room(self, context: int) -> int:
        """The most tokens of a row at the longest chain."""
        return capacity(context, self.s.new_tokens, max(self.lengths))

    @cached_property
    def evaluated(self) -> dict[str, tuple[Any, Any]]:
        """Each method's draft and forward, as ``lab.tau.score`` takes them."""
        window, sinks = self._mask
        target, vanilla = self._loaded["target"], self._loaded["draft"].model
        depth = target.model.config.num_hidden_layers
        # All of the target's blocks over its own activations, sparse: the same function as MagicDec, in parallel.
        whole = SpireModel.from_target(target.model, depth, sinks=sinks, window=window, feedback=False)
        found: dict[str, tuple[Any, Any]] = {
            "vanilla": (vanilla, Parallel()),
            "windowed": (vanilla, Parallel(window, sinks)),
            "magicdec": (whole, None),
            "spire": (self._small, None),
        }
        if "distilled draft" in self._loaded:
            found["distilled_vanilla"] = (self._loaded["distilled draft"].model, Parallel())
        if self.s.in_cache:
            found["magicdec_in_cache"] = (self.drafts["magicdec_in_cache"], target)
        return found

    @property
    def identity(self) -> str:
        """Names the weights and masks of all models, whatever they are computed in."""
        every = {name: fingerprint(one.model) for name, one in self._loaded.items()}
        return hash_of((every, fingerprint(self._small), self._mask, self.s.in_cache))

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Ids of held-out prompts, each as long as the longest context."""
        longest = max(self.s.contexts)
        every = [self.target.tokenizer(text)["input_ids"] for text in prompts()]
        if self.s.joined:
            stream = [i for ids in every for i in ids]
            every = [stream[n : n + longest] for n in range(0, len(stream), longest)]
        found = [ids[:longest] for ids in every if len(ids) >= longest]
        if not found:
            raise SystemExit(
                f"no prompt has {longest} tokens: choose smaller --contexts (about 1100 is the most), or --joined"
            )
        return found

    def decoder(self, method: str, k: int, executor: str = "") -> Decoder:
        """A method's decoder with k drafted tokens a round, cached; ``executor``: by default that of the settings."""
        key = method, k, executor or self.s.executor
        if key not in self._decoders:
            base = decoder(self.target).sampling(temperature=self.s.temperature).executor(EXECUTORS[key[2]])
            if method != "plain":
                base = base.draft(self.drafts[method], length=k)
            self._decoders[key] = base.build()
        return self._decoders[key]

    def groups(self, batch: int, context: int) -> list[Group]:
        """Prompts of a grid point, fed once for all methods; small batches have several groups of them."""
        room = self._room(context)
        reading = [model for method, model in self.caching.items() if method in self.names]
        groups = []
        for g in range(max(1, LEAST_ROWS // batch)):
            numbers = range(g * batch, (g + 1) * batch)
            texts = [self.prompts[n % len(self.prompts)][:context] for n in numbers]
            seeds = [self.s.seed + n for n in numbers]  # repeated prompts get different seeds
            groups.append(group(texts, seeds, room, self.target, reading))
        return groups
