//! A log as bytes, without what loggers, terminals and line breaks added.
//!
//! Responsible for colours, prefixes of lines and lost or added white space. Not responsible for what a message says.
//!
//! A message is compared without any white space, so it does not matter where a terminal or an editor broke its line. Where
//! a launcher writes a prefix before each line, a broken message has it in its middle:
//!
//! ```text
//! [rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to
//! [rank0]: allocate 20.00 MiB.
//! ```
//!
//! The part of a line's start that is the same as in the message's first line, digits apart, is such a prefix.

/// What of a log is compared, and where it came from.
pub(super) struct Plain {
    /// Printable ASCII and line feeds; no colours.
    pub(super) text: Vec<u8>,
    /// For each byte of `text` its place in the log.
    pub(super) places: Vec<usize>,
}

/// Longer starts of lines are no prefixes.
const MAX_PREFIX_BYTES: usize = 512;
const ESCAPE: u8 = 0x1b;
const BELL: u8 = 0x07;

impl Plain {
    pub(super) fn of(log: &[u8]) -> Self {
        let mut plain = Self {
            text: Vec::with_capacity(log.len()),
            places: Vec::with_capacity(log.len()),
        };
        let mut at = 0;
        while let Some(&byte) = log.get(at) {
            if byte == ESCAPE {
                at += sequence_length(&log[at..]);
                continue;
            }
            // Other control characters are dropped, and so are the zeros of UTF-16, bytes of frames and marks of order.
            let kept = match byte {
                b'\r' => Some(b'\n'),
                b'\n' | b' '..=b'~' => Some(byte),
                b'\t' => Some(b' '),
                _ => None,
            };
            if let Some(kept) = kept {
                plain.text.push(kept);
                plain.places.push(at);
            }
            at += 1;
        }
        plain
    }

    /// The text from a place on without white space, at most `limit` bytes of it; later lines lose the prefix that they
    /// share with the line of that place.
    pub(super) fn squeezed_from(&self, start: usize, limit: usize) -> String {
        let text = &self.text;
        let near = &text[start.saturating_sub(MAX_PREFIX_BYTES)..start];
        let newline = near.iter().rposition(|&byte| byte == b'\n');
        let head = match newline {
            Some(newline) => &near[newline + 1..],
            // The start of the log, or a line whose start is too far away to be a prefix.
            None if near.len() == start => near,
            None => &[],
        };
        let end = text.len().min(start.saturating_add(limit));
        let mut squeezed = String::new();
        for (number, line) in text[start..end].split(|&byte| byte == b'\n').enumerate() {
            let prefix = if number == 0 {
                0
            } else {
                shared_prefix(head, line)
            };
            squeezed.extend(
                line[prefix..]
                    .iter()
                    .filter(|&&b| b != b' ')
                    .map(|&b| char::from(b)),
            );
        }
        squeezed
    }

    /// The text without white space, with the place of each byte in the text.
    pub(super) fn squeezed(&self) -> (String, Vec<usize>) {
        let kept = self.text.iter().enumerate();
        kept.filter(|(_, byte)| !matches!(byte, b' ' | b'\n'))
            .map(|(place, &byte)| (char::from(byte), place))
            .unzip()
    }
}

/// Bytes of a terminal's control sequence that starts here (ECMA-48).
fn sequence_length(rest: &[u8]) -> usize {
    let ends_at = |is_end: fn(u8) -> bool| rest.iter().skip(2).position(|&byte| is_end(byte));
    let length = match rest.get(1) {
        Some(b'[') => ends_at(|byte| matches!(byte, 0x40..=0x7e | b'\n')),
        // A title or a link.
        Some(b']') => ends_at(|byte| matches!(byte, BELL | ESCAPE | b'\n')),
        _ => return rest.len().min(2),
    };
    length.map_or(rest.len(), |length| length + 3)
}

/// Bytes at the start of a line that are the prefix of another line, too. A prefix ends with a blank and has a
/// mark of punctuation, so that no number of the message itself is taken for one.
fn shared_prefix(head: &[u8], line: &[u8]) -> usize {
    let (mut ours, mut theirs) = (0, 0);
    let (mut prefix, mut has_mark) = (0, false);
    while let (Some(&a), Some(&b)) = (head.get(ours), line.get(theirs)) {
        if a.is_ascii_digit() && b.is_ascii_digit() {
            ours += digits(&head[ours..]);
            theirs += digits(&line[theirs..]);
            continue;
        }
        if a != b {
            break;
        }
        (ours, theirs) = (ours + 1, theirs + 1);
        has_mark |= b":]|>)}-".contains(&a);
        if a == b' ' && has_mark {
            prefix = theirs;
        }
    }
    prefix
}

fn digits(text: &[u8]) -> usize {
    text.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn squeezed(log: &[u8], start: &str) -> String {
        let plain = Plain::of(log);
        let text = String::from_utf8(plain.text.clone()).unwrap();
        plain.squeezed_from(text.find(start).unwrap(), 1000)
    }

    #[test]
    fn colours_prefixes_and_line_breaks_are_not_part_of_a_message() {
        for log in [
            &b"x: out of memory.\nTried to\n"[..],
            b"x: out\xc2\xa0of memory. Tr\r\nied to",
            b"\x1b[31mx: out of\x1b[0m memory.\x1b]8;;http://a\x07 Tried to",
            b"[rank0]: E: out of\n[rank0]: memory. Tried\n[rank0]: to",
            b"7: out of\n7: memory. Tried\n7: to",
            b"2026-01-02 03:04:05,678 - ERROR - x: out of\n2026-01-02 03:04:06,9 - ERROR - memory. Tried to",
            b"(pid=12) out of memory.\n(pid=345) Tried to",
        ] {
            let log_text = String::from_utf8_lossy(log);
            assert_eq!(squeezed(log, "out"), "outofmemory.Triedto", "{log_text}");
        }
    }

    #[test]
    fn numbers_at_the_start_of_a_line_stay() {
        for log in [
            &b"7: out of\n7.79 GiB"[..],
            b"2026-01-01 out of\n7.79 GiB",
            b"7 out of\n7.79 GiB",
        ] {
            assert_eq!(squeezed(log, "out"), "outof7.79GiB");
        }
    }

    #[test]
    fn no_sequence_runs_away() {
        for log in [
            &b"\x1b"[..],
            b"\x1b[",
            b"\x1b]",
            b"\x1b[31",
            b"a\x1b",
            b"\x1b]8;;x\x1b\\a",
        ] {
            let plain = Plain::of(log);
            assert_eq!(plain.text.len(), plain.places.len());
        }
    }
}
