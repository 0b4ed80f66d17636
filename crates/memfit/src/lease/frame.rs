//! Lines of bounded length out of a stream of bytes.
//!
//! Responsible for cutting and for the limit. Not responsible for reading or for what a line says.

/// A line is longer than it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a message is longer than {limit} bytes")]
pub(crate) struct TooLong {
    /// The limit.
    pub(crate) limit: usize,
}

/// Collects bytes and gives lines.
#[derive(Debug)]
pub(crate) struct Lines {
    bytes: Vec<u8>,
    /// Where the next line begins.
    start: usize,
    /// Up to where there is no line end.
    searched: usize,
    limit: usize,
}

impl Lines {
    pub(crate) const fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            searched: 0,
            limit,
        }
    }

    /// From the next line on another limit.
    pub(crate) const fn limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Adds what was read.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.searched -= self.start;
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, without its end.
    ///
    /// # Errors
    ///
    /// The line is too long, ended or not. Nothing after it can be read.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, TooLong> {
        let found = self.bytes[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n');
        let end = found.map(|found| self.searched + found);
        let length = end.unwrap_or(self.bytes.len()) - self.start;
        if length >= self.limit {
            return Err(TooLong { limit: self.limit });
        }
        let Some(end) = end else {
            self.searched = self.bytes.len();
            return Ok(None);
        };
        let line = self.start..end;
        self.start = end + 1;
        self.searched = self.start;
        Ok(Some(&self.bytes[line]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_however_the_bytes_arrive() {
        let text = b"one\ntwo\n\nthree\nrest";
        for size in 1..text.len() {
            let mut lines = Lines::new(6);
            let mut found = Vec::new();
            for piece in text.chunks(size) {
                lines.push(piece);
                while let Some(line) = lines.next().unwrap() {
                    found.push(String::from_utf8_lossy(line).into_owned());
                }
            }
            assert_eq!(found, ["one", "two", "", "three"], "{size}");
        }
    }

    #[test]
    fn a_line_beyond_the_limit_is_refused_before_it_ends() {
        let mut lines = Lines::new(4);
        lines.push(b"abc");
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"d");
        assert_eq!(lines.next(), Err(TooLong { limit: 4 }));
    }
}
