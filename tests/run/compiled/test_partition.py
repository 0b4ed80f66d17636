"""Decisions on joint graphs, carried out: same numbers, and the peak that was said."""

import functools
import random

import pytest
import torch
from graphs import Convolutions, Transformer, images, run, run_by_torch, tokens
from torch import nn
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

from memfit.run.compiled import as_trace, block_boundaries, search
from memfit.run.compiled.inductor.op_costs import costs
from memfit.run.compiled.schedule import KEEP_ALL, Decision, schedule


def transformer(dropout=0.0, blocks=2):
    torch.manual_seed(0)
    return Transformer(blocks, dropout)


def convolutions():
    torch.manual_seed(0)
    return Convolutions()


def at_random(seed):
    """A decision with random drops and homes."""

    def decide(joint):
        draw = random.Random(seed)
        dropped = [s for s in joint.droppable() if draw.random() < draw.choice([0.3, 0.9])]
        homes = {
            s: draw.randint(joint.storages[s].op + 1, joint.forward_end)
            for s in dropped
            if draw.random() < 0.5
        }
        return Decision(frozenset(dropped), homes)

    return decide


def everything(joint):
    return Decision(frozenset(joint.droppable()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("build", "batch"), [(transformer, tokens), (convolutions, images)])
def test_the_predicted_peak_is_that_of_the_graphs_run_node_by_node(build, batch, seed):
    found = run(build(), batch(), at_random(seed))
    made = found.schedules[0]
    assert found.forward_peaks == [made.forward_peak_bytes]
    joint = found.joints[0]
    besides = returned_from_forward(joint, made) + inputs_unread_by_backward(joint, made)
    assert found.backward_peaks[0] + besides == made.backward_peak_bytes


class HandsOn(nn.Module):
    """Two graphs; backward of the first reads what it hands to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)

    def forward(self, x):
        passed = self.up(x).tanh()
        torch._dynamo.graph_break()
        return passed.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what crosses a break
@pytest.mark.parametrize("again", [False, True])
def test_what_a_graph_hands_on_is_saved_or_computed_again_once_nobody_holds_it(again):
    def released(joint):
        joint.release(range(len(joint.forward_outputs)))
        return everything(joint) if again else KEEP_ALL

    torch.manual_seed(0)
    model, batch = HandsOn(), (torch.randn(16, 8),)
    kept = run(model, batch, lambda _: KEEP_ALL)
    found = run(model, batch, released)
    assert all(map(torch.equal, kept.gradients, found.gradients))
    first, made = found.joints[0], found.schedules[0]
    (handed_on,) = first.forward_outputs
    assert (first.tensors[handed_on].op in made.recomputed) == again
    assert (handed_on in made.saved) == (not again)
    # Nothing that forward returned is there besides what backward reads.
    told = made.backward_peak_bytes - inputs_unread_by_backward(first, made)
    assert found.backward_peaks[-1] == told


def returned_from_forward(joint, made):
    """Outputs of forward are held by the caller during backward, outside the graph."""
    saved = made.saved
    held = {joint.tensors[t].storage for t in joint.forward_outputs}
    handed = {joint.tensors[t].storage for t in saved}
    return sum(joint.storages[s].bytes for s in held - handed if joint.storages[s].op >= 0)


def inputs_unread_by_backward(joint, made):
    """They live all the same: the model and the caller hold them."""
    read = {joint.tensors[t].storage for t in made.inputs}
    return sum(
        storage.bytes
        for index, storage in enumerate(joint.storages)
        if storage.op < 0 and index not in read
    )


@functools.cache
def of_keeping_everything(build, batch):
    """What running a model gives with nothing dropped, and its module buffers after it."""
    model = build()
    kept = run(model, batch(), lambda _: KEEP_ALL)
    return kept, list(model.buffers())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("build", "batch"),
    [(transformer, tokens), (lambda: transformer(0.3), tokens), (convolutions, images)],
    ids=["transformer", "dropout", "batch-norm"],
)
def test_gradients_are_bitwise_those_of_keeping_everything(build, batch, seed):
    model = build()
    kept, after = of_keeping_everything(build, batch)
    cut = run(model, batch(), at_random(seed))
    assert cut.schedules[0].recomputed != kept.schedules[0].recomputed
    assert torch.equal(cut.loss, kept.loss)
    assert all(map(torch.equal, cut.gradients, kept.gradients))
    assert all(map(torch.equal, model.buffers(), after))


def test_dropout_draws_once_and_its_gradients_are_those_of_torchs_own_partition():
    model = transformer(0.3, blocks=1)
    found = run(model, tokens(), everything, decomposed=False)
    joint, made = found.joints[0], found.schedules[0]
    draws = {i for i, op in enumerate(joint.ops) if "dropout" in str(op.node.target)}
    draws = {i for i in draws if not joint.ops[i].backward}
    assert draws
    assert not draws.intersection(made.recomputed)
    expected = run_by_torch(model, tokens(), default_partition)
    assert torch.equal(found.loss, expected.loss)
    assert all(map(torch.equal, found.gradients, expected.gradients))


@functools.cache
def deep(blocks, batch):
    """The graph of a transformer, which is only read."""
    return run(transformer(blocks=blocks), tokens(batch), lambda _: KEEP_ALL).joints[0]


@functools.cache
def least_of(blocks, batch):
    """What is chosen for no bytes at all."""
    return search.choose(deep(blocks, batch), 0)


def test_less_target_never_means_more_peak():
    joint = deep(4, 4)
    full = schedule(joint, KEEP_ALL).peak_bytes
    chosen = [search.choose(joint, full * percent // 100) for percent in range(100, 0, -10)]
    peaks = [one.peak_bytes for one in chosen]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] <= full
    least = peaks[-1]
    for one, percent in zip(chosen, range(100, 0, -10), strict=True):
        assert one.peak_bytes <= max(full * percent // 100, least)


@pytest.mark.parametrize("fraction", [0.3, 0.1])
def test_boundaries_reach_lower_than_torchs_own_budget(fraction):
    least = least_of(6, 16)
    with torch._functorch.config.patch(activation_memory_budget=fraction):
        torchs = run_by_torch(
            transformer(blocks=6), tokens(16), min_cut_rematerialization_partition
        )
    assert least.peak_bytes < max(torchs.forward_peaks + torchs.backward_peaks)


def test_the_engines_plan_of_a_graph_keeps_its_budget_here():
    joint = deep(4, 16)
    full = schedule(joint, KEEP_ALL).peak_bytes
    target = joint.input_bytes + (full - joint.input_bytes) * 7 // 10
    decision = as_trace.plan(joint, costs(joint), target)
    assert decision.dropped
    assert decision.dropped <= set(joint.droppable())
    assert schedule(joint, decision).peak_bytes <= full


def test_narrow_places_of_a_chain_are_its_block_boundaries():
    joint = deep(4, 16)
    places = block_boundaries.narrow_places(joint, 1.01)
    assert len(places) >= 8  # two residual sums a block
    residual_stream = 16 * 32 * 16 * 4
    assert all(crossing(joint, p) <= residual_stream * 1.01 for p in places)


def crossing(joint, position):
    return sum(s.bytes for s in joint.storages if 0 <= s.op < position <= s.last_forward)


def test_a_size_marked_dynamic_is_planned_by_its_hint_and_runs_at_others():
    model, batch = transformer(0.0), tokens(6)
    for tensor in batch:
        torch._dynamo.mark_dynamic(tensor, 0)
    found = run(model, batch, everything)
    assert found.joints[0].symbols
    fixed = run(model, tokens(6), everything)
    assert found.schedules[0].backward_peak_bytes == pytest.approx(
        fixed.schedules[0].backward_peak_bytes, rel=0.02
    )
    for ours, expected in zip(found.gradients, fixed.gradients, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_what_reads_an_input_that_the_graph_writes_to_is_not_run_again():
    found = run(convolutions(), images(), everything)
    joint, made = found.joints[0], found.schedules[0]
    written = {op.node.args[0] for op in joint.ops if str(op.node.target) == "aten.copy_.default"}
    again = {node for i in made.recomputed for node in joint.ops[i].node.all_input_nodes}
    assert not written & again
