//! A snapshot's trace as a picture that fits into a page: levels of detail, computed once.
//!
//! Responsible for the lives of allocations and segments (`lives.rs`, `segments.rs`), for the totals over
//! time at a bounded number of columns (`columns.rs`), for choosing the lives worth listing (`select.rs`)
//! and for packing all of it into a given number of bytes (`pack.rs`, `head.rs`, `texts.rs`, `coding.rs`). Not responsible for
//! drawing, nor for what the picture means.
//!
//! Time is counted in *moments*: moment `m` is the state after the first `m` events, so that a trace of `n`
//! events has the moments `0..=n`. A life is the half-open range of moments at which something is there.
//!
//! Invariants: the highest column of any level is the exact peak; the bands of a column add up to its
//! total; what is left out is counted; the packed bytes never exceed what was allowed.

mod coding;
mod columns;
mod head;
mod lives;
#[cfg(test)]
mod naive;
mod pack;
#[cfg(test)]
mod sample;
mod segments;
mod select;
mod texts;

pub use lives::Life;
pub use pack::{Packed, PackedDevice, pack};
pub use segments::SegmentLife;

use crate::snapshot::{Snapshot, StackIndex, TextIndex};

/// Number of events applied so far.
pub type Moment = u32;

/// To whom each stack is counted. An owner without a name is never shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owners {
    /// For each stack of the snapshot the owner's position in `names`.
    pub of_stack: Vec<u32>,
    /// What owners are called.
    pub names: Vec<String>,
}

impl Owners {
    /// Owners by the innermost source line that is the user's own: not PyTorch's, not Python's.
    ///
    /// Stacks without such a line count to their innermost Python line, then to their innermost frame.
    #[must_use]
    pub fn by_source_line(snapshot: &Snapshot) -> Self {
        let mut numbers = std::collections::HashMap::new();
        let mut names = vec!["(no stack recorded)".to_owned()];
        let count = u32::try_from(snapshot.stacks.len()).unwrap_or(u32::MAX);
        let of_stack = (0..count)
            .map(|index| {
                let frames = snapshot.stacks.get(StackIndex(index));
                let file = |text: TextIndex| snapshot.texts.get(text);
                let frame = frames
                    .iter()
                    .find(|frame| is_own_file(file(frame.file)))
                    .or_else(|| frames.iter().find(|frame| is_python(file(frame.file))))
                    .or_else(|| frames.first());
                let Some(frame) = frame else { return 0 };
                *numbers.entry(*frame).or_insert_with(|| {
                    let function = snapshot.texts.get(frame.function);
                    names.push(format!("{}:{} {function}", file(frame.file), frame.line));
                    u32::try_from(names.len() - 1).unwrap_or(0)
                })
            })
            .collect();
        Self { of_stack, names }
    }

    /// The owner of a stack; the first one when nothing is known of it.
    fn of(&self, stack: StackIndex) -> u32 {
        let owner = self.of_stack.get(stack.0 as usize).copied().unwrap_or(0);
        if (owner as usize) < self.names.len() {
            owner
        } else {
            0
        }
    }

    fn count(&self) -> usize {
        self.names.len().max(1)
    }
}

fn is_python(file: &str) -> bool {
    std::path::Path::new(file)
        .extension()
        .is_some_and(|extension| extension == "py")
}

fn is_own_file(file: &str) -> bool {
    is_python(file) && !file.contains("site-packages/") && !file.contains("/torch/")
}
