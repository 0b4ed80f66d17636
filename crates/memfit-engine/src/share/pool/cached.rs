//! What the allocator of a device keeps of calls that have ended.
//!
//! Responsible for bytes that no call uses any more and that the device lacks all the same: PyTorch's caching
//! allocator keeps freed blocks for requests of their sizes. Not responsible for what calls use now, nor for
//! when to have the blocks given back ([`super::Machine`]).
//!
//! Counted as if each model's calls had blocks of their own: what they took together at the most since the
//! last release. The next call of the same model finds those again and counts only what goes beyond. A
//! release gives back all but what runs; what begins while it runs counts as kept after it.

use std::collections::BTreeMap;

use super::ModelId;
use crate::bytes::Bytes;

/// What calls of each model take together now; none for models without calls.
pub(super) type Running = BTreeMap<ModelId, Bytes>;

/// By model, the most that its calls took at a time.
#[derive(Debug, Default)]
pub(super) struct Cached {
    most: Running,
    /// The same from the beginning of a release that has not ended.
    fresh: Option<Running>,
}

impl Cached {
    /// Calls of a model take so much together now.
    pub(super) fn took(&mut self, model: ModelId, running: Bytes) {
        for most in [Some(&mut self.most), self.fresh.as_mut()]
            .into_iter()
            .flatten()
        {
            let most = most.entry(model).or_default();
            *most = running.max(*most);
        }
    }

    /// What counts beyond what runs.
    pub(super) fn idle(&self, running: &Running) -> Bytes {
        let most = self.most.iter();
        most.map(|(model, &most)| most - of(running, *model)).sum()
    }

    /// What a call counts more than is counted already.
    pub(super) fn more(&self, running: &Running, model: ModelId, activations: Bytes) -> Bytes {
        let now = of(running, model);
        now + activations - now.max(of(&self.most, model))
    }

    /// What a release frees, or the one that has begun will: all that is neither in `running` nor taken since
    /// it began.
    pub(super) fn gain(&self, running: &Running) -> Bytes {
        let stays = |model| {
            let fresh = self.fresh.as_ref().map_or(Bytes::ZERO, |it| of(it, model));
            fresh.max(of(running, model))
        };
        let most = self.most.iter();
        most.map(|(&model, &most)| most - stays(model)).sum()
    }

    pub(super) const fn is_releasing(&self) -> bool {
        self.fresh.is_some()
    }

    pub(super) fn begin_release(&mut self, running: Running) {
        self.fresh = Some(running);
    }

    pub(super) fn released(&mut self) {
        if let Some(fresh) = self.fresh.take() {
            self.most = fresh;
        }
    }
}

fn of(bytes: &Running, model: ModelId) -> Bytes {
    bytes.get(&model).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ModelId = ModelId(0);
    const B: ModelId = ModelId(1);

    #[test]
    fn a_call_finds_again_what_its_model_left_and_a_release_leaves_what_runs() {
        let mut kept = Cached::default();
        let none = Running::new();
        kept.took(A, Bytes(10));
        kept.took(B, Bytes(4));
        assert_eq!(kept.idle(&none), Bytes(14));
        assert_eq!(kept.more(&none, A, Bytes(10)), Bytes::ZERO);
        let one = Running::from([(A, Bytes(10))]);
        assert_eq!(kept.idle(&one), Bytes(4));
        assert_eq!(kept.more(&one, A, Bytes(7)), Bytes(7));
        assert_eq!(kept.more(&one, B, Bytes(7)), Bytes(3));
        assert_eq!(kept.gain(&one), Bytes(4));
        kept.begin_release(one.clone());
        // A call that begins now may have taken new blocks.
        kept.took(B, Bytes(1));
        assert_eq!(kept.gain(&one), Bytes(3));
        assert_eq!(kept.idle(&none), Bytes(14));
        kept.released();
        assert_eq!(kept.idle(&none), Bytes(11));
        assert!(!kept.is_releasing());
    }
}
