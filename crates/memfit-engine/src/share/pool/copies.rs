//! Where the copy of a model that is parked goes: to the host's memory, or on to the disk.
//!
//! Responsible for keeping all copies of a pool together within the host's share, and for which of them lie on
//! the disk. Not responsible for which model is parked (`victims.rs`) nor for the estimates (`habits.rs`).
//!
//! Having a byte back from the disk costs the same for every model, and it is paid when the model is used
//! next: so the copies whose models are expected last belong there. A copy moves on only for a model that is
//! expected sooner; what finds no room then goes to the disk at once, and a copy larger than the whole share
//! goes there with what is beyond it. Writing is not counted: one of the two is written either way.

use super::ModelId;
use crate::bytes::Bytes;

/// The host's share for copies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// All of it.
    pub(super) whole: Bytes,
    /// What no copy has.
    pub(super) free: Bytes,
    /// What copies have that are on their way out of it.
    pub(super) coming: Bytes,
}

/// A copy that could move on to the disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Copy {
    pub(super) model: ModelId,
    /// Requests until its model is expected.
    pub(super) until: f64,
}

/// What to do with a model that is to be parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Park it, with so many bytes in the host's memory.
    Here(Bytes),
    /// There is room for it soon.
    Soon,
    /// Move this one's copy to the disk first.
    After(ModelId),
}

/// Finds a place for a model's bytes, which are needed again after `until` requests.
pub(super) fn place(bytes: Bytes, until: f64, room: Room, copies: &[Copy]) -> Place {
    let wanted = bytes.min(room.whole);
    if wanted <= room.free {
        return Place::Here(wanted);
    }
    if wanted <= room.free + room.coming {
        return Place::Soon;
    }
    // Of equals the one that came first.
    let last = copies
        .iter()
        .rev()
        .max_by(|a, b| a.until.total_cmp(&b.until));
    match last {
        Some(last) if last.until > until => Place::After(last.model),
        _ => Place::Here(room.free),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn room(whole: u64, free: u64, coming: u64) -> Room {
        Room {
            whole: Bytes(whole),
            free: Bytes(free),
            coming: Bytes(coming),
        }
    }

    fn copies(untils: &[u32]) -> Vec<Copy> {
        let numbered = untils.iter().enumerate();
        numbered
            .map(|(number, &until)| Copy {
                model: ModelId(number),
                until: f64::from(until),
            })
            .collect()
    }

    #[test]
    fn the_copy_that_is_expected_last_makes_way_for_one_that_is_expected_sooner() {
        let known = copies(&[3, 9, 9, 5]);
        let found = |bytes, until, free| place(Bytes(bytes), until, room(20, free, 0), &known);
        assert_eq!(found(4, 8.0, 4), Place::Here(Bytes(4)));
        assert_eq!(found(5, 8.0, 4), Place::After(ModelId(1)));
        assert_eq!(found(5, 9.0, 4), Place::Here(Bytes(4)));
        assert_eq!(
            place(Bytes(5), 8.0, room(20, 4, 1), &known),
            Place::Soon,
            "what is on its way is waited for"
        );
        assert_eq!(found(50, 9.0, 20), Place::Here(Bytes(20)));
        assert_eq!(
            place(Bytes(5), 1.0, room(0, 0, 0), &[]),
            Place::Here(Bytes::ZERO)
        );
    }

    proptest! {
        /// Asked again after every move, the copies that stay are expected no later than the model, or all of
        /// it finds room; and there is never more than the share.
        #[test]
        fn what_ends_on_the_disk_is_expected_last(
            sizes in prop::collection::vec((1_u64..9, 1_u32..9), 0..8), bytes in 1_u64..30, until in 1_u32..9
        ) {
            let whole: u64 = sizes.iter().map(|(size, _)| size).sum();
            let mut left: Vec<(usize, u64, u32)> = Vec::new();
            for (number, &(size, until)) in sizes.iter().enumerate() {
                left.push((number, size, until));
            }
            let given = loop {
                let known: Vec<Copy> = left
                    .iter()
                    .map(|&(number, _, until)| Copy { model: ModelId(number), until: f64::from(until) })
                    .collect();
                let free = whole - left.iter().map(|(_, size, _)| size).sum::<u64>();
                match place(Bytes(bytes), f64::from(until), room(whole, free, 0), &known) {
                    Place::Here(given) => break given.0,
                    Place::After(gone) => left.retain(|(number, ..)| *number != gone.0),
                    Place::Soon => prop_assert!(false, "nothing is on its way"),
                }
            };
            let kept: u64 = left.iter().map(|(_, size, _)| size).sum();
            prop_assert!(kept + given <= whole);
            let is_whole = given == bytes.min(whole);
            prop_assert!(is_whole || left.iter().all(|(_, _, later)| *later <= until));
            // Nothing moved without need: what left is expected later than the model and than what stays.
            let gone = (0..sizes.len()).filter(|number| !left.iter().any(|(stays, ..)| stays == number));
            for number in gone {
                prop_assert!(sizes[number].1 > until);
                prop_assert!(left.iter().all(|(_, _, later)| *later <= sizes[number].1));
            }
        }
    }
}
