//! Why bytes could not be stored or came back otherwise.
//!
//! Responsible for one variant per cause, with the folder, the bytes and the next step in it.

use std::path::PathBuf;

use memfit_engine::bytes::Bytes;

/// What a store's file is for, in the words of its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purpose {
    /// What is written to it.
    pub things: &'static str,
    /// The parameter that names its folder.
    pub option: &'static str,
}

impl Purpose {
    /// Tensors that a plan offloads.
    pub const OFFLOAD: Self = Self {
        things: "offloaded tensors",
        option: "offload_dir",
    };
    /// Models that are parked.
    pub const PARKING: Self = Self {
        things: "parked models",
        option: "spill",
    };
}

/// Why bytes could not be stored, or not be had back.
///
/// It can be cloned: a failed write is told to everyone who asks for its block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is nothing at the path.
    #[error(
        "there is no folder `{}` to write {} to\nhint: make it, or name another with `{}`",
        folder.display(), purpose.things, purpose.option
    )]
    Missing {
        /// What the file is for.
        purpose: Purpose,
        /// The path given.
        folder: PathBuf,
    },
    /// The path is that of a file.
    #[error(
        "`{}` is no folder: {} are written to a file in a folder",
        folder.display(), purpose.things
    )]
    NotAFolder {
        /// What the file is for.
        purpose: Purpose,
        /// The path given.
        folder: PathBuf,
    },
    /// No file can be made in the folder.
    #[error(
        "cannot write to the folder `{}`: {reason}\nhint: name another with `{}`",
        folder.display(), purpose.option
    )]
    NotWritable {
        /// What the file is for.
        purpose: Purpose,
        /// The path given.
        folder: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// The folder's files are kept in memory.
    #[error(
        "the folder `{}` is on {filesystem}, which keeps its files in memory: nothing would be gained\n\
         hint: name a folder on a disk with `{}`", folder.display(), purpose.option
    )]
    InMemory {
        /// What the file is for.
        purpose: Purpose,
        /// The path given.
        folder: PathBuf,
        /// `tmpfs` or `ramfs`.
        filesystem: &'static str,
    },
    /// The file system has no room for a block.
    #[error(
        "no space in `{}` for {wanted} ({} bytes) of {}: {available} ({} bytes) are free\n\
         hint: free some, or name a folder on another disk with `{}`",
        folder.display(), wanted.0, purpose.things, available.0, purpose.option
    )]
    NoSpace {
        /// What the file is for.
        purpose: Purpose,
        /// Where the file is.
        folder: PathBuf,
        /// Size of the block.
        wanted: Bytes,
        /// What the file system has left.
        available: Bytes,
    },
    /// A transfer failed.
    #[error(
        "{verb} {} of {} in `{}` failed: {reason}",
        Bytes(*.length), purpose.things, folder.display()
    )]
    Transfer {
        /// What the file is for.
        purpose: Purpose,
        /// Where the file is.
        folder: PathBuf,
        /// `writing` or `reading`.
        verb: &'static str,
        /// Size of the block.
        length: u64,
        /// What the system says.
        reason: String,
    },
    /// The bytes read are not those written.
    #[error(
        "{} of {} in `{}` came back changed: the checksum is {found:08x} and was {written:08x}\n\
         hint: the disk or its driver damages data",
        Bytes(*.length), purpose.things, folder.display()
    )]
    Changed {
        /// What the file is for.
        purpose: Purpose,
        /// Where the file is.
        folder: PathBuf,
        /// Size of the block.
        length: u64,
        /// Checksum of what was written.
        written: u32,
        /// Checksum of what was read.
        found: u32,
    },
    /// The memory to read into is not as long as the block.
    #[error("a block of {stored} bytes cannot be fetched into {given} bytes")]
    Length {
        /// Size of the block.
        stored: u64,
        /// Size of the memory given.
        given: u64,
    },
    /// The block was forgotten, is being fetched already, or was not fetched ahead.
    #[error("the offloaded block {state}")]
    State {
        /// What it is, instead of what was needed.
        state: &'static str,
    },
    /// A child process uses its parent's store.
    #[error(
        "offloaded tensors belong to the process that wrote them, and this is a fork of it\n\
         hint: fit the workload in the process that runs it"
    )]
    Forked,
    /// The caller asked to stop waiting.
    #[error("interrupted while waiting for an offloaded block")]
    Interrupted,
    /// No thread could be started.
    #[error("cannot start a thread for offloading: {reason}")]
    Thread {
        /// What the system says.
        reason: String,
    },
}
