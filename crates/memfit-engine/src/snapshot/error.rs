//! Why a snapshot cannot be read.
//!
//! Responsible for the words and for where in the file it happened. Not responsible for what contradicts
//! itself inside a readable snapshot: that is a [`Problem`](super::Problem).
//!
//! Positions are bytes from the start of the pickle, after decompression.

/// Why a file gives no snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// There is nothing in it.
    #[error(
        "the file is empty; `torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")` writes a snapshot"
    )]
    Empty,
    /// Recognised as something else.
    #[error("this is {what}, not a memory snapshot: {advice}")]
    SomethingElse {
        /// What it is.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A pickle of a model or of an optimizer's state.
    #[error(
        "this is a model checkpoint, not a memory snapshot: {evidence}; nothing in it was imported or run; `torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")` writes a snapshot"
    )]
    Checkpoint {
        /// How one can tell.
        evidence: String,
    },
    /// It asks to import or call something. A snapshot never does.
    #[error(
        "the pickle asks to run code: `{opcode}`{name} at byte {position}; a memory snapshot holds data only, so nothing was imported or run"
    )]
    Refused {
        /// Pickle's name of the opcode.
        opcode: &'static str,
        /// What it would have imported, with a leading space, if the opcode says so.
        name: String,
        /// Where.
        position: u64,
    },
    /// An opcode of the oldest protocols, which no torch writes.
    #[error(
        "`{opcode}` at byte {position} belongs to pickle protocol 0 or 1; write the snapshot again with protocol 2 to 5"
    )]
    OldProtocol {
        /// Pickle's name of the opcode.
        opcode: &'static str,
        /// Where.
        position: u64,
    },
    /// A protocol that did not exist when this was written.
    #[error("the pickle has protocol {found}, which is unknown; write it with protocol 2 to 5")]
    NewProtocol {
        /// Its number.
        found: u8,
    },
    /// It ends before its last opcode.
    #[error("the file is cut off: it ends at byte {position} in the middle of the pickle")]
    Truncated {
        /// Where it ends.
        position: u64,
    },
    /// No pickle looks like this.
    #[error("the pickle is damaged at byte {position}: {what}")]
    Damaged {
        /// Where.
        position: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// Reading it would take more than is allowed.
    #[error("the pickle asks for too much at byte {position}: {what}")]
    TooLarge {
        /// Where.
        position: u64,
        /// Which limit.
        what: String,
    },
    /// Plain data, but no snapshot.
    #[error(
        "the pickle holds {what}, not a memory snapshot, which is a dict with `segments` and `device_traces`"
    )]
    NotASnapshot {
        /// What it holds.
        what: String,
    },
    /// The one who watches asked to stop.
    #[error("reading was stopped at byte {position}")]
    Stopped {
        /// Where.
        position: u64,
    },
    /// The source failed, or its compression is damaged.
    #[error("cannot read on after byte {position}: {error}")]
    Source {
        /// Where.
        position: u64,
        /// What the source said.
        error: std::io::Error,
    },
}
