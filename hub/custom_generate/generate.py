"""Speculative decoding with specdec in place of transformers' loop: ``model.generate(..., custom_generate="<this repository>", trust_remote_code=True)``."""

from typing import Any

_latest: Any = (None, None, None, None)  # target, draft, length, and the function that transformers calls


def generate(
    model: Any,
    *inputs: Any,
    assistant_model: Any = None,
    draft_length: int = 4,
    seed: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    synced_gpus: Any = None,
    **named: Any,
) -> Any:
    """As ``model.generate(..., custom_generate=decoder.as_generate())``.

    Args:
        model: the target. assistant_model: the draft; ``None``: what followed the last tokens where they occurred before.
        draft_length: the most drafted tokens of a row and round. seed: as for ``Decoder.generate``.
        streamer: takes the prompt and the tokens of the single row.
        named: what ``model.generate`` takes.
    """
    import specdec as sd

    if assistant_tokenizer is not None:
        raise ValueError(
            "assistant_tokenizer is not supported by this custom_generate: the draft must share the target's tokenizer"
        )
    global _latest
    if _latest[0] is not model or _latest[1] is not assistant_model or _latest[2] != draft_length:
        draft = sd.drafts.NGram() if assistant_model is None else assistant_model
        ours = sd.decoder(model).draft(draft, length=draft_length).as_generate()
        _latest = (model, assistant_model, draft_length, ours)
    function = _latest[3] if streamer is None else _latest[3].decoder.as_generate(streamer)
    return model.generate(*inputs, custom_generate=function, seed=seed, tokenizer=tokenizer, **named)
