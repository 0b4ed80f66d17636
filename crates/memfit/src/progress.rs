//! A line that says what is going on, on a terminal, for whatever takes more than a second.
//!
//! Responsible for showing and removing that line. Not responsible for estimating how long anything
//! takes. The line has its own thread, since the work may be in Python and holds the caller's.

use std::io::Write as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Nothing is shown for work that ends sooner.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two frames.
const FRAME: Duration = Duration::from_millis(150);
const FRAMES: [&str; 8] = ["⠋", "⠙", "⠸", "⠴", "⠦", "⠧", "⠇", "⠏"];

/// Shows a line until it is dropped.
pub(crate) struct Progress {
    running: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Starts the line. `shown` is false where standard error is no terminal.
    pub(crate) fn start(what: &str, shown: bool) -> Self {
        if !shown {
            return Self { running: None };
        }
        let (stop, stopped) = channel();
        let what = what.to_owned();
        let thread = std::thread::spawn(move || draw(&what, &stopped));
        Self {
            running: Some((stop, thread)),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // The thread has no result; had it panicked, the work itself is still good.
            let _finished = thread.join();
        }
    }
}

fn draw(what: &str, stopped: &Receiver<()>) {
    let start = Instant::now();
    if stopped.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let mut stderr = std::io::stderr();
    for frame in FRAMES.iter().cycle() {
        let seconds = start.elapsed().as_secs();
        // Erase the line, write it, stay on it. A terminal that is gone ends the display, not the work.
        if write!(stderr, "\r\x1b[2K{frame} {what} ({seconds} s)").is_err() {
            return;
        }
        let _unflushed = stderr.flush();
        if stopped.recv_timeout(FRAME) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    let _gone = write!(stderr, "\r\x1b[2K");
    let _unflushed = stderr.flush();
}
