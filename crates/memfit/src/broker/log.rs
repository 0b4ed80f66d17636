//! The broker's log: one JSON document a line, on standard error.
//!
//! Responsible for the form and for which events are written: what changes for people who look after the
//! broker always, every grant and end only when asked for.

use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

/// Where the events go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log {
    /// Nothing below a warning.
    pub(crate) is_quiet: bool,
    /// Every grant and end.
    pub(crate) is_verbose: bool,
}

impl Log {
    /// Something to know.
    pub(crate) fn info(self, event: &str, facts: Value) {
        if !self.is_quiet {
            write("info", event, facts);
        }
    }

    /// Something that somebody should look at.
    #[expect(
        clippy::unused_self,
        reason = "warnings are written however the log is set"
    )]
    pub(crate) fn warn(self, event: &str, facts: Value) {
        write("warning", event, facts);
    }

    /// Something that happens all the time.
    pub(crate) fn detail(self, event: &str, facts: impl FnOnce() -> Value) {
        if self.is_verbose {
            write("detail", event, facts());
        }
    }
}

fn write(level: &str, event: &str, facts: Value) {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut line = Map::new();
    line.insert(
        "time".to_owned(),
        time.map_or(0.0, |time| time.as_secs_f64()).into(),
    );
    line.insert("level".to_owned(), level.into());
    line.insert("event".to_owned(), event.into());
    if let Value::Object(facts) = facts {
        line.extend(facts);
    }
    let line = format!("{}\n", Value::Object(line));
    // Standard error being gone is nothing that could be reported.
    let _gone = std::io::stderr().lock().write_all(line.as_bytes());
}
