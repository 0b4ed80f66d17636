//! `memfit top`: who uses which memory, live.

use std::time::Duration;

use crate::args::{Format, TopArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::lease::usual_path;
use crate::monitor::{History, Looker, Sort, View, frame_text, watch};
use crate::report::json;
use crate::session::Session;

/// Columns where there is no terminal to ask.
const WIDTH: u16 = 130;

pub(crate) fn run(arguments: &TopArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let interval = Duration::try_from_secs_f64(arguments.interval)
        .ok()
        .filter(|interval| *interval >= Duration::from_millis(50))
        .ok_or_else(|| Failure::usage("`--interval` is a number of seconds, 0.05 or more"))?;
    let mut looker = Looker::new(arguments.socket.clone().unwrap_or_else(usual_path));
    if arguments.once || session.format == Format::Json {
        let mut history = History::default();
        history.add(looker.look());
        let view = View::new(&history, Sort::default());
        let frame = match session.format {
            Format::Text => frame_text(&view, width(session)),
            Format::Json => json(&view)?,
        };
        session.printer.data(&frame)?;
        return Ok(Exit::Done);
    }
    if !session.printer.can_draw() {
        return Err(
            Failure::usage("`memfit top` needs a terminal, and standard output is none")
                .hint("`memfit top --once` prints one frame"),
        );
    }
    let was_signalled = watch(&mut looker, interval)?;
    Ok(if was_signalled {
        Exit::Interrupted
    } else {
        Exit::Done
    })
}

/// Columns of the terminal, if the frame goes to one.
fn width(session: &Session<'_>) -> u16 {
    let size = ratatui::crossterm::terminal::size();
    let columns = size.ok().map(|(columns, _)| columns.max(80));
    columns
        .filter(|_| session.printer.can_draw())
        .unwrap_or(WIDTH)
}
