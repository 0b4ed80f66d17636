//! How a model's memory is cut into pieces, as values.
//!
//! Responsible for [`Tensor`]s as they lie in the memory, for [`Piece`]s, ranges that are read and compared
//! one at a time, and for the whole pages that they lie on. Not responsible for their bytes.
//!
//! Pieces are in order, do not overlap, cover every byte of every tensor, and are no longer than
//! [`PIECE_BYTES`]. A tensor that a weights file holds has pieces of its own, so that each piece is
//! either in that file or not. All others share pieces with their neighbours and the padding between.

use std::ops::Range;

use super::error::ParkError;

/// Longest piece: long enough to hide a system call, short enough that a change of a row or two does not
/// write much else.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// A tensor in a model's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its names in the model, more than one if it is tied; none for a range that several tensors share.
    pub names: Vec<String>,
    /// Its first byte, from the start of the memory.
    pub start: u64,
    /// How many bytes.
    pub length: u64,
}

impl From<(Vec<String>, u64, u64)> for Tensor {
    fn from((names, start, length): (Vec<String>, u64, u64)) -> Self {
        Self {
            names,
            start,
            length,
        }
    }
}

/// A range of a model's memory and what of it is kept outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) length: u64,
    /// Place in the weights file, and the number of the tensor it belongs to, if that file holds it.
    pub(super) in_source: Option<(u64, usize)>,
    pub(super) copy: Option<Copied>,
    /// Hash of what is in memory, where that has to be written.
    pub(super) stale: Option<u128>,
}

impl Piece {
    /// The bytes of it.
    pub(super) const fn range(&self) -> Range<u64> {
        self.start..self.start + self.length
    }

    /// The pages that it lies on.
    pub(super) fn pages(&self, page: u64) -> Range<u64> {
        let Range { start, end } = self.range();
        start / page * page..end.next_multiple_of(page)
    }
}

/// A copy of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) hash: u128,
    pub(super) place: Place,
}

/// Where a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the nameless file of that number, at the piece's own start.
    Spill(u32),
    /// In the weights file.
    Source,
}

/// Cuts a memory of `length` bytes; `offset_in_source` says where a weights file holds a tensor.
pub(super) fn cut(
    length: u64,
    tensors: &[Tensor],
    offset_in_source: impl Fn(&Tensor) -> Option<u64>,
) -> Result<Vec<Piece>, ParkError> {
    let wrong = |reason| ParkError::Layout { length, reason };
    let mut pieces = Vec::new();
    // The range of neighbours without a place in the weights file that is being put together.
    let mut shared: Option<(u64, u64)> = None;
    let mut end = 0;
    for (number, tensor) in tensors.iter().enumerate() {
        if tensor.start < end {
            return Err(wrong("its tensors overlap or are out of order"));
        }
        end = tensor
            .start
            .checked_add(tensor.length)
            .filter(|&end| end <= length)
            .ok_or_else(|| wrong("a tensor ends behind its end"))?;
        if let Some(offset) = offset_in_source(tensor) {
            if let Some((from, to)) = shared.take() {
                split(&mut pieces, from, to, None);
            }
            let source = Some((offset, number));
            split(&mut pieces, tensor.start, end, source);
        } else {
            let from = shared.map_or(tensor.start, |(from, _)| from);
            shared = Some((from, end));
        }
    }
    if let Some((from, to)) = shared {
        split(&mut pieces, from, to, None);
    }
    Ok(pieces)
}

/// Adds the pieces of one range.
fn split(pieces: &mut Vec<Piece>, from: u64, to: u64, source: Option<(u64, usize)>) {
    let mut start = from;
    while start < to {
        let length = PIECE_BYTES.min(to - start);
        pieces.push(Piece {
            start,
            length,
            in_source: source.map(|(offset, tensor)| (offset + (start - from), tensor)),
            copy: None,
            stale: None,
        });
        start += length;
    }
}

/// The pages of pieces that have to be written, neighbours together.
pub(super) fn stale_pages(pieces: &[Piece], page: u64) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    for piece in pieces.iter().filter(|piece| piece.stale.is_some()) {
        let pages = piece.pages(page);
        match found.last_mut() {
            Some(last) if pages.start <= last.end => last.end = pages.end,
            _ => found.push(pages),
        }
    }
    found
}

/// Which file each page is in, if every piece is in one; neighbours together.
///
/// Whole pages are written, so where pieces share one, the file that was written last has all of it.
pub(super) fn pages_in_files(pieces: &[Piece], page: u64) -> Option<Vec<(Range<u64>, u32)>> {
    let mut found: Vec<(Range<u64>, u32)> = Vec::new();
    for piece in pieces {
        let Some(Place::Spill(number)) = piece.copy.map(|copy| copy.place) else {
            return None;
        };
        let mut pages = piece.pages(page);
        while let Some((last, other)) = found.last_mut() {
            if last.is_empty() {
                found.pop();
            } else if *other == number && pages.start <= last.end {
                pages.start = last.start;
                found.pop();
                break;
            } else if *other < number && pages.start < last.end {
                last.end = pages.start;
            } else {
                pages.start = pages.start.max(last.end);
                break;
            }
        }
        if !pages.is_empty() {
            found.push((pages, number));
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(start: u64, length: u64) -> Tensor {
        Tensor {
            names: vec![format!("t{start}")],
            start,
            length,
        }
    }

    proptest! {
        /// Judged byte by byte.
        #[test]
        fn every_byte_of_a_tensor_is_in_one_piece_and_knows_its_place(
            lengths in prop::collection::vec((0_u64..3, 0_u64..2_500_000, any::<bool>()), 0..6)
        ) {
            let mut tensors = Vec::new();
            let mut end = 0;
            for &(gap, length, _) in &lengths {
                tensors.push(tensor(end + gap * 64, length));
                end += gap * 64 + length;
            }
            let place = |tensor: &Tensor| {
                let number = tensors.iter().position(|other| other == tensor)?;
                lengths[number].2.then_some(1_000_000_000 * (number as u64 + 1))
            };
            let pieces = cut(end, &tensors, place).unwrap();
            let mut last = 0;
            for piece in &pieces {
                prop_assert!(piece.start >= last && piece.length > 0 && piece.length <= PIECE_BYTES);
                last = piece.start + piece.length;
            }
            for (number, tensor) in tensors.iter().enumerate() {
                for byte in [tensor.start, tensor.start + tensor.length / 2, (tensor.start + tensor.length).max(1) - 1] {
                    if !(tensor.start..tensor.start + tensor.length).contains(&byte) {
                        continue;
                    }
                    let holds = |piece: &&Piece| (piece.start..piece.start + piece.length).contains(&byte);
                    let holders: Vec<_> = pieces.iter().filter(holds).collect();
                    prop_assert_eq!(holders.len(), 1);
                    let at = holders[0].in_source.map(|(offset, owner)| (offset + (byte - holders[0].start), owner));
                    let wanted = place(tensor).map(|offset| (offset + (byte - tensor.start), number));
                    prop_assert_eq!(at, wanted);
                }
            }
        }
    }

    proptest! {
        /// Judged page by page: the youngest file of the pieces on it, and every stale byte is written.
        #[test]
        fn each_page_is_in_the_file_that_was_written_last(
            pieces in prop::collection::vec((0_u64..9000, 1_u64..9000, 0_u32..4, any::<bool>()), 1..12)
        ) {
            const PAGE: u64 = 4096;
            let mut end = 0;
            let mut cut = Vec::new();
            for (gap, length, number, is_stale) in pieces {
                let start = end + gap;
                end = start + length;
                let place = Place::Spill(number);
                let copy = Some(Copied { hash: 0, place });
                let stale = is_stale.then_some(0);
                cut.push(Piece { start, length, in_source: None, copy, stale });
            }
            let on = |page: u64| {
                let bytes = page * PAGE..(page + 1) * PAGE;
                cut.iter().filter(move |piece| piece.start < bytes.end && bytes.start < piece.range().end)
            };
            let number = |piece: &Piece| match piece.copy.unwrap().place {
                Place::Spill(number) => number,
                Place::Source => unreachable!(),
            };
            let files = pages_in_files(&cut, PAGE).unwrap();
            let stale = stale_pages(&cut, PAGE);
            for page in 0..end.div_ceil(PAGE) {
                let at = page * PAGE;
                let found: Vec<u32> =
                    files.iter().filter(|(pages, _)| pages.contains(&at)).map(|found| found.1).collect();
                prop_assert_eq!(found, on(page).map(number).max().into_iter().collect::<Vec<_>>());
                let is_written = stale.iter().filter(|pages| pages.contains(&at)).count();
                prop_assert_eq!(is_written == 1, on(page).any(|piece| piece.stale.is_some()));
                prop_assert!(is_written <= 1);
            }
            for ((before, one), (after, other)) in files.iter().zip(files.iter().skip(1)) {
                prop_assert!(before.end <= after.start && (before.end < after.start || one != other));
            }
            cut[0].copy = None;
            prop_assert_eq!(pages_in_files(&cut, PAGE), None);
        }
    }

    #[test]
    fn layouts_that_cannot_be_are_refused() {
        let nowhere = |_: &Tensor| None;
        assert!(cut(100, &[tensor(0, 60), tensor(40, 10)], nowhere).is_err());
        assert!(cut(100, &[tensor(90, 20)], nowhere).is_err());
        assert!(cut(100, &[tensor(u64::MAX, 20)], nowhere).is_err());
        assert_eq!(cut(100, &[tensor(0, 0)], nowhere).unwrap(), []);
    }
}
