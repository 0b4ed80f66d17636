"""The options of a plan: what is refused, with what hint, and how keywords build them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit import Options, UsageError


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"allow": "exactly"}, "`allow` knows no `exactly`\nhint: did you mean `exact`?"),
        (
            {"allow": "shrnk"},
            "`allow` knows no `shrnk`\nhint: did you mean `shrink`? It is one of exact, equivalent",
        ),
        (
            {"allow": "fast"},
            "`allow` knows no `fast`\nhint: one of exact, equivalent, approximate",
        ),
        ({"forbid": ["remad"]}, "`forbid` knows no `remad`\nhint: did you mean `remat`?"),
        ({"forbid": "remat"}, "`forbid` is a list of techniques: write `forbid=['remat']`"),
        ({"budgett": 1}, "`option` knows no `budgett`"),
        ({"gpu": "h100", "profile": True}, "op times have one source: give one of"),
        ({"time_limit": 0}, "`time_limit=0` is no number of seconds"),
    ],
)
def test_what_no_plan_can_be_made_for_is_refused_before_anything_runs(keywords, said):
    with pytest.raises(UsageError) as refused:
        memfit.plan(None, "1GiB", **keywords)
    assert str(refused.value).startswith(said)


def test_several_allowances_may_stand_between_commas():
    """As after `--allow`."""
    both = Options(allow="equivalent,shrink")
    assert (both.promise, both.allow_kinds) == ("equivalent", ["shrink"])
    assert both.allow_kinds == Options(allow=["equivalent", "shrink"]).allow_kinds
    with pytest.raises(UsageError, match="knows no `shrunk`"):
        Options(allow="equivalent,shrunk")


def test_keywords_replace_fields_of_the_options():
    exact = Options(forbid=["remat"], own_loop=True)
    wider = Options.of(exact, allow="equivalent")
    assert wider == Options(allow="equivalent", forbid=["remat"], own_loop=True)
    assert Options.of(None, allow="equivalent") == Options(allow="equivalent")
    with pytest.raises(UsageError, match=r"expected a `memfit\.Options`, got `str`"):
        Options.of("equivalent")


def test_options_and_keywords_give_the_same_plan():
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())))
    workload = memfit.Workload(
        model,
        torch.randn(64, 32),
        lambda net, batch: net(batch).square().mean(),
        lambda p: torch.optim.SGD(p, lr=0.1),
    )
    trace = memfit.trace(workload)
    options = Options(forbid=["fuse_optimizer"], gpu=None)
    kinds = {action.kind for action in memfit.plan(trace, "80%", options).actions}
    again = {action.kind for action in memfit.plan(trace, "80%", forbid=["fuse_optimizer"]).actions}
    assert kinds == again == {"remat"}


def test_a_gpu_whose_copies_nobody_knows_is_not_asked_for_again():
    from memfit._native import gpu_profile
    from memfit.plan.cost_source import offer

    with pytest.raises(UsageError) as refused:
        offer("cuda", "host", gpu_profile("RTX 4060"))
    first, hint = str(refused.value).splitlines()
    assert first.endswith("is not known: RTX 4060, from its datasheet, does not say")
    assert "`--costs FILE`" in hint
    assert offer("cuda", "host", gpu_profile("H100"))["write_bytes_per_second"] == 64e9
