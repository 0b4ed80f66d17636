//! Programs of steps: training and inference, with a leak and without.
//!
//! Responsible for what people keep by mistake, and for what looks like it: sizes that differ from step to
//! step, states that come late, lists that are emptied.

use super::program::{MIB, Program};
use super::scenario::of;
use crate::allocator::BlockId;
use crate::snapshot::StackIndex;

const MODULE: &str = "/x/torch/nn/modules/module.py:1790 _call_impl";
const ENGINE: &str = "?? torch::autograd::Engine::evaluate_function(x)";
/// A list that is emptied holds at most so many steps; a recording that ends before shows a leak's picture.
const MAX_LISTED: u64 = 2;

/// What a loop keeps by mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leak {
    Nothing,
    /// The loss of every step.
    Loss,
    /// Every step's graph, through its loss.
    Graph,
    /// An output a step, in a list.
    Outputs,
    /// What a hook in the model collects.
    Hook,
    /// One tensor that is put together anew, larger each time.
    Longer,
}

/// What looks like a leak and is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoy {
    Nothing,
    /// Batches of other sizes, the last of which lives on.
    Batches,
    /// Experts that are used late: their states come late.
    Experts,
    /// A list that is emptied every few steps.
    List,
    /// A table as long as the longest batch so far.
    Table,
    /// Batches fetched ahead, one or two.
    Fetch,
}

struct Stacks {
    layers: Vec<StackIndex>,
    inner: StackIndex,
    loss: StackIndex,
    node: StackIndex,
    accumulate: StackIndex,
    state: StackIndex,
    scratch: StackIndex,
    batch: StackIndex,
    list: StackIndex,
    hook: StackIndex,
    table: StackIndex,
}

impl Stacks {
    fn of(it: &mut Program, layers: u64) -> Self {
        // Layers of a loop share their lines; written out, each has its own.
        let is_written_out = it.one_in(2);
        let mut layer = |n: u64| {
            let line = format!(
                "model.py:{} forward",
                10 + if is_written_out { n } else { 0 }
            );
            it.stack(&[
                &line,
                MODULE,
                "model.py:3 forward",
                MODULE,
                "train.py:40 main",
            ])
        };
        let layers = (0..layers).map(&mut layer).collect();
        Self {
            layers,
            inner: it.stack(&[
                "/x/torch/nn/functional.py:9 gelu",
                "model.py:3 forward",
                MODULE,
                "train.py:40 main",
            ]),
            loss: it.stack(&[
                "python_variable_methods.cpp torch::autograd::THPVariable_add(x)",
                "train.py:41 main",
            ]),
            node: it.stack(&[
                "?? torch::autograd::generated::MmBackward0::apply(x)",
                ENGINE,
            ]),
            accumulate: it.stack(&["?? torch::autograd::AccumulateGrad::apply(x)", ENGINE]),
            state: it.stack(&["/x/torch/optim/adam.py:9 step", "train.py:44 main"]),
            scratch: it.stack(&["/x/torch/optim/adam.py:12 step", "train.py:44 main"]),
            batch: it.stack(&[
                "/x/torch/utils/data/_utils/collate.py:3 default_collate",
                "train.py:39 main",
            ]),
            list: it.stack(&["train.py:50 main"]),
            hook: it.stack(&[
                "hooks.py:7 keep",
                "model.py:12 forward",
                MODULE,
                "train.py:40 main",
            ]),
            table: it.stack(&[
                "rope.py:7 forward",
                MODULE,
                "model.py:3 forward",
                MODULE,
                "train.py:40 main",
            ]),
        }
    }
}

/// What lives on from step to step.
#[derive(Default)]
struct State {
    last_batch: Option<BlockId>,
    table: (u64, Option<BlockId>),
    longer: (u64, Option<BlockId>),
    list: Vec<Option<BlockId>>,
    fetched: Vec<Option<BlockId>>,
    gradients: Vec<Option<BlockId>>,
}

/// How a loop goes.
struct Loop {
    stacks: Stacks,
    state: State,
    leak: Leak,
    decoy: Decoy,
    mib: u64,
    /// The leak leaves such steps out.
    every: u64,
    keeps_gradients: bool,
    has_optimizer: bool,
    marks: Option<&'static str>,
}

/// Forward, backward, the optimizer's step.
pub(super) fn train(it: &mut Program) {
    const LEAKS: [Leak; 8] = [
        Leak::Nothing,
        Leak::Nothing,
        Leak::Nothing,
        Leak::Loss,
        Leak::Graph,
        Leak::Outputs,
        Leak::Hook,
        Leak::Longer,
    ];
    let marks = [
        None,
        None,
        Some("Optimizer.step#Adam.step"),
        Some("ProfilerStep#1"),
    ];
    let mut run = Loop::new(it, &LEAKS);
    run.has_optimizer = !it.one_in(6);
    run.marks = of(&mut it.random, &marks);
    run.go(it);
}

/// Forward alone.
pub(super) fn infer(it: &mut Program) {
    const LEAKS: [Leak; 5] = [
        Leak::Nothing,
        Leak::Nothing,
        Leak::Outputs,
        Leak::Hook,
        Leak::Longer,
    ];
    let mut run = Loop::new(it, &LEAKS);
    run.has_optimizer = false;
    run.marks = of(&mut it.random, &[None, Some("ProfilerStep#1")]);
    let steps = it.between(0, 12);
    for n in 0..steps {
        run.mark(it, true);
        let batch = run.batch(it);
        let outputs = run.forward(it);
        it.free_all(outputs);
        run.keep(it, n, None);
        run.finish(it, batch);
        run.mark(it, false);
    }
}

impl Loop {
    fn new(it: &mut Program, leaks: &[Leak]) -> Self {
        const DECOYS: [Decoy; 7] = [
            Decoy::Nothing,
            Decoy::Nothing,
            Decoy::Batches,
            Decoy::Experts,
            Decoy::List,
            Decoy::Table,
            Decoy::Fetch,
        ];
        let layers = it.between(1, 5);
        let stacks = Stacks::of(it, layers);
        let leak = of(&mut it.random, leaks);
        let run = Self {
            leak,
            decoy: of(&mut it.random, &DECOYS),
            mib: it.between(1, 14),
            every: if it.one_in(4) { it.between(2, 2) } else { 1 },
            keeps_gradients: it.one_in(3),
            has_optimizer: true,
            marks: None,
            state: State::default(),
            stacks,
        };
        run.confess(it);
        run
    }

    /// What the program keeps: the truth that explanations are checked against.
    fn confess(&self, it: &mut Program) {
        let stacks = &self.stacks;
        let kept = &mut it.kept;
        match self.leak {
            Leak::Nothing => {}
            Leak::Loss => {
                kept.stacks.insert(stacks.loss);
                kept.has_scalar = true;
            }
            Leak::Graph => {
                kept.stacks.extend(&stacks.layers);
                kept.stacks.insert(stacks.loss);
                kept.has_graph = true;
                kept.has_scalar = true;
            }
            Leak::Outputs | Leak::Longer => {
                kept.stacks.insert(stacks.list);
            }
            Leak::Hook => {
                kept.stacks.insert(stacks.hook);
            }
        }
        kept.rises = self.leak != Leak::Nothing || self.decoy == Decoy::Experts;
    }

    fn go(mut self, it: &mut Program) {
        let steps = it.between(0, 12);
        for n in 0..steps {
            if self.marks == Some("ProfilerStep#1") {
                self.mark(it, true);
            }
            let batch = self.batch(it);
            let activations = self.forward(it);
            let loss = it.malloc(4, self.stacks.loss);
            let keeps_graph = self.leak == Leak::Graph && n.is_multiple_of(self.every);
            if !keeps_graph {
                self.backward(it, &activations);
            }
            if self.has_optimizer {
                self.optimizer_step(it, n);
            }
            self.keep(it, n, loss);
            self.finish(it, batch);
        }
    }

    fn mark(&self, it: &mut Program, is_start: bool) {
        if let Some(name) = self.marks {
            it.annotate(name, is_start);
        }
    }

    fn batch(&mut self, it: &mut Program) -> Option<BlockId> {
        let mib = match self.decoy {
            Decoy::Batches | Decoy::Table => it.between(1, 40),
            _ => self.mib,
        };
        if self.decoy == Decoy::Table && mib > self.state.table.0 {
            let longer = it.malloc(mib * MIB, self.stacks.table);
            it.free(self.state.table.1.take());
            self.state.table = (mib, longer);
        }
        if self.decoy == Decoy::Fetch {
            while self.state.fetched.len() < 2 {
                self.state
                    .fetched
                    .push(it.malloc(mib * MIB, self.stacks.batch));
                if it.one_in(2) {
                    break;
                }
            }
            return self.state.fetched.remove(0);
        }
        let batch = it.malloc(mib * MIB, self.stacks.batch);
        if self.decoy == Decoy::Batches {
            // The name in the loop holds the last one until it has the next.
            it.free(self.state.last_batch.take());
            self.state.last_batch = batch;
            return None;
        }
        batch
    }

    fn forward(&mut self, it: &mut Program) -> Vec<Option<BlockId>> {
        let layers = self.stacks.layers.clone();
        let mut activations = Vec::new();
        for stack in layers {
            activations.push(it.malloc(self.mib * MIB, stack));
            let inner = it.malloc(2 * self.mib * MIB, self.stacks.inner);
            it.free(inner);
        }
        activations
    }

    fn backward(&mut self, it: &mut Program, activations: &[Option<BlockId>]) {
        let is_first = self.state.gradients.is_empty();
        for &activation in activations.iter().rev() {
            let temporary = it.malloc(3 * self.mib * MIB / 2, self.stacks.node);
            if is_first {
                let gradient = it.malloc(self.mib * MIB, self.stacks.accumulate);
                self.state.gradients.push(gradient);
            }
            it.free(activation);
            it.free(temporary);
        }
    }

    fn optimizer_step(&mut self, it: &mut Program, n: u64) {
        self.mark_optimizer(it, true);
        let scratch = it.malloc(self.mib * MIB, self.stacks.scratch);
        if n == 0 || self.decoy == Decoy::Experts {
            it.malloc(self.mib * MIB, self.stacks.state);
        }
        it.free(scratch);
        self.mark_optimizer(it, false);
        if !self.keeps_gradients {
            it.free_all(std::mem::take(&mut self.state.gradients));
        }
    }

    fn mark_optimizer(&self, it: &mut Program, is_start: bool) {
        if self.marks.is_some_and(|name| name.starts_with("Optimizer")) {
            self.mark(it, is_start);
        }
    }

    /// What the loop keeps of a step, by mistake or not; what else is left is let go.
    fn keep(&mut self, it: &mut Program, n: u64, loss: Option<BlockId>) {
        let keeps = n.is_multiple_of(self.every);
        match self.leak {
            Leak::Loss | Leak::Graph if keeps => {}
            _ => it.free(loss),
        }
        match self.leak {
            Leak::Outputs if keeps => {
                let bytes = it.between(1, 3) * MIB;
                it.malloc(bytes, self.stacks.list);
            }
            Leak::Hook if keeps => {
                it.malloc(3 * MIB, self.stacks.hook);
            }
            Leak::Longer if keeps => {
                let (mib, before) = self.state.longer;
                let longer = it.malloc((mib + 2) * MIB, self.stacks.list);
                it.free(before);
                self.state.longer = (mib + 2, longer);
            }
            _ => {}
        }
        if self.decoy == Decoy::List {
            let log = it.stack(&["log.py:5 add", "train.py:60 main"]);
            self.state.list.push(it.malloc(MIB, log));
            if self.state.list.len() as u64 > MAX_LISTED {
                it.free_all(std::mem::take(&mut self.state.list));
            }
        }
    }

    fn finish(&mut self, it: &mut Program, batch: Option<BlockId>) {
        it.free(batch);
        if !self.has_optimizer && !self.keeps_gradients {
            it.free_all(std::mem::take(&mut self.state.gradients));
        }
    }
}
