//! Every wording, logs as people have them, and what the simulator's own messages decide.

mod logs;
mod truth;
mod wordings;

use super::{OomCause, OomMessage, OomMessages, Scanner};

fn scan(log: &[u8]) -> OomMessages {
    let mut scanner = Scanner::new();
    scanner.push(log);
    scanner.finish("log")
}

/// The only message of a text.
fn only(text: &str) -> OomMessage {
    let found = scan(text.as_bytes());
    assert_eq!(
        (found.message_count, found.messages.len()),
        (1, 1),
        "{text}: {found:#?}"
    );
    found.messages.into_iter().next().unwrap()
}

fn causes(message: &OomMessage) -> Vec<OomCause> {
    message.causes.iter().map(|it| it.cause).collect()
}

fn open(message: &OomMessage) -> Vec<OomCause> {
    message.undecided.iter().map(|it| it.cause).collect()
}
