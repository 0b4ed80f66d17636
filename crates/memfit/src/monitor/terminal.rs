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
    let shown = on_terminal(|terminal| show(terminal, looker, interval, &signalled));
    for signal in signals.into_iter().flatten() {
        signal_hook::low_level::unregister(signal);
    }
    shown.map(|()| signalled.load(Ordering::Relaxed))
}

/// Takes the terminal for as long as the work takes, and gives it back before a panic is told of, too.
fn on_terminal<T>(
    work: impl FnOnce(&mut ratatui::DefaultTerminal) -> io::Result<T>,
) -> io::Result<T> {
    let mut terminal = ratatui::try_init()?;
    let done = work(&mut terminal);
    ratatui::restore();
    done
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
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    use ratatui::crossterm::terminal::is_raw_mode_enabled;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};

    use super::*;

    const MESSAGE: &str = "a frame that cannot be drawn";

    #[test]
    #[ignore = "needs a terminal: the test below runs it on one"]
    fn panics_while_it_draws() {
        let _never = on_terminal(|terminal| -> io::Result<()> {
            assert!(is_raw_mode_enabled().unwrap());
            terminal.draw(|_| {})?;
            terminal.draw(|_| panic!("{MESSAGE}"))?;
            Ok(())
        });
    }

    #[test]
    fn a_panic_while_drawing_leaves_a_terminal_to_work_on() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let open = || {
            let slave = File::options().read(true).write(true).open(&path);
            Stdio::from(OwnedFd::from(slave.unwrap()))
        };
        // Until the other end is opened, it has no settings.
        let first = File::options().read(true).write(true).open(&path).unwrap();
        tcsetwinsize(&first, size).unwrap();
        let before = tcgetattr(&first).unwrap();
        let name = "monitor::terminal::tests::panics_while_it_draws";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture"])
            .env("RUST_BACKTRACE", "0")
            .env("TERM", "xterm")
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .spawn()
            .unwrap();
        let reader = std::thread::spawn(move || {
            let (mut shown, mut master) = (Vec::new(), File::from(master));
            // The end of a terminal is an error.
            let _end = master.read_to_end(&mut shown);
            String::from_utf8_lossy(&shown).into_owned()
        });
        assert!(!child.wait().unwrap().success());
        let after = tcgetattr(&first).unwrap();
        drop(first);
        let shown = reader.join().unwrap();
        let last = |text: &str| shown.rfind(text);
        assert!(shown.contains("\x1b[?1049h"), "{shown:?}");
        let left = last("\x1b[?1049l").expect("the second screen is left");
        assert!(last(MESSAGE).unwrap() > left, "{shown:?}");
        assert!(last("\x1b[?25h") > last("\x1b[?25l"), "the cursor is there");
        assert_eq!(
            (after.local_modes, after.input_modes, after.output_modes),
            (before.local_modes, before.input_modes, before.output_modes)
        );
    }

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
