//! The state file: what a broker that is started again must know.
//!
//! Responsible for writing each change before anyone hears of it or saying that it is not written, for reading
//! the file of another run, and for keeping it small. Not responsible for what the entries mean to the machine.
//!
//! One JSON document a line. Each entry carries all that is to be known of a client or a lease, so the
//! last one counts. An end without a line end was not heard of by anyone and is left out. When the file has
//! grown, what still counts is written to a new one that takes its place; so too when it could not be written
//! for a while. Until then the file stays as it is; it may hold entries that no client was told of.

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

/// A change of what is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Lease(LeaseEntry),
    End(u64),
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
    /// Clients that are not written yet; nothing that is held depends on them alone.
    pending: Vec<u8>,
    appended: usize,
    /// Why it cannot be written; then it lacks what is known since, and only a new file makes up for that.
    pub(crate) error: Option<String>,
}

impl Known {
    fn learn(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Lease(entry) => {
                    self.next_lease = self.next_lease.max(entry.lease.saturating_add(1));
                    self.leases.insert(entry.lease, entry);
                }
                Change::End(lease) => drop(self.leases.remove(&lease)),
            }
        }
    }
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
        journal.compact(&[]);
        journal
    }

    pub(crate) fn client(&mut self, entry: ClientEntry) {
        self.append(&Entry::Client(std::borrow::Cow::Borrowed(&entry)));
        self.known.next_client = self.known.next_client.max(entry.client.saturating_add(1));
        self.known.clients.insert(entry.client, entry);
    }

    pub(crate) fn gone(&mut self, client: u64) {
        if self.known.clients.remove(&client).is_some() {
            self.append(&Entry::Gone { client });
        }
    }

    /// All who held something that was not written have come back, or their time is over. Says whether that is written.
    #[must_use]
    pub(crate) fn complete(&mut self) -> bool {
        self.known.is_incomplete = false;
        self.compact(&[])
    }

    fn append(&mut self, entry: &Entry<'_>) {
        push(&mut self.pending, entry);
    }

    /// Writes the changes and what is pending; to be called before anyone hears of them. Says whether they are
    /// written; otherwise the changes are not known either.
    #[must_use]
    pub(crate) fn write(&mut self, changes: Vec<Change>) -> bool {
        if self.error.is_none() {
            let mut bytes = std::mem::take(&mut self.pending);
            for change in &changes {
                push(&mut bytes, &change.entry());
            }
            if bytes.is_empty() {
                return true;
            }
            let is_small = self.appended + bytes.len() <= COMPACT_BYTES;
            let file = self.file.as_mut().filter(|_| is_small);
            if file.is_some_and(|file| file.write_all(&bytes).is_ok()) {
                self.appended += bytes.len();
                self.known.learn(changes);
                return true;
            }
        }
        // A part may stand in the old file; a new one has no such part.
        self.compact(&changes)
    }

    /// Takes note of changes after which no more is held than the file says; they are written when it can be.
    pub(crate) fn owe(&mut self, changes: Vec<Change>) {
        self.known.learn(changes);
    }

    /// Writes all that counts, with these changes, to a new file in place of the old; says whether it did.
    fn compact(&mut self, changes: &[Change]) -> bool {
        let mut known = self.known.clone();
        known.learn(changes.to_vec());
        self.pending.clear();
        self.appended = 0;
        match rewrite(&self.path, &known) {
            Ok(file) => {
                self.file = Some(file);
                self.known = known;
                self.error = None;
            }
            Err(error) => {
                self.file = None;
                self.error = Some(format!("cannot write `{}`: {error}", self.path.display()));
            }
        }
        self.error.is_none()
    }

    /// An orderly end: without leases nothing is left behind.
    pub(crate) fn close(&mut self) {
        // What cannot be written now is held by fewer than the file says.
        let _is_written = self.write(Vec::new());
        if self.known.leases.is_empty() && !self.known.is_incomplete {
            let _gone_already = fs::remove_file(&self.path);
        }
    }
}

impl Change {
    const fn entry(&self) -> Entry<'_> {
        match self {
            Self::Lease(entry) => Entry::Lease(std::borrow::Cow::Borrowed(entry)),
            Self::End(lease) => Entry::End { lease: *lease },
        }
    }
}

fn rewrite(path: &Path, known: &Known) -> io::Result<File> {
    let mut bytes = Vec::new();
    let begin = Entry::Begin {
        schema_version: SCHEMA,
        boot: known.boot.clone(),
        next_client: known.next_client,
        next_lease: known.next_lease,
        is_incomplete: known.is_incomplete,
    };
    push(&mut bytes, &begin);
    for entry in known.clients.values() {
        let entry = Entry::Client(std::borrow::Cow::Borrowed(entry));
        push(&mut bytes, &entry);
    }
    for entry in known.leases.values() {
        push(&mut bytes, &Entry::Lease(std::borrow::Cow::Borrowed(entry)));
    }
    let new = path.with_extension("state.new");
    let mut options = OpenOptions::new();
    let mut file = options
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(&bytes)?;
    fs::rename(&new, path)?;
    Ok(file)
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

    fn held(number: u64, bytes: u64) -> Vec<Change> {
        vec![Change::Lease(lease(number, bytes))]
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
            assert!(journal.write(held(number, number * 10)));
        }
        assert!(journal.write(vec![Change::End(2)]));
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
            let change = Change::Lease(lease(number, 1));
            assert!(journal.write(vec![change, Change::End(number)]));
        }
        assert!(journal.write(held(30_000, 7)));
        assert!(fs::metadata(&path).unwrap().len() < 2 * COMPACT_BYTES as u64);
        assert_eq!(known(&path).leases.len(), 1);
        assert!(journal.write(vec![Change::End(30_000)]));
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
        assert!(!journal.write(held(1, 1)));
        assert!(journal.known.leases.is_empty());
        fs::create_dir(folder.path().join("later")).unwrap();
        assert!(journal.write(held(1, 1)));
        assert_eq!(journal.error, None);
        assert_eq!(known(&path).leases.len(), 1);
    }

    #[test]
    fn what_cannot_be_appended_is_not_known_and_ends_are_owed_until_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.state");
        let mut journal = Journal::begin(path.clone(), Known::default());
        assert!(journal.write(held(1, 1)));
        assert!(journal.write(held(2, 2)));
        journal.file = Some(File::options().write(true).open("/dev/full").unwrap());
        fs::create_dir(path.with_extension("state.new")).unwrap();
        assert!(!journal.write(held(3, 3)));
        journal.owe(vec![Change::End(1)]);
        assert_eq!(known(&path).leases.len(), 2);
        fs::remove_dir(path.with_extension("state.new")).unwrap();
        assert!(journal.write(held(4, 4)));
        let held: Vec<u64> = known(&path).leases.into_keys().collect();
        assert_eq!(held, [2, 4]);
    }
}
