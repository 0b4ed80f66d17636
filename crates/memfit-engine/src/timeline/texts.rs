//! The text of stacks, as much as fits.
//!
//! Responsible for giving stacks numbers in order of importance, for writing each frame and string once, and for cutting
//! long strings, deep stacks and at last whole stacks, with a count of what was cut. Not responsible for
//! which stacks matter.

use std::collections::HashMap;

use serde::Serialize;

use super::coding::deflated;
use crate::snapshot::{Frame, Snapshot, StackIndex, TextIndex};

/// Frames written at most, before any budget: what a page can show of deep stacks.
const FRAMES: usize = 300_000;
/// Frames of one stack.
const DEPTH: usize = 80;
/// Characters of one string.
const CHARACTERS: usize = 240;

/// Stacks that are shown, numbered as they come.
#[derive(Debug, Default)]
pub(super) struct StackNumbers {
    numbers: HashMap<StackIndex, u32>,
    stacks: Vec<StackIndex>,
}

impl StackNumbers {
    pub(super) fn number(&mut self, stack: StackIndex) -> u32 {
        *self.numbers.entry(stack).or_insert_with(|| {
            self.stacks.push(stack);
            u32::try_from(self.stacks.len() - 1).unwrap_or(u32::MAX)
        })
    }

    pub(super) fn count(&self) -> usize {
        self.stacks.len()
    }
}

/// What the page reads.
#[derive(Debug, Default, Serialize)]
struct Written<'a> {
    strings: Vec<std::borrow::Cow<'a, str>>,
    /// File, function and line of each frame, one after the other.
    frames: Vec<u32>,
    /// For each stack how many outer frames were cut, then its frames, innermost first.
    stacks: Vec<Vec<u32>>,
}

/// The stacks' text, and how much is missing.
pub(super) struct Texts {
    pub(super) bytes: Vec<u8>,
    /// Stacks whose text is there; those after it are only numbers.
    pub(super) stacks: usize,
}

/// Writes the stacks within so many bytes: first at full depth, then at half of it and so on; when even one
/// frame each is too much, fewer stacks.
pub(super) fn fit(snapshot: &Snapshot, numbers: &StackNumbers, budget: usize) -> Texts {
    // A stack takes two bytes or more.
    let mut stacks = numbers.stacks.len().min(budget / 2);
    let deepest = |depth: usize, stacks: usize| {
        let lengths = numbers.stacks[..stacks].iter();
        let lengths = lengths.map(|&stack| snapshot.stacks.get(stack).len().min(depth));
        lengths.sum::<usize>() <= FRAMES
    };
    let mut depth = DEPTH;
    loop {
        if deepest(depth, stacks) || (depth == 1 && stacks == 0) {
            let written = write(snapshot, &numbers.stacks[..stacks], depth);
            let json = serde_json::to_vec(&written).unwrap_or_default();
            let bytes = deflated(&json);
            if bytes.len() <= budget || stacks == 0 {
                return Texts { bytes, stacks };
            }
        }
        if depth > 1 {
            depth /= 2;
        } else {
            stacks /= 2;
        }
    }
}

fn write<'a>(snapshot: &'a Snapshot, stacks: &[StackIndex], depth: usize) -> Written<'a> {
    let mut written = Written::default();
    let mut strings: HashMap<TextIndex, u32> = HashMap::new();
    let mut frames: HashMap<Frame, u32> = HashMap::new();
    for &stack in stacks {
        let all = snapshot.stacks.get(stack);
        let cut = all.len().saturating_sub(depth);
        let mut row = vec![u32::try_from(cut).unwrap_or(u32::MAX)];
        for frame in &all[..all.len() - cut] {
            let number = frames.get(frame).copied().unwrap_or_else(|| {
                let number = u32::try_from(frames.len()).unwrap_or(u32::MAX);
                frames.insert(*frame, number);
                for text in [frame.file, frame.function] {
                    let string = *strings.entry(text).or_insert_with(|| {
                        // The end of a path says more than its beginning, that of a function less.
                        let full = snapshot.texts.get(text);
                        written.strings.push(if text == frame.file {
                            tail(full, CHARACTERS)
                        } else {
                            head(full, CHARACTERS)
                        });
                        u32::try_from(written.strings.len() - 1).unwrap_or(u32::MAX)
                    });
                    written.frames.push(string);
                }
                written.frames.push(frame.line);
                number
            });
            row.push(number);
        }
        written.stacks.push(row);
    }
    written
}

/// At most so many characters of the beginning.
pub(super) fn head(text: &str, most: usize) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some((end, _)) => format!("{}…", &text[..end]).into(),
    }
}

/// At most so many characters of the end.
fn tail(text: &str, most: usize) -> std::borrow::Cow<'_, str> {
    match text.char_indices().rev().nth(most) {
        None => text.into(),
        Some((before, character)) => format!("…{}", &text[before + character.len_utf8()..]).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_strings_are_cut_at_characters() {
        assert_eq!(head("äöü", 2), "äö…");
        assert_eq!(head("äöü", 3), "äöü");
        assert_eq!(tail("äöü", 2), "…öü");
        assert_eq!(tail("äöü", 3), "äöü");
    }
}
