"""A student and its teacher in one step: what it computes, what it takes, and what it refuses."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import DoesNotFit, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.workload import Workload

WIDTH, CLASSES, ROWS = 64, 40, 32
NOTHING = ("remat", "unneeded_saves", "fuse_optimizer", "one_by_one", "micro_batch", "chunk")


class Network(nn.Module):
    """Layers with dropout, so that a teacher in training would be found out."""

    def __init__(self, width, layers):
        super().__init__()
        sizes = [WIDTH, *[width] * layers]
        self.body = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.2))
                for a, b in pairwise(sizes)
            ]
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def pair(width=512, layers=4, **student):
    torch.manual_seed(0)
    batch = (torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    given = {
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **student,
    }
    teacher = Workload(Network(width, layers), batch[0])
    return teacher, Workload(Network(WIDTH, 2), batch, **given)


def by_hand(teacher, student, temperature, alpha):
    """The loss and the student's gradients as one would write them."""
    x, y = student.batch
    teacher.model.eval()
    with torch.no_grad():
        aim = teacher.model(x)
    out = student.model(x)
    soft = F.kl_div(
        F.log_softmax(out / temperature, 1),
        F.log_softmax(aim / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )
    loss = alpha * F.cross_entropy(out, y) + (1 - alpha) * soft * temperature**2
    return loss, torch.autograd.grad(loss, list(student.model.parameters()))


@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.0), (2.0, 0.5), (4.0, 0.9)])
def test_loss_and_gradients_are_those_written_by_hand(temperature, alpha):
    teacher, student = pair()
    torch.manual_seed(1)
    expected, gradients = by_hand(teacher, student, temperature, alpha)
    step = memfit.distil(teacher, student, temperature=temperature, alpha=alpha)
    torch.manual_seed(1)
    loss = step.loss(step.model, step.batch)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(student.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_the_teacher_stays_as_it_was_and_in_evaluation():
    teacher, student = pair()
    before = [parameter.detach().clone() for parameter in teacher.model.parameters()]
    step = memfit.distil(teacher, student)
    step.model.train()
    assert student.model.training
    assert not any(module.training for module in teacher.model.modules())
    with memfit.fit(step, "110%") as fitted:
        first = fitted.step().item()
        for _ in range(20):
            last = fitted.step().item()
    assert last < first
    assert all(map(torch.equal, before, teacher.model.parameters()))
    x = student.batch[0]
    step.model.eval()
    assert torch.equal(step.model(x), student.model(x))


@pytest.mark.parametrize("optimizer", [None, "an instance"])
def test_it_is_a_workload_like_any_other(optimizer):
    teacher, student = pair()
    if optimizer:
        student.optimizer = torch.optim.AdamW(student.model.parameters())
    step = memfit.distil(teacher, student)
    found = memfit.verify(step, "110%", steps=1)
    assert found.holds
    assert found.gradients.agreement == "bitwise"
    with memfit.fit(step, "110%") as fitted:
        fitted.step()
        measured = measure_peak(fitted.step, static_tensors(step, fitted.optimizer))
    assert memfit.predict(step).predicted_peak_bytes == measured.peak_bytes


def naive(width):
    """The same step with a graph of the teacher, and gradients of its parameters."""
    teacher, student = pair(width)
    model = nn.ModuleDict({"student": student.model, "teacher": teacher.model})

    def loss(model, batch):
        aim, out = model["teacher"](batch[0]), model["student"](batch[0])
        soft = F.kl_div(
            out.log_softmax(1), aim.log_softmax(1), reduction="batchmean", log_target=True
        )
        return F.cross_entropy(out, batch[1]) + soft

    def optimizer(parameters):
        return torch.optim.SGD(list(parameters)[: len(list(student.model.parameters()))], lr=0.1)

    return Workload(model, student.batch, loss, optimizer)


@pytest.mark.offloads_parameters
def test_both_fit_into_35_percent_of_the_naive_peak(tmp_path):
    unaided = memfit.predict(naive(1024)).predicted_peak_bytes
    budget = int(0.35 * unaided)
    step = memfit.distil(*pair(1024), budget=budget, offload=tmp_path)
    assert memfit.predict(step).predicted_peak_bytes > budget
    found = memfit.verify(step, budget, steps=1, offload=tmp_path)
    assert found.holds
    assert found.loss.agreement == found.gradients.agreement == "bitwise"
    planned = found.as_dict()["planned"]
    assert planned["measured_peak_bytes"] <= budget


def narrowed(budget, allow, layers=4):
    teacher, student = pair(layers=layers)
    step = memfit.distil(teacher, student, budget, allow=allow, forbid=NOTHING)
    return teacher, step


def test_a_teacher_is_narrowed_with_leave_alone_and_only_where_it_must():
    teacher, _ = narrowed("101%", ["half_teacher"])
    assert next(teacher.model.parameters()).dtype is torch.float32
    with pytest.raises(DoesNotFit) as caught:
        narrowed("70%", "exact")
    assert caught.value.__notes__ == ['`allow="approximate"` may hold the teacher in fewer bits']
    teacher, step = narrowed("70%", "half_teacher")
    assert {parameter.dtype for parameter in teacher.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in step.model.student.parameters()} == {torch.float32}
    exact, whole = narrowed("101%", "exact")
    torch.manual_seed(1)
    near = step.loss(step.model, step.batch)
    torch.manual_seed(1)
    torch.testing.assert_close(near, whole.loss(whole.model, whole.batch), rtol=1e-2, atol=1e-3)
    found = memfit.verify(step, "101%", steps=1)
    measured = found.as_dict()["unplanned"]["measured_peak_bytes"]
    assert memfit.predict(step).predicted_peak_bytes == measured
    del exact


def test_a_teacher_goes_to_8_bits_where_half_does_not_do():
    pytest.importorskip("torchao.quantization", reason="needs torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        teacher, step = narrowed("45%", ["half_teacher", "int8_teacher"], layers=10)
    assert type(teacher.model.head.weight).__name__ == "Int8Tensor"
    found = memfit.verify(step, "101%", steps=1)
    measured = found.as_dict()["unplanned"]["measured_peak_bytes"]
    assert memfit.predict(step).predicted_peak_bytes == measured


def test_where_nothing_fits_the_teacher_is_as_before():
    teacher, student = pair()
    own = list(teacher.model.parameters())
    with pytest.raises(DoesNotFit) as caught:
        memfit.distil(teacher, student, "5%", allow="half_teacher", forbid=NOTHING)
    assert caught.value.minimum_peak_bytes > 0
    assert all(a is b for a, b in zip(own, teacher.model.parameters(), strict=True))
    assert all(parameter.dtype is torch.float32 for parameter in own)
    assert all(parameter.requires_grad for parameter in own)
    assert all(module.training for module in teacher.model.modules())


class Output:
    def __init__(self, scores):
        self.scores = scores


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Output(self.inner(x))


def test_logits_are_found_where_they_are_said_to_be():
    teacher, student = pair()
    teacher = Workload(Wrapped(teacher.model), teacher.batch)
    with pytest.raises(UsageError, match=r"no logits are found in a `Output`: say where"):
        memfit.predict(memfit.distil(teacher, student))
    step = memfit.distil(teacher, student, logits=lambda out: getattr(out, "scores", out))
    assert memfit.predict(step).predicted_peak_bytes > 0


def test_a_teachers_own_forward_gets_the_whole_batch():
    teacher, student = pair()
    seen = []

    def forward(model, batch):
        seen.append(len(batch))
        return model(batch[0])

    step = memfit.distil(Workload(teacher.model, None, forward=forward), student)
    step.loss(step.model, step.batch)
    assert seen == [2]


def test_what_cannot_be_distilled_is_refused():
    teacher, student = pair()
    cases = [
        ({"temperature": 0.0}, student, "`temperature=0.0`: it must be above 0"),
        ({"alpha": 1.0}, student, "`alpha=1.0`: it must be from 0 to below 1"),
        ({}, Workload(student.model, student.batch), "the student's workload has no `loss`"),
        (
            {},
            Workload(teacher.model, student.batch, student.loss),
            r"the teacher shares `body\.0\.0\.weight` with the student",
        ),
        ({"allow": "int4_teacher"}, student, "`allow` knows no `int4_teacher`"),
    ]
    for settings, of, message in cases:
        with pytest.raises(UsageError, match=message):
            memfit.distil(teacher, of, **settings)

    def twice(model, batch):
        return model(batch[0]).mean() + model(batch[0]).mean()

    step = memfit.distil(teacher, Workload(student.model, student.batch, twice))
    with pytest.raises(UsageError, match="calls the student 2 times: call it once"):
        memfit.predict(step)
    other = Workload(nn.Linear(WIDTH, 3), student.batch[0])
    step = memfit.distil(other, student)
    with pytest.raises(UsageError, match=r"logits are \(32, 3\), the student's \(32, 40\)"):
        memfit.predict(step)
