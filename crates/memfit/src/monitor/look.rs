//! One look at the machine: the broker's answer, the GPUs, the processes in `/proc`.
//!
//! Responsible for asking all three, each of which may be missing. Not responsible for what is made of the
//! answers.

use std::fs;
use std::path::{Path, PathBuf};

use memfit_memory::pressure::{self, Pressure};

use crate::device::{Driver, Gpu};
use crate::lease::status::Status;
use crate::lease::{Client, LeaseError, SocketError};

/// What was seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// Since the first look.
    pub(crate) seconds: f64,
    /// Absent where no broker runs.
    pub(crate) broker: Option<Status>,
    /// Why a broker that is there could not be asked.
    pub(crate) problem: Option<String>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) pressure: Pressure,
    pub(crate) processes: Vec<Process>,
}

/// A process of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// When it started, which tells it from a later one with its number.
    pub(crate) started: u64,
    /// As the process calls itself; may contain anything.
    pub(crate) name: String,
    /// Resident memory of its own: neither files nor shared memory.
    pub(crate) resident_bytes: u64,
}

/// Looks, and keeps open what is worth keeping open.
pub(crate) struct Looker {
    socket: PathBuf,
    client: Option<Client>,
    driver: Option<Driver>,
    began: std::time::Instant,
}

impl Looker {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            client: None,
            driver: Driver::open().ok(),
            began: std::time::Instant::now(),
        }
    }

    /// Looks at everything now.
    pub(crate) fn look(&mut self) -> Seen {
        let (broker, problem) = match self.ask() {
            Ok(status) => (Some(status), None),
            Err(LeaseError::Socket(SocketError::NoBroker(_) | SocketError::Away(_))) => {
                (None, None)
            }
            Err(error) => (None, Some(error.to_string())),
        };
        Seen {
            seconds: self.began.elapsed().as_secs_f64(),
            broker,
            problem,
            gpus: self.driver.as_ref().map(Driver::gpus).unwrap_or_default(),
            pressure: pressure::read(),
            processes: processes(),
        }
    }

    fn ask(&mut self) -> Result<Status, LeaseError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(&self.socket, "memfit top")?,
        };
        // A client that failed is given up: the next look connects anew, or says that no broker is there.
        let status = client.status()?;
        self.client = Some(client);
        Ok(status)
    }
}

/// The processes that have memory of their own; those that end meanwhile are left out.
fn processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(process).collect()
}

fn process(pid: u32) -> Option<Process> {
    let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).ok();
    let status = read("status")?;
    let resident_bytes = pressure::private_in(&String::from_utf8_lossy(&status))?;
    let stat = read("stat")?;
    let words = command(&read("cmdline")?);
    let (short, started) = named_and_started(&String::from_utf8_lossy(&stat))?;
    Some(Process {
        pid,
        started,
        name: words.unwrap_or(short),
        resident_bytes,
    })
}

/// Fields 2 and 22 of `/proc/PID/stat`; the second may contain anything, but ends with the last parenthesis.
fn named_and_started(stat: &str) -> Option<(String, u64)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let started = after.split_ascii_whitespace().nth(19)?.parse().ok()?;
    Some((name.to_owned(), started))
}

/// What was typed, short: of `python3 -m memfit run train.py` the program's and the script's file names.
fn command(cmdline: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(cmdline);
    let words: Vec<&str> = text.split('\0').filter(|word| !word.is_empty()).collect();
    let (program, arguments) = words.split_first()?;
    let file = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let is_script = |word: &&&str| Path::new(word).extension().is_some_and(|end| end == "py");
    let script = arguments.iter().find(is_script);
    Some(match script {
        Some(script) => format!("{} {}", file(program), file(script)),
        None => file(program),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_memory() {
        let own = std::process::id();
        let found = processes();
        let me = found.iter().find(|process| process.pid == own).unwrap();
        assert!(me.resident_bytes > 1 << 16 && me.started > 0);
        assert!(!me.name.is_empty());
    }

    #[test]
    fn what_the_kernel_writes_is_read_and_anything_else_is_not() {
        assert_eq!(
            pressure::private_in("Name:\tx\nRssAnon:\t    12 kB\n"),
            Some(12 << 10)
        );
        assert_eq!(pressure::private_in("Name:\tkthreadd\n"), None);
        assert_eq!(
            pressure::private_in("RssAnon: 99999999999999999999 kB"),
            None
        );
        let rest = "0 ".repeat(18);
        let stat = format!("7 (a) (b) R {rest}4711 0");
        assert_eq!(named_and_started(&stat), Some(("a) (b".to_owned(), 4711)));
        assert_eq!(named_and_started("7 (a"), None);
    }

    #[test]
    fn a_command_is_its_program_and_its_script() {
        let of = |words: &[u8]| command(words);
        let typed = b"/usr/bin/python3\0-m\0memfit\0run\0/home/me/train.py\0--epochs\x003\0";
        assert_eq!(of(typed).as_deref(), Some("python3 train.py"));
        assert_eq!(of(b"/bin/sh\0").as_deref(), Some("sh"));
        assert_eq!(of(b""), None);
        assert_eq!(of(b"\xff\xfe"), Some("\u{fffd}\u{fffd}".to_owned()));
    }
}
