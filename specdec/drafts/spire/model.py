"""SPIRe's draft model: a few of the target's blocks that attend to the target's own activations and to feedback memory.

Neelam et al., "SPIRe: Boosting LLM Inference Throughput with Speculative Decoding", arXiv 2504.06419, section 3. The draft is the
target's embedding, some of its blocks (the last two in the paper) and its head. A block of an ordinary model attends to its own
inputs at earlier positions; block ``i`` of the draft attends

- at *committed* positions to the inputs of the target's block from which it was copied, which every verification pass computes
  anyway (with all blocks and an unlimited window the draft *is* the target);
- at positions of the block being drafted to memory vectors, a mixture of all the draft's activations there (section 3.3);
- at its own position to its own input.

Attention is sparse: a static mask of positions in the original text, by default one first position and a window (section 3.1).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from specdec.drafts.hub import folder_of, push, write_card
from specdec.drafts.spire.fits import check_fits
from specdec.drafts.spire.launches import SpireLaunches
from specdec.forward.block import EAGER, Angles, Block, block_of, eager_angles, rms_norm, rotated, run_block
from specdec.forward.families import positions_of
from specdec.forward.llama_c import small
from specdec.kernels.native.blocks import Blocks
from specdec.kernels.native.narrow import CHANGED, Narrow
from specdec.kernels.native.ops import add_norm, linear, linear_takes, unchecked_linear
from specdec.masks import Window, for_model, streaming
from specdec.masks.sight import longest
from specdec.masks.text import known, parse
from specdec.memory import FeedbackMemory
from specdec.models.fingerprint import fingerprint, unwrapped
from specdec.models.load import load, load_tokenizer
from specdec.pruning.layers import keep_layers
from specdec.pruning.rebuild import llama_like

FILE, CONFIG = "spire.json", "config.json"
KIND = "specdec.drafts.Spire"  # model_type in config.json: transformers would load the body alone as a language model of a few layers


class SpireModel(nn.Module):
    """The draft's weights and its arithmetic for given keys and values; ``drafts.Spire`` decodes with it.

    Args:
        body: a causal LM with as many llama-like blocks as ``layers``. layers: the corresponding blocks of the target,
            counted from 0: block ``i`` reads the target's activations before block ``layers[i]``.
        sinks, window: the sparse mask: a query at position q sees positions below ``sinks`` and above ``q - window``;
            ``window=None`` is unlimited. mask: another mask instead, a ``masks.Mask`` of positions or a function.
        feedback: whether positions of the block are seen as memory vectors or as each layer's own inputs.
        target: the fingerprint of the target. any_target: whether every target of its sizes is taken, whatever its weights.
    Raises:
        ValueError: the window, sinks or mask leave nothing to see, or blocks are not llama-like. TypeError: a mask beside a window or sinks.

    Attributes:
        mask: what a query sees, including the limits of the target's own windows. sinks, window: the mask's reach; 0 and ``None`` where
            it has none.
    """

    supports_trees = False
    narrow: Narrow | None = None  # bfloat16 copies that steps read, where ``narrowed`` made them
    _automatic = False

    def __init__(
        self,
        body: Any,
        layers: Sequence[int],
        *,
        sinks: int = 1,
        window: int | None = 64,
        mask: Any = None,
        feedback: bool = True,
        target: str = "",
        any_target: bool = False,
        tokenizer: Any = None,
    ):
        super().__init__()
        if mask is not None and (sinks, window) != (1, 64):
            raise TypeError(
                f"mask is {mask!r}, and sinks or window are set: give mask alone, or sinks and window without mask"
            )
        plain = streaming(window, sinks)
        if body.config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"the target's hidden_act is {body.config.hidden_act!r}: only silu blocks can be copied"
            )
        self.body, self.layers, self.tokenizer = body, tuple(layers), tokenizer
        self._launches: dict[Any, SpireLaunches | None] = {}  # by device and dtype
        self.target, self.any_target = target, any_target
        if len(self.layers) != body.config.num_hidden_layers:
            raise ValueError(
                f"layers has {len(self.layers)} entries and the body {body.config.num_hidden_layers} blocks"
            )
        self.blocks: list[Block] = [block_of(layer, body) for layer in body.model.layers]
        slides = [b.window for b in self.blocks if b.window is not None]
        if mask is not None:
            shown = for_model(mask, positions=positions_of(body.config))
            reach = shown.reach
            within = (
                reach is not None and not reach.sinks and reach.window <= min(slides, default=reach.window)
            )
            self.mask = for_model(shown & Window(min(slides))) if slides and not within else shown
        else:  # the target itself does not see beyond its sliding windows
            self.mask = (
                streaming(min([*slides, *([] if window is None else [window])]), sinks) if slides else plain
            )
        reach = self.mask.reach
        self.sinks = 0 if reach is None else reach.sinks
        self.window: int | None = None if reach is None else max(reach.window, 1)
        self.memory = FeedbackMemory(len(self.layers)).to(body.dtype).to(body.device) if feedback else None

    @classmethod
    def from_target(
        cls,
        target: Any,
        layers: int | Sequence[int] = 2,
        *,
        sinks: int = 1,
        window: int | None = 64,
        mask: Any = None,
        feedback: bool = True,
        random: bool = False,
        tokenizer: Any = None,
    ) -> SpireModel:
        """A draft from a transformers target: a copy of its embedding, of some of its blocks, and of its head (section 3.2).

        Args:
            layers: how many of the last blocks, or the blocks' numbers, counted from 0. random: use new weights of the same shape (an
                ablation of the paper).
        Raises:
            ValueError: the target lacks these layers, or its blocks cannot be copied.
        """
        tokenizer = tokenizer or getattr(target, "tokenizer", None)
        target = llama_like(unwrapped(target), "SpireModel.from_target")
        count = target.config.num_hidden_layers
        if isinstance(layers, int):
            if not 1 <= layers <= count:
                raise ValueError(f"layers is {layers}: the target has {count} blocks, give 1 to {count}")
            layers = range(count - layers, count)
        elif not isinstance(layers, Sequence) or not all(type(layer) is int for layer in layers):
            raise TypeError(
                f"layers is {layers!r}: give how many of the last blocks, or a list of their numbers"
            )
        body = keep_layers(target, list(layers))
        if random:
            body = type(body)(body.config).to(body.dtype).to(body.device)
        sees: dict[str, Any] = {"sinks": sinks, "window": window, "mask": mask, "feedback": feedback}
        return cls(body.eval(), list(layers), **sees, target=fingerprint(target), tokenizer=tokenizer)

    # -- properties -----------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self.body.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        return longest(self.mask, positions_of(self.body.config))

    @property
    def device(self) -> torch.device:
        return self.body.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.parameters())
        return (
            f"SpireModel(blocks {list(self.layers)} of target {self.target}, {size / 1e6:.3g}M parameters, {self.mask!r}, "
            f"feedback {self.memory is not None})"
        )

    def fast(self, x: Tensor) -> Blocks | None:
        """All blocks in one C call, where there is one for inputs ``x [T, E]``: few tokens on a CPU, without gradients."""
        return self._fast if small(x) and self._fast is not None and self._fast.plain else None

    @property
    def launches(self) -> SpireLaunches | None:
        """All blocks in few launches, where there are kernels for them: in half precision on a GPU. They have no gradients."""
        where = self.device, self.body.lm_head.weight.dtype
        if where not in self._launches:
            self._launches[where] = SpireLaunches.of(self.body) if self._own else None
        return self._launches[where]

    def __getstate__(self) -> dict[str, Any]:
        """The state without what is made for one machine: C kernels, and copies of weights."""
        return {name: value for name, value in vars(self).items() if name != "_fast"} | {"_launches": {}}

    @property
    def _own(self) -> bool:
        """Whether no derived class computes its blocks itself."""
        return type(self).run is SpireModel.run and type(self).keys_values is SpireModel.keys_values

    @cached_property
    def _fast(self) -> Blocks | None:
        return Blocks(self.blocks, self.narrow) if self._own and Blocks.takes(self.blocks) else None

    def narrowed(self, automatic: bool = False) -> SpireModel:
        """The same draft, whose steps on the CPU read bfloat16 copies of the weights (``HFModel``'s ``bf16_weights``).

        Args:
            automatic: whether the draft itself is returned where copies are not possible exactly, and ``check`` may give them up.
        Raises:
            ValueError: there are no C kernels for blocks of these sizes, or bfloat16 would round some weights.
        """
        narrow, head = None, self.body.lm_head
        if self._fast is not None and linear_takes(head.weight, head.bias):
            weights = [p.weight for b in self.blocks for p in b.products] + [head.weight]
            narrow = Narrow.where_exact(weights) if automatic else Narrow(weights)
        elif not automatic:
            raise ValueError(
                "bf16_weights is True, and this draft has no steps in C: the setting is for float32 drafts on a CPU where specdec.kernels.native.reason() "
                "is None, with sizes that are multiples of 16 and SpireModel's own run and keys_values; leave it None"
            )
        if narrow is None:
            return self
        made = copy.copy(self)
        made.__dict__.pop("_fast", None)
        made.narrow, made._automatic = narrow, automatic
        return made

    def check(self) -> None:
        """Bring copies of weights up to date; automatic ones are given up where bfloat16 would round.

        Raises:
            RuntimeError: it would, and they are not automatic.
        """
        if self.narrow is not None and not self.narrow.refresh():
            if not self._automatic:
                raise RuntimeError(CHANGED)
            self.narrow = None
            self.__dict__.pop("_fast", None)
        if self.launches is not None:
            self.launches.refresh()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...]`` ids -> ``[..., E]``."""
        return F.embedding(tokens, self.body.model.embed_tokens.weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[..., 1, D]`` of positions in the text ``[...]``; the 1 is for heads."""
        like = self.body.lm_head.weight[:1]
        cos, sin = self.body.model.rotary_emb(like, positions.reshape(1, -1))
        return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)

    def keys_values(self, layer: int, memory: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., H, D]`` of layer ``layer`` at positions whose input is ``memory [..., E]`` (memory vectors, or the target's activations)."""
        b = self.blocks[layer]
        y = rms_norm(memory, b.before)
        key, value = (t.unflatten(-1, (-1, b.size)) for t in EAGER.products(y, b.key, b.value))
        return rotated(key, b.key_norm, _angles(rotary)), value

    def run(
        self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One block over ``x [..., E]``.

        Args:
            attend: ``(query [..., Hq, D], key [..., H, D], value [..., H, D]) -> [..., Hq, D]``; key and value are those of the
                query's own position.
        Returns:
            the block's output ``[..., E]``, its own keys and its own values.
        """
        b, own = self.blocks[layer], list[Tensor]()

        def seen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own.extend((key, value))
            return attend(query, key, value)

        x, more = run_block(EAGER, b, *EAGER.add_norm(x, None, b.before), _angles(rotary), seen)
        key, value = own
        return x + more, key, value

    def logits(self, x: Tensor) -> Tensor:
        """``[..., E]`` after the last block -> ``[..., V]``."""
        head, last = self.body.lm_head, self.body.model.norm
        if self.fast(x) and linear_takes(head.weight, head.bias):
            y = add_norm(x, None, last.weight, last.variance_epsilon)
            if self.narrow is not None:
                return unchecked_linear(y, self.narrow[head.weight], head.bias)
            return linear(y, head.weight, head.bias)
        return F.linear(rms_norm(x, last), head.weight, head.bias)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Save a checkpoint of the blocks, ``spire.json``, the memory's weights, and a model card if there is none.

        The blocks have the files of a transformers checkpoint, but transformers refuses to load them: they are no language model.
        """
        self.body.save_pretrained(folder)
        config = json.loads((Path(folder) / CONFIG).read_text())
        config |= {
            "model_type": KIND,
            "architectures": ["SpireModel"],
            "body_model_type": config["model_type"],
        }
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        settings: dict[str, Any] = {"layers": self.layers, "target": self.target}
        if self.any_target:
            settings["any_target"] = True
        if self.mask == streaming(self.window, self.sinks):
            settings |= {"sinks": self.sinks, "window": self.window}
        else:
            settings |= {"mask" if known(self.mask) else "own mask": repr(self.mask)}
        (Path(folder) / FILE).write_text(
            json.dumps({**settings, "feedback": self.memory is not None}, indent=1) + "\n"
        )
        if self.memory is not None:
            save_file(dict(self.memory.state_dict()), Path(folder) / "memory.safetensors")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        what = f"A SPIRe draft (arXiv 2504.06419): copies of the blocks {list(self.layers)} of its target, with a mask and feedback memory."
        read = 'draft = sd.drafts.Spire("...")  # the folder or the hub id of this draft'
        write_card(Path(folder), "SPIRe", what, self.target, read)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload what ``save_pretrained`` writes; as ``hub.push``."""
        return push(self.save_pretrained, name, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        target: Any = None,
        *,
        mask: Any = None,
        dtype: Any = "auto",
        any_target: bool = False,
        **kwargs: Any,
    ) -> SpireModel:
        """Load what ``save_pretrained`` wrote.

        Args:
            folder: or a hub id. target: when given, the draft must be this model's. mask: the user's own mask that the draft was trained with
                (the library's masks are saved with the draft). any_target: as for ``heads.load``.
        Raises:
            FileNotFoundError: the folder is not a SPIRe checkpoint. ValueError: the draft is of another target; a mask of the user's own is
                missing, or one was passed for a draft that was saved with its mask.
        """
        folder = folder_of(folder)
        if not (folder / FILE).exists():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: it is not a SPIRe draft; make one with SpireModel.from_target"
            )
        settings = json.loads((folder / FILE).read_text())
        own = settings.pop("own mask", None)
        if (own is None) != (mask is None):
            raise ValueError(
                f"the draft in {folder} was saved with its mask: leave mask out"
                if own is None
                else f"the draft in {folder} was trained with a mask of the user's own, {own}: load it with "
                "SpireModel.from_pretrained(folder, mask=...), and pass that mask"
            )
        if "mask" in settings:
            settings["mask"] = parse(settings["mask"])
        elif own is not None:
            settings["mask"] = mask
        config = _body_config(folder)
        body = load(folder, dtype=dtype, config=config, **kwargs)
        settings["any_target"] = any_target or settings.get("any_target", False)
        model = cls(body.eval(), tokenizer=load_tokenizer(folder, config), **settings)
        if model.memory is not None:
            model.memory.load_state_dict(load_file(folder / "memory.safetensors"))
        if target is not None:
            model.check_target(target)
        return model

    def check_target(self, target: Any) -> None:
        """Raise ValueError unless this is a draft of ``target`` (an HFModel or a transformers model), or has its sizes where ``any_target`` is set."""
        check_fits(self, unwrapped(target))


def _body_config(folder: Path) -> Any:
    """The config of the blocks. In older folders ``config.json`` is theirs."""
    values = json.loads((folder / CONFIG).read_text())
    kind = values.pop("body_model_type", values["model_type"])
    return AutoConfig.for_model(
        kind, **{name: value for name, value in values.items() if name not in ("model_type", "architectures")}
    )


def _angles(rotary: tuple[Tensor, Tensor]) -> Angles:
    return eager_angles(*(t.squeeze(-2) for t in rotary))
