//! Where output goes and whether it is coloured.
//!
//! Responsible for the two streams: data on standard output, everything else on standard error, and
//! colour only where a person looks. Not responsible for what is said.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};

use crate::args::ColorChoice;
use crate::error::Failure;

/// The streams a run writes to, and what is known about them.
pub struct Streams<'a> {
    /// Takes data: reports and JSON.
    pub stdout: &'a mut dyn Write,
    /// Takes everything else: errors, notes, progress.
    pub stderr: &'a mut dyn Write,
    /// Whether standard output is a terminal.
    pub stdout_is_terminal: bool,
    /// Whether standard error is a terminal; progress is shown only there.
    pub stderr_is_terminal: bool,
    /// Whether the environment forbids colour (`NO_COLOR`).
    pub no_color: bool,
}

impl<'a> Streams<'a> {
    /// The streams of this process.
    pub fn process(stdout: &'a mut io::Stdout, stderr: &'a mut io::Stderr) -> Self {
        let (stdout_is_terminal, stderr_is_terminal) = (stdout.is_terminal(), stderr.is_terminal());
        // https://no-color.org: present and not empty, whatever the value.
        let no_color =
            std::env::var_os("NO_COLOR").is_some_and(|value: OsString| !value.is_empty());
        Self {
            stdout,
            stderr,
            stdout_is_terminal,
            stderr_is_terminal,
            no_color,
        }
    }
}

/// Paints text, or leaves it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Palette {
    enabled: bool,
}

impl Palette {
    /// A palette that paints nothing.
    pub(crate) const PLAIN: Self = Self { enabled: false };

    fn paint(self, code: &str, text: &str) -> String {
        if self.enabled && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    pub(crate) fn strong(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(crate) fn faint(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(crate) fn hint(self, text: &str) -> String {
        self.paint("36", text)
    }

    pub(crate) const fn is_plain(self) -> bool {
        !self.enabled
    }
}

/// Decides all output of a run.
pub(crate) struct Printer<'a> {
    streams: Streams<'a>,
    color: ColorChoice,
    quiet: bool,
    verbose: bool,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(streams: Streams<'a>) -> Self {
        Self {
            streams,
            color: ColorChoice::Auto,
            quiet: false,
            verbose: false,
        }
    }

    pub(crate) fn configure(&mut self, color: ColorChoice, quiet: bool, verbose: bool) {
        (self.color, self.quiet, self.verbose) = (color, quiet, verbose);
    }

    const fn palette(&self, is_terminal: bool) -> Palette {
        let enabled = match self.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => is_terminal && !self.streams.no_color,
        };
        Palette { enabled }
    }

    /// How reports on standard output are painted.
    pub(crate) const fn report_palette(&self) -> Palette {
        self.palette(self.streams.stdout_is_terminal)
    }

    /// How messages on standard error are painted.
    pub(crate) const fn message_palette(&self) -> Palette {
        self.palette(self.streams.stderr_is_terminal)
    }

    /// Whether progress is shown.
    pub(crate) const fn shows_progress(&self) -> bool {
        self.streams.stderr_is_terminal && !self.quiet
    }

    /// Whether a person sees standard output, so that a screen can be drawn there.
    pub(crate) const fn can_draw(&self) -> bool {
        self.streams.stdout_is_terminal
    }

    /// Whether notes are wanted.
    pub(crate) const fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Whether details are wanted.
    pub(crate) const fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Writes data.
    pub(crate) fn data(&mut self, text: &str) -> Result<(), Failure> {
        self.bytes(text.as_bytes())
    }

    /// Writes data that need not be text.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.streams.stdout.write_all(bytes)?;
        self.streams.stdout.flush()?;
        Ok(())
    }

    /// Says something in passing, unless `--quiet`.
    pub(crate) fn note(&mut self, text: &str) -> Result<(), Failure> {
        if self.quiet {
            return Ok(());
        }
        writeln!(self.streams.stderr, "{text}")?;
        Ok(())
    }

    /// Says something only with `--verbose`.
    pub(crate) fn detail(&mut self, text: &str) -> Result<(), Failure> {
        if self.verbose {
            let text = self.message_palette().faint(text);
            writeln!(self.streams.stderr, "{text}")?;
        }
        Ok(())
    }

    /// Writes plain text to standard error.
    pub(crate) fn stderr(&mut self, text: &str) -> Result<(), Failure> {
        self.streams.stderr.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Explains a failure. Standard error being gone is nothing that can be reported.
    pub(crate) fn failure(&mut self, failure: &Failure) {
        let palette = self.message_palette();
        let mut text = String::new();
        if let Some(traceback) = failure.traceback() {
            text.push_str(traceback.trim_end());
            text.push('\n');
        }
        if let Some(message) = failure.message() {
            text.extend([&palette.bad("error:"), " ", &message, "\n"]);
        }
        for hint in failure.hints() {
            text.extend([&palette.hint("hint:"), " ", hint, "\n"]);
        }
        let _gone = self.streams.stderr.write_all(text.as_bytes());
    }
}
