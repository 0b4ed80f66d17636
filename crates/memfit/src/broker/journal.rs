//! The state file: what a broker that is started again must know.
//!
//! Responsible for writing each change before anyone hears of it, for reading the file of another run, and
//! for keeping it small. Not responsible for what the entries mean to the machine.
//!
//! One JSON document a line. Each entry carries all that is to be known of a client or a lease, so the
//! last one counts. An end without a line end was not heard of by anyone and is left out. When the file has
//! grown, what still counts is written to a new one that takes its place.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process::Process;
use crate::lease::amounts::Amounts;

/// Version of the file.
const SCHEMA: u32 = 1;
/// Appended bytes after which the file is written anew.
const COMPACT_BYTES: usize = 1 << 20;

/// A client, as written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientEntry {
    pub(crate) client: u64,
    pub(crate) process: Process,
    pub(crate) name: String,
}

/// A lease, as written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseEntry {
    pub(crate) lease: u64,
    pub(crate) client: u64,
    pub(crate) revision: u64,
    pub(crate) claims: Amounts,
    pub(crate) floor: Amounts,
    pub(crate) priority: i8,
    pub(crate) since: u64,
    pub(crate) is_committed: bool,
    pub(crate) time_to_live: Option<u64>,
    pub(crate) label: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry<'a> {
    Begin {
        schema_version: u32,
        boot: String,
        next_client: u64,
        next_lease: u64,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_incomplete: bool,
    },
    Client(std::borrow::Cow<'a, ClientEntry>),
    Lease(std::borrow::Cow<'a, LeaseEntry>),
    End {
        lease: u64,
    },
    Gone {
        client: u64,
    },
}

/// What a file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) boot: String,
    pub(crate) next_client: u64,
    pub(crate) next_lease: u64,
    /// Whether leases may be held that are not here, because a file was lost.
    pub(crate) is_incomplete: bool,
    pub(crate) clients: BTreeMap<u64, ClientEntry>,
    pub(crate) leases: BTreeMap<u64, LeaseEntry>,
}

/// What was found where the file should be.
#[derive(Debug)]
pub(crate) enum Found {
    /// No file: a first start, or an orderly end with nothing held.
    Nothing,
    /// What another run knew.
    Known(Known),
    /// A file that cannot be read; what was held is not known.
    Damaged(String),
}

/// The file and what counts in it.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Option<File>,
    pub(crate) known: Known,
    /// Not written yet.
    pending: Vec<u8>,
    appended: usize,
    /// Why it could not be written last time.
    pub(crate) error: Option<String>,
}

impl Journal {
    /// Reads the file of another run.
    pub(crate) fn find(path: &Path) -> Found {
        match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(error) => Found::Damaged(error.to_string()),
            Ok(bytes) => match read(&bytes) {
                Ok(known) => Found::Known(known),
                Err(reason) => Found::Damaged(reason),
            },
        }
    }

    /// A file that begins with what is known.
    pub(crate) fn begin(path: PathBuf, known: Known) -> Self {
        let mut journal = Self {
            path,
            file: None,
            known,
            pending: Vec::new(),
            appended: 0,
            error: None,
        };
        journal.compact();
        journal
    }

    pub(crate) fn client(&mut self, entry: ClientEntry) {
        self.append(&Entry::Client(std::borrow::Cow::Borrowed(&entry)));
        self.known.next_client = self.known.next_client.max(entry.client.saturating_add(1));
        self.known.clients.insert(entry.client, entry);
    }

    pub(crate) fn lease(&mut self, entry: LeaseEntry) {
        self.append(&Entry::Lease(std::borrow::Cow::Borrowed(&entry)));
        self.known.next_lease = self.known.next_lease.max(entry.lease.saturating_add(1));
        self.known.leases.insert(entry.lease, entry);
    }

    pub(crate) fn end(&mut self, lease: u64) {
        if self.known.leases.remove(&lease).is_some() {
            self.append(&Entry::End { lease });
        }
    }

    pub(crate) fn gone(&mut self, client: u64) {
        if self.known.clients.remove(&client).is_some() {
            self.append(&Entry::Gone { client });
        }
    }

    /// All who held something that was not written have come back, or their time is over.
    pub(crate) fn complete(&mut self) {
        self.known.is_incomplete = false;
        self.compact();
    }

    fn append(&mut self, entry: &Entry<'_>) {
        push(&mut self.pending, entry);
    }

    /// Writes what is pending; to be called before anyone hears of it.
    pub(crate) fn write(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let is_new = self.file.is_none() || self.appended + self.pending.len() > COMPACT_BYTES;
        if is_new {
            self.compact();
            return;
        }
        if let Some(file) = &mut self.file {
            match file.write_all(&self.pending) {
                Ok(()) => {
                    self.appended += self.pending.len();
                    self.pending.clear();
                }
                // A part may stand there; a new file has no such part.
                Err(_) => self.compact(),
            }
        }
    }

    /// Writes all that counts to a new file in place of the old.
    fn compact(&mut self) {
        match self.rewrite() {
            Ok(file) => {
                self.file = Some(file);
                self.error = None;
            }
            Err(error) => {
                self.file = None;
                self.error = Some(format!("cannot write `{}`: {error}", self.path.display()));
            }
        }
        self.appended = 0;
        self.pending.clear();
    }

    fn rewrite(&self) -> io::Result<File> {
        let mut bytes = Vec::new();
        let begin = Entry::Begin {
            schema_version: SCHEMA,
            boot: self.known.boot.clone(),
            next_client: self.known.next_client,
            next_lease: self.known.next_lease,
            is_incomplete: self.known.is_incomplete,
        };
        push(&mut bytes, &begin);
        for entry in self.known.clients.values() {
            push(
                &mut bytes,
                &Entry::Client(std::borrow::Cow::Borrowed(entry)),
            );
        }
        for entry in self.known.leases.values() {
            push(&mut bytes, &Entry::Lease(std::borrow::Cow::Borrowed(entry)));
        }
        let new = self.path.with_extension("state.new");
        let mut options = OpenOptions::new();
        let mut file = options
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&bytes)?;
        fs::rename(&new, &self.path)?;
        Ok(file)
    }

    /// An orderly end: without leases nothing is left behind.
    pub(crate) fn close(&mut self) {
        self.write();
        if self.known.leases.is_empty() {
            let _gone_already = fs::remove_file(&self.path);
        }
    }
}

fn push(bytes: &mut Vec<u8>, entry: &Entry<'_>) {
    // Numbers, texts and maps with text keys always have a JSON form, and a vector takes all bytes.
    if serde_json::to_writer(&mut *bytes, entry).is_ok() {
        bytes.push(b'\n');
    }
}

fn read(bytes: &[u8]) -> Result<Known, String> {
    let whole = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1);
    let mut known = Known::default();
    let mut has_begun = false;
    for (number, line) in (1..).zip(bytes[..whole].split(|byte| *byte == b'\n')) {
        if line.is_empty() {
            continue;
        }
        let entry =
            serde_json::from_slice(line).map_err(|error| format!("line {number}: {error}"))?;
        match entry {
            Entry::Begin {
                schema_version,
                boot,
                next_client,
                next_lease,
                is_incomplete,
            } => {
                if schema_version != SCHEMA {
                    return Err(format!(
                        "it is of schema {schema_version}, and {SCHEMA} is known"
                    ));
                }
                has_begun = true;
                (known.boot, known.next_client, known.next_lease) = (boot, next_client, next_lease);
                known.is_incomplete = is_incomplete;
            }
            Entry::Client(client) => {
                known.next_client = known.next_client.max(client.client.saturating_add(1));
                known.clients.insert(client.client, client.into_owned());
            }
            Entry::Lease(lease) => {
                known.next_lease = known.next_lease.max(lease.lease.saturating_add(1));
                known.leases.insert(lease.lease, lease.into_owned());
            }
            Entry::End { lease } => drop(known.leases.remove(&lease)),
            Entry::Gone { client } => drop(known.clients.remove(&client)),
        }
    }
    if has_begun {
        Ok(known)
    } else {
        Err("it has no beginning".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(lease: u64, bytes: u64) -> LeaseEntry {
        LeaseEntry {
            lease,
            client: 1,
            revision: 1,
            claims: Amounts::from([("host".to_owned(), bytes)]),
            floor: Amounts::new(),
            priority: 0,
            since: 5,
            is_committed: true,
            time_to_live: None,
            label: None,
        }
    }

    fn known(path: &Path) -> Known {
        match Journal::find(path) {
            Found::Known(known) => known,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_written_is_known_again_and_a_torn_end_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.state");
        assert!(matches!(Journal::find(&path), Found::Nothing));
        let mut journal = Journal::begin(path.clone(), Known::default());
        for number in 1..=3 {
            journal.lease(lease(number, number * 10));
        }
        journal.end(2);
        journal.write();
        let expected = journal.known.clone();
        assert_eq!(known(&path), expected);
        assert_eq!(expected.next_lease, 4);
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend_from_slice(b"{\"end\":{\"lease\":1");
        fs::write(&path, bytes).unwrap();
        assert_eq!(known(&path), expected);
    }

    #[test]
    fn the_file_stays_small_however_much_happens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.state");
        let mut journal = Journal::begin(path.clone(), Known::default());
        for number in 1..=20_000 {
            journal.lease(lease(number, 1));
            journal.end(number);
            journal.write();
        }
        journal.lease(lease(30_000, 7));
        journal.write();
        assert!(fs::metadata(&path).unwrap().len() < 2 * COMPACT_BYTES as u64);
        assert_eq!(known(&path).leases.len(), 1);
        journal.end(30_000);
        journal.close();
        assert!(!path.exists());
    }

    #[test]
    fn a_damaged_file_is_said_to_be_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.state");
        for text in [
            "",
            "nonsense\n",
            "{\"end\":{\"lease\":1}}\n",
            "{\"begin\":{\"schema_version\":9,\"boot\":\"\",\"next_client\":1,\"next_lease\":1}}\n",
        ] {
            fs::write(&path, text).unwrap();
            assert!(matches!(Journal::find(&path), Found::Damaged(_)), "{text}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_reported_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("later").join("broker.state");
        let mut journal = Journal::begin(path.clone(), Known::default());
        assert!(journal.error.as_ref().unwrap().contains("broker.state"));
        fs::create_dir(folder.path().join("later")).unwrap();
        journal.lease(lease(1, 1));
        journal.write();
        assert_eq!(journal.error, None);
        assert_eq!(known(&path).leases.len(), 1);
    }
}
