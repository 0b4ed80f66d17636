//! Equal things get equal numbers.
//!
//! Responsible for the tables that number distinct strings, frames and stacks while a snapshot is read.
//! Not responsible for what refers to them.
//!
//! Hashes are keyed by a seed drawn once per table, so that no file can be written whose entries all
//! collide. Nothing iterates in hash order: numbers are given in order of arrival, whatever the seed.

use std::hash::{BuildHasher, RandomState};

/// Hash index over entries that live in another table: open addressing, linear probing.
pub(super) struct Index {
    /// `tag << 32 | number + 1`; 0 is free.
    cells: Vec<u64>,
    count: usize,
    seed: u64,
}

/// A factor with well spread bits (`2^64 / phi`, odd), as in Fibonacci hashing.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Index {
    pub(super) fn new() -> Self {
        // Odd, so that multiplying loses nothing.
        let seed = RandomState::new().hash_one(FACTOR) | 1;
        Self {
            cells: vec![0; 64],
            count: 0,
            seed,
        }
    }

    pub(super) fn hash_bytes(&self, bytes: &[u8]) -> u32 {
        let mut chunks = bytes.chunks_exact(8);
        let mut hash = self.seed ^ bytes.len() as u64;
        for chunk in &mut chunks {
            let word = chunk
                .iter()
                .rev()
                .fold(0, |word, &byte| word << 8 | u64::from(byte));
            hash = fold(hash ^ word, self.seed ^ FACTOR);
        }
        let rest = chunks.remainder().iter();
        let word = rest
            .rev()
            .fold(0, |word, &byte| word << 8 | u64::from(byte));
        spread(fold(hash ^ word, self.seed ^ FACTOR))
    }

    pub(super) fn hash_words(&self, words: &[u32]) -> u32 {
        let mut hash = self.seed ^ words.len() as u64;
        let (pairs, rest) = words.as_chunks::<2>();
        for &[low, high] in pairs {
            hash = fold(
                hash ^ (u64::from(high) << 32 | u64::from(low)),
                self.seed ^ FACTOR,
            );
        }
        for &word in rest {
            hash = fold(hash ^ u64::from(word), self.seed ^ FACTOR);
        }
        spread(hash)
    }

    /// The number of the equal entry, if there is one.
    pub(super) fn find(&self, hash: u32, mut is_equal: impl FnMut(u32) -> bool) -> Option<u32> {
        let mask = self.cells.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let cell = self.cells[at];
            let number = low_half(cell);
            if cell == 0 {
                return None;
            }
            if cell >> 32 == u64::from(hash) && is_equal(number - 1) {
                return Some(number - 1);
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds an entry that is not there.
    pub(super) fn insert(&mut self, hash: u32, number: u32) {
        if (self.count + 1) * 3 > self.cells.len() * 2 {
            let old = std::mem::take(&mut self.cells);
            self.cells = vec![0; old.len() * 2];
            for cell in old.into_iter().filter(|&cell| cell != 0) {
                self.place(cell);
            }
        }
        self.place((u64::from(hash) << 32) | (u64::from(number) + 1));
        self.count += 1;
    }

    fn place(&mut self, cell: u64) {
        let mask = self.cells.len() - 1;
        let mut at = (cell >> 32) as usize & mask;
        while self.cells[at] != 0 {
            at = (at + 1) & mask;
        }
        self.cells[at] = cell;
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.cells.len() as u64 * 8
    }
}

/// Multiplies and folds the halves: every bit of the factors reaches every bit of the result.
#[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

fn spread(hash: u64) -> u32 {
    low_half(hash ^ (hash >> 32))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower half is what is asked for"
)]
pub(super) const fn low_half(word: u64) -> u32 {
    word as u32
}

/// Distinct strings in one run of text.
pub(super) struct TextTable {
    text: String,
    ends: Vec<usize>,
    index: Index,
}

impl TextTable {
    /// A table that starts with these words, numbered from 0.
    pub(super) fn starting_with(words: &[&str]) -> Self {
        let mut table = Self {
            text: String::new(),
            ends: Vec::new(),
            index: Index::new(),
        };
        for word in words {
            table.number_of(word).expect("the words are few");
        }
        table
    }

    /// The string's number; `None` when there are more than a number counts.
    pub(super) fn number_of(&mut self, text: &str) -> Option<u32> {
        let hash = self.index.hash_bytes(text.as_bytes());
        let (all, ends) = (&self.text, &self.ends);
        let known = self
            .index
            .find(hash, |number| slice(all, ends, number) == text.as_bytes());
        if known.is_some() {
            return known;
        }
        let number = u32::try_from(self.ends.len())
            .ok()
            .filter(|&n| n < u32::MAX)?;
        self.text.push_str(text);
        self.ends.push(self.text.len());
        self.index.insert(hash, number);
        Some(number)
    }

    pub(super) fn get(&self, number: u32) -> &str {
        let number = number as usize;
        let start = if number == 0 {
            0
        } else {
            self.ends[number - 1]
        };
        &self.text[start..self.ends[number]]
    }

    pub(super) fn held_bytes(&self) -> u64 {
        (self.text.capacity() + self.ends.capacity() * 8) as u64 + self.index.held_bytes()
    }
}

fn slice<'a>(text: &'a str, ends: &[usize], number: u32) -> &'a [u8] {
    let number = number as usize;
    let start = if number == 0 { 0 } else { ends[number - 1] };
    &text.as_bytes()[start..ends[number]]
}

/// Distinct sequences of numbers; number 0 is the empty one.
pub(super) struct SequenceTable {
    words: Vec<u32>,
    ends: Vec<u32>,
    index: Index,
}

impl SequenceTable {
    pub(super) fn new() -> Self {
        let mut index = Index::new();
        index.insert(index.hash_words(&[]), 0);
        Self {
            words: Vec::new(),
            ends: vec![0],
            index,
        }
    }

    /// The sequence's number; `None` when there are more words than a number counts.
    pub(super) fn number_of(&mut self, words: &[u32]) -> Option<u32> {
        let hash = self.index.hash_words(words);
        let known = self.index.find(hash, |number| self.get(number) == words);
        if known.is_some() {
            return known;
        }
        let number = u32::try_from(self.ends.len())
            .ok()
            .filter(|&n| n < u32::MAX)?;
        let end = u32::try_from(self.words.len() + words.len()).ok()?;
        self.words.extend_from_slice(words);
        self.ends.push(end);
        self.index.insert(hash, number);
        Some(number)
    }

    pub(super) fn get(&self, number: u32) -> &[u32] {
        let number = number as usize;
        let start = if number == 0 {
            0
        } else {
            self.ends[number - 1]
        };
        &self.words[start as usize..self.ends[number] as usize]
    }

    /// All but the empty one, in order.
    pub(super) fn rest(&self) -> impl Iterator<Item = &[u32]> {
        self.ends
            .windows(2)
            .map(|ends| &self.words[ends[0] as usize..ends[1] as usize])
    }

    pub(super) fn held_bytes(&self) -> u64 {
        (self.words.capacity() * 4 + self.ends.capacity() * 4) as u64 + self.index.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_things_get_equal_numbers_in_order_of_arrival() {
        let mut texts = TextTable::starting_with(&["", "one"]);
        let numbers: Vec<u32> = (0..1000)
            .filter_map(|i| texts.number_of(&i.to_string()))
            .collect();
        assert!(numbers.iter().copied().eq(2..1002));
        assert_eq!(texts.number_of("one"), Some(1));
        assert_eq!(texts.number_of("999"), Some(1001));
        assert_eq!(texts.get(1001), "999");
        assert_eq!(texts.get(0), "");

        let mut stacks = SequenceTable::new();
        assert_eq!(stacks.number_of(&[]), Some(0));
        assert_eq!(stacks.number_of(&[1, 2, 3]), Some(1));
        assert_eq!(stacks.number_of(&[1, 2]), Some(2));
        assert_eq!(stacks.number_of(&[1, 2, 3]), Some(1));
        assert!(stacks.rest().eq([&[1, 2, 3][..], &[1, 2][..]]));
    }
}
