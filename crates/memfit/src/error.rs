//! Why a command ended without an answer.
//!
//! Responsible for turning every failure into a message, hints and an exit code, in one place. Not
//! responsible for printing them ([`crate::printer`]).

use std::io;
use std::path::Path;

use memfit_engine::bytes::BudgetError;
use memfit_engine::file::FileError;
use memfit_engine::plan::{AnswerError, PlanError};
use memfit_engine::predict::PredictError;

use crate::exit::Exit;
use crate::host::{HostError, HostErrorKind};

/// What to do about a bug in memfit.
const REPORT_THIS: &str = "this is a bug in memfit; please report it with the command and, if there is one, the saved trace";

/// Why a command ended without an answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Wrong use or bad input, with hints.
    Usage { message: String, hints: Vec<String> },
    /// The Python side failed.
    Host(HostError),
    /// Standard output or standard error could not be written.
    Output(io::Error),
    /// The user interrupted while the engine worked.
    Interrupted,
    /// A bug in memfit.
    Internal(String),
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hints: Vec::new(),
        }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        match self {
            Self::Usage { message, mut hints } => {
                hints.push(hint.into());
                Self::Usage { message, hints }
            }
            other => other,
        }
    }

    /// A file that could not be read as a trace or plan.
    pub(crate) fn file(path: &Path, error: &FileError) -> Self {
        let failure = Self::usage(format!("cannot read `{}`: {error}", path.display()));
        match error {
            FileError::TooNew { .. } => failure,
            _ => failure.hint("write it again with `memfit predict TARGET --save FILE.memfit`"),
        }
    }

    /// The host answered something that is no answer.
    pub(crate) fn bad_answer(question: &str, error: impl std::fmt::Display) -> Self {
        Self::Internal(HostError::bad_answer(question, error).message)
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Interrupted => Exit::Interrupted,
            Self::Internal(_) => Exit::Internal,
            // The reader of our output has seen enough: that is no failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            Self::Usage { .. } | Self::Output(_) => Exit::Usage,
            Self::Host(error) => match error.kind {
                HostErrorKind::Usage | HostErrorKind::Workload | HostErrorKind::Capture => {
                    Exit::Usage
                }
                HostErrorKind::DoesNotFit => Exit::No,
                HostErrorKind::NoRoom => Exit::NoRoom,
                HostErrorKind::Interrupted => Exit::Interrupted,
                HostErrorKind::Internal => Exit::Internal,
            },
        }
    }

    /// The one-line message; absent where nothing should be said.
    pub(crate) fn message(&self) -> Option<String> {
        match self {
            Self::Interrupted => Some("interrupted".to_owned()),
            Self::Usage { message, .. } | Self::Internal(message) => Some(message.clone()),
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => None,
            Self::Output(error) => Some(format!("cannot write the output: {error}")),
            Self::Host(error) => Some(error.message.clone()),
        }
    }

    pub(crate) fn hints(&self) -> Vec<&str> {
        match self {
            Self::Usage { hints, .. } => hints.iter().map(String::as_str).collect(),
            Self::Host(error) if error.kind == HostErrorKind::Internal => vec![REPORT_THIS],
            Self::Host(error) => error.hint.iter().map(String::as_str).collect(),
            Self::Internal(_) => vec![REPORT_THIS],
            _ => Vec::new(),
        }
    }

    /// A traceback to show before the message.
    pub(crate) fn traceback(&self) -> Option<&str> {
        match self {
            Self::Host(error) => error.traceback.as_deref(),
            _ => None,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

impl From<BudgetError> for Failure {
    fn from(error: BudgetError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Invalid(_) => Self::Internal(error.to_string()),
            PlanError::Cost(_) => Self::usage(error.to_string()),
        }
    }
}

impl From<AnswerError> for Failure {
    fn from(error: AnswerError) -> Self {
        Self::Internal(error.to_string())
    }
}

impl From<PredictError> for Failure {
    fn from(error: PredictError) -> Self {
        Self::usage(error.to_string())
    }
}
