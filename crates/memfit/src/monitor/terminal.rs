//! The terminal while `memfit top` runs on it: raw, on its second screen, and as before afterwards.
//!
//! Responsible for keys, for signals and for giving the terminal back however the program ends: by a key,
//! by Ctrl-C, by SIGTERM or SIGHUP, by a panic. Not responsible for what is drawn (`draw.rs`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::draw::draw;
use super::history::History;
use super::look::Looker;
use super::view::{Sort, View};

/// How soon a signal is answered.
const PATIENCE: Duration = Duration::from_millis(100);

/// How the user looks at the processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Screen {
    sort: Sort,
    skipped: usize,
    is_paused: bool,
    is_over: bool,
}

/// Shows what there is, anew after each `interval`, until the user has seen enough.
///
/// Says whether a signal ended it.
pub(crate) fn watch(looker: &mut Looker, interval: Duration) -> io::Result<bool> {
    let signalled = Arc::new(AtomicBool::new(false));
    let signals = [SIGTERM, SIGHUP, SIGINT]
        .map(|signal| signal_hook::flag::register(signal, Arc::clone(&signalled)));
    // Restores the terminal before a panic is told of, too.
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, looker, interval, &signalled);
    ratatui::restore();
    for signal in signals.into_iter().flatten() {
        signal_hook::low_level::unregister(signal);
    }
    shown.map(|()| signalled.load(Ordering::Relaxed))
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    looker: &mut Looker,
    interval: Duration,
    signalled: &AtomicBool,
) -> io::Result<()> {
    let (mut history, mut screen) = (History::default(), Screen::default());
    while !screen.is_over && !signalled.load(Ordering::Relaxed) {
        if !screen.is_paused {
            history.add(looker.look());
        }
        let next = Instant::now() + interval;
        loop {
            let view = View::new(&history, screen.sort);
            screen.skipped = screen.skipped.min(view.processes.len().saturating_sub(1));
            terminal.draw(|frame| draw(frame, &view, screen.skipped, screen.is_paused))?;
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() || screen.is_over || signalled.load(Ordering::Relaxed) {
                break;
            }
            match event::poll(left.min(PATIENCE)) {
                Ok(true) => {
                    if let Event::Key(key) = event::read()? {
                        screen.press(key);
                    }
                }
                Ok(false) => {}
                // A signal woke it up.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

impl Screen {
    fn press(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                self.is_over = true;
            }
            KeyCode::Char('q') | KeyCode::Esc => self.is_over = true,
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Up => self.skipped = self.skipped.saturating_sub(1),
            KeyCode::Down => self.skipped = self.skipped.saturating_add(1),
            KeyCode::PageUp => self.skipped = self.skipped.saturating_sub(10),
            KeyCode::PageDown => self.skipped = self.skipped.saturating_add(10),
            KeyCode::Home => self.skipped = 0,
            KeyCode::Char(pressed) => {
                let chosen = Sort::ALL.iter().find(|(key, _, _)| *key == pressed);
                if let Some((_, sort, _)) = chosen {
                    (self.sort, self.skipped) = (*sort, 0);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_what_the_screen_says() {
        let mut screen = Screen::default();
        let mut press = |code| {
            screen.press(KeyEvent::new(code, KeyModifiers::NONE));
            screen
        };
        assert_eq!(press(KeyCode::Down).skipped, 1);
        assert_eq!(press(KeyCode::Up).skipped, 0);
        assert_eq!(press(KeyCode::Up).skipped, 0);
        press(KeyCode::PageDown);
        assert_eq!(press(KeyCode::Char('l')).sort, Sort::Leased);
        assert_eq!(press(KeyCode::Char('z')).skipped, 0);
        assert!(press(KeyCode::Char(' ')).is_paused);
        assert!(!press(KeyCode::Char('c')).is_over);
        assert!(press(KeyCode::Char('q')).is_over);
        let mut screen = Screen::default();
        screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(screen.is_over);
    }
}
