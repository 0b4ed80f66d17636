//! Why a model was not parked or not woken.
//!
//! Responsible for one variant per cause, with the bytes and the next step in it.

use std::path::PathBuf;

use memfit_engine::bytes::Bytes;

use crate::arena::cuda::VmmError;
use crate::store::StoreError;

/// Why a model was not parked or not woken. Either way it is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParkError {
    /// The file that parked bytes go to cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Memory of a CUDA device cannot be had, copied or given back.
    #[error(transparent)]
    Device(#[from] VmmError),
    /// The system or the device gives no memory to wake into.
    #[error(
        "no memory to wake {wanted} ({} bytes): {reason}; the model stays parked, and whole\n\
         hint: park or end something else, and wake it again",
        wanted.0
    )]
    NoMemory {
        /// What was asked for.
        wanted: Bytes,
        /// What the system says.
        reason: String,
    },
    /// The system gives no memory to lay a model out in.
    #[error("no memory of {} to park a model in: {reason}", Bytes(*.length as u64))]
    NotMapped {
        /// What was asked for.
        length: usize,
        /// What the system says.
        reason: String,
    },
    /// The system does not take memory back.
    #[error("the system does not take {length} back: {reason}; the model stays in memory")]
    NotReleased {
        /// What was to be given back.
        length: Bytes,
        /// What the system says.
        reason: String,
    },
    /// Bytes in the nameless file are not those that were parked.
    #[error(
        "parked bytes {start} to {} came back changed from the file in `{}`, and are not handed out\n\
         hint: the disk or its driver damages data; load the model again",
        start + length, folder.display()
    )]
    Changed {
        /// Folder of the file.
        folder: PathBuf,
        /// Where in the model's memory.
        start: u64,
        /// How many.
        length: u64,
    },
    /// The system maps a part of the nameless file, and does not bring it into memory.
    #[error(
        "parked bytes {start} to {} cannot be brought into memory: {reason}; they are not handed out\n\
         hint: park or end something else, and try it again",
        start + length
    )]
    NotBroughtIn {
        /// Where in the model's memory.
        start: u64,
        /// How many.
        length: u64,
        /// What the system says.
        reason: String,
    },
    /// Bytes in the host's memory are not those that were parked.
    #[error(
        "parked bytes {start} to {} changed in the host's memory: the model stays parked\n\
         hint: something in this process writes where it should not; load the model again",
        start + length
    )]
    HostChanged {
        /// Where in the model's memory.
        start: u64,
        /// How many.
        length: u64,
    },
    /// The weights file is not what it was when the model was parked.
    #[error(
        "`{}` has changed since the model was parked: `{tensor}` is not in it as it was; the model stays \
         parked\nhint: put the file back as it was and wake the model again, or load the model again",
        path.display()
    )]
    SourceChanged {
        /// The file.
        path: PathBuf,
        /// The first tensor that differs.
        tensor: String,
    },
    /// The weights file cannot be used.
    #[error("cannot use `{}` as a parked copy: {reason}", path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A layout that cannot be.
    #[error("a model's memory of {length} bytes cannot be laid out so: {reason}")]
    Layout {
        /// Length of the memory.
        length: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// There is no such range.
    #[error("there are no {length} bytes at {start} in a parked model's memory")]
    Range {
        /// Its first byte.
        start: u64,
        /// How many.
        length: u64,
    },
    /// Its copy was given up.
    #[error("the model is no longer parkable: its parked copy was closed")]
    GivenUp,
    /// A child process uses its parent's parked model.
    #[error(
        "the model was made parkable by the process that this one is a fork of\n\
         hint: park and wake it there, or load it anew here"
    )]
    Forked,
    /// The caller asked to stop.
    #[error("interrupted; the model is as it was before")]
    Interrupted,
}

impl ParkError {
    /// The cause in a word, for programs.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Store(StoreError::NoSpace { .. }) => "no_space",
            Self::Store(StoreError::Transfer { .. }) => "transfer",
            Self::Store(_) => "folder",
            Self::NoMemory { .. }
            | Self::NotMapped { .. }
            | Self::NotBroughtIn { .. }
            | Self::Device(VmmError::NoRoom { .. } | VmmError::NoHostMemory { .. }) => "no_memory",
            Self::Device(_) => "driver",
            Self::NotReleased { .. } => "not_released",
            Self::Changed { .. } | Self::HostChanged { .. } | Self::SourceChanged { .. } => {
                "changed"
            }
            Self::Source { .. } => "source",
            Self::Layout { .. } | Self::Range { .. } => "layout",
            Self::GivenUp => "closed",
            Self::Forked => "forked",
            Self::Interrupted => "interrupted",
        }
    }
}

/// The system gave no memory to wake so many bytes into.
pub(super) fn no_memory(length: u64, error: &std::io::Error) -> ParkError {
    ParkError::NoMemory {
        wanted: Bytes(length),
        reason: error.to_string(),
    }
}
