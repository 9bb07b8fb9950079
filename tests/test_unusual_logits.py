"""Logits that are no numbers, which a decoder refuses, and equal largest logits, of which it takes the first."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers(bad, temperature):
    model = tiny("llama", 0)
    with torch.no_grad():
        model.lm_head.weight[3, :] = bad
    with pytest.raises(ValueError, match="NaN or inf logits"):
        sd.decoder(model).sampling(temperature=temperature).build().generate([[1, 2]], 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_error_says_whose_logits_they_are(temperature):
    good, bad = sd.TableModel.random(5, 1, seed=0), torch.full((5,), float("nan"))
    base = sd.decoder(good).sampling(temperature=temperature)
    with pytest.raises(ValueError, match=r"^a draft's logits of row 0, entry 0 contain nan"):
        base.draft(sd.chain_draft(lambda prefix: bad), length=2).build().generate([[1, 2]], 4, seed=0)
    with pytest.raises(ValueError, match=r"^logits of row 0, entry 0 contain nan"):  # also after a draft's
        sd.Sampling(temperature=temperature)(bad[None, None], sd.Context.of([[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "draw", [sd.Sampling(), sd.Sampling(temperature=0.0), sd.Sampling(temperature=0.0).argmax]
)
def test_one_logit_that_is_no_number_is_found_among_all(draw, dtype):
    none, inf, nan = sd.Context.of([[0]] * 4), float("inf"), float("nan")
    most = torch.finfo(dtype).max
    fine = torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    fine[..., :4] = -inf  # masked tokens
    fine[1, :, 5] = most  # finite, and their sum is not
    fine[2, :, 5] = -most
    assert torch.isfinite(draw(fine, none)).all()
    for bad, at, shown in ((nan, 0, "nan"), (nan, 7, "nan"), (inf, 0, "inf"), (inf, 8, "inf")):
        logits = fine.clone()
        logits[3, 2, at] = bad
        with pytest.raises(
            ValueError, match=f"logits of row 3, entry 2 contain {shown} as their maximum: NaN or inf"
        ):
            draw(logits, none)
    logits = fine.clone()
    logits[0, 1] = -inf  # nothing left to draw
    with pytest.raises(ValueError, match="logits of row 0, entry 1 contain -inf as their maximum"):
        draw(logits, none)
    logits[3, 0, 6] = inf  # both: inf and -inf do not cancel
    with pytest.raises(ValueError, match="logits of row 0, entry 1 contain -inf as their maximum"):
        draw(logits, none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_first_of_equal_largest_logits_is_taken(dtype):
    logits = torch.randint(0, 6, (7, 3, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 1] = float("-inf")
    logits[0, 1, 17] = -4
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    none = sd.Context.of([[0]] * 7)
    strided = logits.transpose(0, 1).contiguous().transpose(0, 1)
    for some in (logits, strided):
        assert torch.equal(sd.Sampling(temperature=0.0).argmax(some, none), first)
    few = torch.zeros(1, 1, 10, dtype=torch.bfloat16)
    few[0, 0, 3], few[0, 0, 7] = 3.0, 3.015625  # equal when divided in bfloat16: processors are given float32
    divided = sd.Sampling(temperature=0.0, processors=(lambda ids, scores: scores / 1.3,))
    assert divided.argmax(few, sd.Context.of([[0]])).tolist() == [[7]]
    assert divided(few, sd.Context.of([[0]])).argmax(-1).tolist() == [[7]]
    logits[2, 1, 40] = float("nan")
    with pytest.raises(ValueError, match="row 2, entry 1 contain nan"):
        sd.Sampling(temperature=0.0).argmax(logits, none)
