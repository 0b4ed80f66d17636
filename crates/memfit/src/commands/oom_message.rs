//! `memfit explain` of a text: PyTorch's OOM messages in a log or from a pipe.
//!
//! Responsible for telling a text from a snapshot by its content, and for reading standard input. Not responsible for what the
//! messages decide.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::Path;
use std::sync::Arc;

use memfit_engine::oom_message::{OomMessages, Scanner};
use memfit_engine::snapshot::{self, ReadOptions, Snapshot, SnapshotError};

use crate::args::{ExplainArguments, Format};
use crate::error::Failure;
use crate::exit::Exit;
use crate::interrupt::interruptible;
use crate::report::{json, text};
use crate::session::Session;

/// Stands for standard input.
const STANDARD_INPUT: &str = "-";
/// So much is looked at to tell what a file is.
const HEAD_LENGTH: usize = 512;
const HEAD_BYTES: u64 = HEAD_LENGTH as u64;
/// Read at once.
const PIECE_BYTES: usize = 1 << 18;
/// How every pickle of protocol 2 or later starts.
const PICKLE: u8 = 0x80;
const GZIP: &[u8] = &[0x1f, 0x8b];

/// What was looked for in a text.
const LOOKED_FOR: &str = "memfit looks for `CUDA out of memory. Tried to allocate ...` and torch's other messages of that kind; \
                          a snapshot is written by `torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")`";

/// What `memfit explain` was given.
pub(super) enum Input {
    Snapshot(Arc<Snapshot>),
    Text(Box<OomMessages>),
}

/// Reads a snapshot, or the OOM messages of a text; nothing in it is executed.
pub(super) fn read(path: &Path, session: &mut Session<'_>) -> Result<Input, Failure> {
    let opened = path.to_owned();
    let name = if is_standard_input(path) {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    };
    let (source, what) = (name.clone(), format!("reading {name}"));
    let (input, _) = session.slow(&what, |host| {
        interruptible(host, move || {
            if is_standard_input(&opened) {
                of_pipe(io::stdin().lock(), &source)
            } else {
                of_file(&opened, &source)
            }
        })
    })?;
    input.map_err(|unread| unread.failure(&name))
}

/// Reports the messages of a text.
pub(super) fn report(
    messages: &OomMessages,
    arguments: &ExplainArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let source = &messages.source;
    let meaningless = [
        (arguments.later.is_some(), "a second file"),
        (arguments.html.is_some(), "`--html`"),
        (arguments.device_memory.is_some(), "`--device-memory`"),
    ];
    if let Some((_, what)) = meaningless.iter().find(|(is_given, _)| *is_given) {
        return Err(Failure::usage(format!(
            "{what} has no meaning for `{source}`: it is a text with OOM messages, not a snapshot"
        )));
    }
    let report = match session.format {
        Format::Text => text::oom_messages(messages, session.printer.report_palette()),
        Format::Json => json(messages)?,
    };
    session.printer.data(&report)?;
    Ok(Exit::No)
}

pub(super) fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

/// Why nothing can be explained.
struct Unread {
    error: SnapshotError,
    /// No message is in it either.
    is_text: bool,
}

impl Unread {
    fn failure(&self, name: &str) -> Failure {
        // What is recognised as something else, or as an old pickle, is named for what it is.
        let is_unknown = match &self.error {
            SnapshotError::SomethingElse { what, .. } => matches!(*what, "text" | "no pickle"),
            SnapshotError::Damaged { .. } | SnapshotError::Truncated { .. } => true,
            _ => false,
        };
        if self.is_text && is_unknown {
            return Failure::usage(format!(
                "cannot explain `{name}`: it holds no OOM message of PyTorch, and is no memory snapshot"
            ))
            .hint(LOOKED_FOR);
        }
        match &self.error {
            SnapshotError::Source { error, .. } => {
                Failure::usage(format!("cannot read `{name}`: {error}"))
            }
            error => {
                let failure = Failure::usage(format!("cannot read `{name}`: {error}"));
                if self.is_text && !matches!(error, SnapshotError::Empty) {
                    failure.hint("it holds no OOM message of PyTorch either")
                } else {
                    failure
                }
            }
        }
    }
}

impl From<SnapshotError> for Unread {
    fn from(error: SnapshotError) -> Self {
        Self {
            error,
            is_text: false,
        }
    }
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        Self::from(SnapshotError::Source { position: 0, error })
    }
}

fn of_file(path: &Path, source: &str) -> Result<Input, Unread> {
    let error = match snapshot::read(File::open(path)?, ReadOptions::default()) {
        Ok(snapshot) => return Ok(Input::Snapshot(Arc::new(snapshot))),
        Err(error) => error,
    };
    let mut file = File::open(path)?;
    let mut head = Vec::new();
    file.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
    if !may_be_text(&head) {
        return Err(error.into());
    }
    of_text(Cursor::new(head).chain(file), source, error)
}

/// What comes from a pipe can be read once, so its first bytes decide.
fn of_pipe(mut pipe: impl Read, source: &str) -> Result<Input, Unread> {
    let mut head = Vec::new();
    pipe.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
    let is_text = may_be_text(&head);
    let error = if is_text {
        // The head alone tells what it is, if it is no log.
        snapshot::read_bytes(&head).err()
    } else {
        None
    };
    let whole = Cursor::new(head).chain(pipe);
    match error {
        Some(error) => of_text(whole, source, error),
        None => Ok(Input::Snapshot(Arc::new(snapshot::read(
            whole,
            ReadOptions::default(),
        )?))),
    }
}

/// The OOM messages of bytes that are no snapshot; `None` where they hold none.
pub(crate) fn of_bytes(data: &[u8], source: &str) -> Option<OomMessages> {
    let head = &data[..data.len().min(HEAD_LENGTH)];
    if !may_be_text(head) {
        return None;
    }
    let mut scanner = Scanner::new();
    scanner.push(data);
    let messages = scanner.finish(source);
    (messages.message_count > 0).then_some(messages)
}

/// Scans a text that is no snapshot, for the reason given.
fn of_text(mut text: impl Read, source: &str, error: SnapshotError) -> Result<Input, Unread> {
    let mut scanner = Scanner::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match text.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => scanner.push(&piece[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let messages = scanner.finish(source);
    if messages.message_count == 0 {
        let is_text = true;
        return Err(Unread { error, is_text });
    }
    Ok(Input::Text(Box::new(messages)))
}

/// Whether a file that starts so is worth scanning: no pickle, nothing compressed, no binary file.
fn may_be_text(head: &[u8]) -> bool {
    // Some terminals of Windows write UTF-16, whose letters have zeros between them.
    let is_utf_16 = head.starts_with(&[0xff, 0xfe]) || head.starts_with(&[0xfe, 0xff]);
    let is_binary = head.contains(&0) && !is_utf_16;
    head.first() != Some(&PICKLE) && !head.starts_with(GZIP) && !is_binary
}
