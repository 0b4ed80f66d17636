//! Integers in few bytes.
//!
//! Responsible for the byte form of columns of integers: variable length, differences zigzag, then zlib. The page's
//! `decode.js` reads the same. Not responsible for which columns there are.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// Bytes being written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) bytes: Vec<u8>,
}

impl Writer {
    /// Seven bits a byte, lowest first; the high bit says that more follow.
    pub(super) fn unsigned(&mut self, mut value: u64) {
        loop {
            // The lowest byte of the value.
            let low = value.to_le_bytes()[0];
            value >>= 7;
            if value == 0 {
                return self.bytes.push(low);
            }
            self.bytes.push(low | 0x80);
        }
    }

    /// A column of integers, one after the other.
    pub(super) fn plain(&mut self, values: impl Iterator<Item = u64>) {
        for value in values {
            self.unsigned(value);
        }
    }

    /// A column as differences from the value before, the first from 0; small either way of zero.
    pub(super) fn differences(&mut self, values: impl Iterator<Item = u64>) {
        let mut before = 0_u64;
        for value in values {
            let difference = value.wrapping_sub(before).cast_signed();
            self.unsigned(((difference << 1) ^ (difference >> 63)).cast_unsigned());
            before = value;
        }
    }

    pub(super) fn deflated(&self) -> Vec<u8> {
        deflated(&self.bytes)
    }
}

/// The bytes as a zlib stream.
#[must_use]
pub fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing into memory cannot fail.
    let _infallible = encoder.write_all(bytes);
    encoder.finish().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_seven_bits_a_byte() {
        let mut writer = Writer::default();
        writer.plain([0, 127, 128, u64::MAX].into_iter());
        assert_eq!(writer.bytes.len(), 1 + 1 + 2 + 10);
        assert_eq!(writer.bytes[..4], [0, 0x7f, 0x80, 1]);
    }

    #[test]
    fn differences_are_small_both_ways() {
        let mut writer = Writer::default();
        writer.differences([1000, 999, 1001, 1001].into_iter());
        assert_eq!(writer.bytes, [0xd0, 0x0f, 1, 4, 0]);
    }
}
