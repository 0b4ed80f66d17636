//! Small traces for the engine's own tests.

use super::{
    Allocation, AllocationId, Category, Inference, Meta, Op, OpIndex, ParameterUpdate, Phase,
    SavedTensor, Trace, Value, ValueId,
};
use crate::bytes::Bytes;

/// Builds traces op by op the way a capture would, deriving natural ranges from the uses.
pub(crate) struct Builder {
    pub(crate) trace: Trace,
}

impl Builder {
    pub(crate) fn new(batch: u64) -> Self {
        let meta = Meta {
            target: "sample".into(),
            torch_version: "2.15.0".into(),
            device_kind: "cpu".into(),
            optimizer: "SGD".into(),
            batch,
            second_batch: 0,
            training: true,
            captured: "fake".into(),
            probe_threads: 0,
            probed_batch: 0,
            fused_optimizer_refusal: None,
            micro_batch_refusal: None,
            per_parameter_refusal: None,
            eight_bit_refusal: None,
            half_parameters: false,
            offloaded_parameters_refusal: None,
            loss_reduction: "mean".into(),
            fixed_parameters: Vec::new(),
            inference: None,
            checkpoints: None,
            notes: Vec::new(),
        };
        let trace = Trace {
            meta,
            devices: vec!["cpu".into()],
            strings: vec![String::new(), "float32".into()],
            allocations: Vec::new(),
            values: Vec::new(),
            ops: Vec::new(),
            saved: Vec::new(),
            regions: Vec::new(),
            updates: Vec::new(),
            couplings: None,
            alternatives: None,
            pieces: Vec::new(),
        };
        Self { trace }
    }

    pub(crate) fn string(&mut self, text: &str) -> u32 {
        let found = self.trace.strings.iter().position(|s| s == text);
        u32::try_from(found.unwrap_or_else(|| {
            self.trace.strings.push(text.to_owned());
            self.trace.strings.len() - 1
        }))
        .unwrap()
    }

    pub(crate) fn allocation(&mut self, shape: &[u64], category: Category, start: u32) -> ValueId {
        let bytes = Bytes(shape.iter().product::<u64>() * 4);
        let id = AllocationId(u32::try_from(self.trace.allocations.len()).unwrap());
        self.trace.allocations.push(Allocation {
            bytes,
            device: 0,
            category,
            producer: None,
            natural: vec![(OpIndex(start), OpIndex(start + 1))],
            name: 0,
            law: None,
        });
        self.value(id, 0, shape)
    }

    pub(crate) fn value(
        &mut self,
        allocation: AllocationId,
        version: u32,
        shape: &[u64],
    ) -> ValueId {
        self.trace.values.push(Value {
            allocation,
            version,
            offset: 0,
            shape: shape.to_vec(),
            stride: vec![1; shape.len()],
            dtype: 1,
            shape_per_item: Vec::new(),
        });
        ValueId(u32::try_from(self.trace.values.len() - 1).unwrap())
    }

    /// Appends an op that reads `reads` and makes one fresh output of `shape`.
    pub(crate) fn op(
        &mut self,
        name: &str,
        phase: Phase,
        reads: &[ValueId],
        shape: &[u64],
    ) -> ValueId {
        let index = u32::try_from(self.trace.ops.len()).unwrap();
        let category = if phase == Phase::Forward {
            Category::Activation
        } else {
            Category::Temporary
        };
        let output = self.allocation(shape, category, index);
        let allocation = self.trace.allocation_of(output);
        self.trace.allocations[allocation.index()].producer = Some(OpIndex(index));
        self.push(name, phase, reads, &[], &[output]);
        output
    }

    /// Appends an op that writes to `target` in place and returns it.
    pub(crate) fn op_in_place(
        &mut self,
        name: &str,
        phase: Phase,
        target: ValueId,
        reads: &[ValueId],
    ) -> ValueId {
        let before = self.trace.values[target.index()].clone();
        let after = self.value(before.allocation, before.version + 1, &before.shape);
        let mut all = vec![target];
        all.extend_from_slice(reads);
        self.push(name, phase, &all, &[after], &[after]);
        after
    }

    pub(crate) fn push(
        &mut self,
        name: &str,
        phase: Phase,
        reads: &[ValueId],
        writes: &[ValueId],
        outputs: &[ValueId],
    ) {
        let index = u32::try_from(self.trace.ops.len()).unwrap();
        for &value in reads.iter().chain(outputs) {
            self.keep_until(value, index + 1);
        }
        let moved = reads.iter().chain(outputs);
        let moved = moved
            .map(|&v| self.trace.values[v.index()].numel() * 4)
            .sum();
        let shape_only = name.starts_with("aten.empty_like");
        let name = self.string(name);
        self.trace.ops.push(Op {
            name,
            phase,
            module: 0,
            source: 0,
            arguments: 0,
            arguments_vary: false,
            node: None,
            reads: reads.to_vec(),
            writes: writes.to_vec(),
            outputs: outputs.to_vec(),
            flops: 0,
            moved_bytes: Bytes(moved),
            flops_per_item: 0,
            moved_bytes_per_item: 0,
            workspace_bytes: Bytes::ZERO,
            workspace_per_item: None,
            random: false,
            view: false,
            replayable: true,
            shape_only,
        });
    }

    /// Extends the last natural range of a value's allocation.
    pub(crate) fn keep_until(&mut self, value: ValueId, position: u32) {
        let allocation = self.trace.allocation_of(value);
        let range = self.trace.allocations[allocation.index()]
            .natural
            .last_mut()
            .unwrap();
        range.1 = range.1.max(OpIndex(position));
    }

    pub(crate) fn save(&mut self, value: ValueId, pack: u32, unpack: u32, release: u32) {
        let node = u32::try_from(self.trace.saved.len()).unwrap();
        let (pack, unpack, release) = (OpIndex(pack), Some(OpIndex(unpack)), OpIndex(release));
        self.trace.saved.push(SavedTensor {
            value,
            node,
            pack,
            unpack,
            release,
        });
    }

    pub(crate) fn finish(mut self) -> Trace {
        let end = u32::try_from(self.trace.ops.len()).unwrap();
        for allocation in &mut self.trace.allocations {
            if allocation.producer.is_none() {
                allocation.natural = vec![(OpIndex(0), OpIndex(end))];
            }
        }
        assert_eq!(self.trace.check(), Ok(()));
        self.trace
    }
}

/// `log_softmax(float(view(x @ t(weight))))` over some rows, with something between product and loss.
pub(crate) fn loss_over_classes(rows: u64, between: Option<&str>) -> Trace {
    let mut builder = Builder::new(rows);
    let weight = builder.allocation(&[100, 8], Category::Parameter, 0);
    let own = builder.trace.allocation_of(weight);
    builder.trace.allocations[own.index()].name = builder.string("head.weight");
    let input = builder.allocation(&[rows, 8], Category::Input, 0);
    let turned = builder.value(own, 0, &[8, 100]);
    let shape = [rows, 100];
    let forward = Phase::Forward;
    let mut logits = builder.op("aten.mm.default", forward, &[input, turned], &shape);
    if let Some(name) = between {
        logits = builder.op(name, forward, &[logits], &shape);
    }
    let wide = builder.op("aten._to_copy.default", forward, &[logits], &shape);
    builder.op("aten._log_softmax.default", forward, &[wide], &shape);
    builder.finish()
}

/// A forward of inference, recorded at this batch size and at half of it: rows of 800 numbers, of which 8 are returned.
pub(crate) fn inference(batch: u64) -> Trace {
    let record = |batch: u64| {
        let mut builder = Builder::new(batch);
        builder.trace.meta.training = false;
        builder.trace.meta.optimizer.clear();
        builder.trace.meta.loss_reduction.clear();
        let widen = builder.allocation(&[8, 800], Category::Parameter, 0);
        let narrow = builder.allocation(&[800, 8], Category::Parameter, 0);
        let input = builder.allocation(&[batch, 8], Category::Input, 0);
        let forward = Phase::Forward;
        let wide = builder.op("aten.mm.default", forward, &[input, widen], &[batch, 800]);
        let active = builder.op("aten.relu.default", forward, &[wide], &[batch, 800]);
        let again = builder.op("aten.tanh.default", forward, &[active], &[batch, 800]);
        let result = builder.op("aten.mm.default", forward, &[again, narrow], &[batch, 8]);
        let end = u32::try_from(builder.trace.ops.len()).unwrap();
        builder.keep_until(result, end);
        builder.trace.meta.inference = Some(Inference {
            returns: vec![result],
            is_model_call: true,
            has_graph: false,
        });
        builder.finish()
    };
    record(batch).with_second(&record(batch / 2)).unwrap()
}

/// `x -> a -> b -> c -> loss`, each of the three saved by the op that reads it, backward in reverse.
pub(crate) fn chain() -> Trace {
    batched_chain(4)
}

/// [`chain`] at a batch size: rows of 8 floats.
pub(crate) fn batched_chain(batch: u64) -> Trace {
    let mut builder = Builder::new(batch);
    let shape = [batch, 8];
    let weight = builder.allocation(&[8, 8], Category::Parameter, 0);
    let input = builder.allocation(&shape, Category::Input, 0);
    let a = builder.op("aten.mm.default", Phase::Forward, &[input, weight], &shape);
    let b = builder.op("aten.gelu.default", Phase::Forward, &[a], &shape);
    let c = builder.op("aten.sin.default", Phase::Forward, &[b], &shape);
    let loss = builder.op("aten.mean.default", Phase::Forward, &[c], &[]);
    builder.save(a, 1, 6, 7);
    builder.save(b, 2, 5, 6);
    let seed = builder.op("aten.ones_like.default", Phase::Backward, &[loss], &[]);
    let gc = builder.op(
        "aten.cos_backward.default",
        Phase::Backward,
        &[seed],
        &shape,
    );
    let ga = builder.op("aten.gelu_backward.default", Phase::Backward, &[gc], &shape);
    let gw = builder.op("aten.mm.default", Phase::Backward, &[ga, input], &[8, 8]);
    let parameter = builder.trace.allocation_of(weight);
    let gradient = builder.trace.allocation_of(gw);
    builder.trace.allocations[gradient.index()].category = Category::Gradient;
    builder.op_in_place("aten.add_.Tensor", Phase::Optimizer, weight, &[gw]);
    builder.keep_until(gw, 9);
    builder.trace.updates.push(ParameterUpdate {
        parameter,
        gradient,
        ready: OpIndex(8),
        temporary_bytes: Bytes(0),
        moved_bytes: Bytes(768),
        state: Vec::new(),
    });
    builder.finish()
}
