//! What PyTorch's OOM message decides, and what it does not.
//!
//! A person who has only the text of an error gets what its numbers show. Responsible for finding the messages in a log, for
//! reading every wording of torch 1.0 to 2.15, and for the arithmetic. Not responsible for a cause that needs
//! the recorded history: [`crate::explain`] reads snapshots.
//!
//! # The arithmetic
//!
//! The message is written after the allocator has given back every segment that it could. Its numbers divide the device:
//!
//! ```text
//! total = alive + private + unallocated + non_pytorch + others + free
//!         \______ reserved (R) _______/
//!         \____________ this process _____________/
//! ```
//!
//! `request` (A) is what the driver was asked for: a segment, which is the request rounded up. Below 10 MiB a segment is 2 or
//! 20 MiB, so the request may be smaller (`need`). `usable` is the free memory below the limit (L) of the process.
//!
//! | cause | shown when |
//! |---|---|
//! | `limit` | `R + A > L` |
//! | `expandable_reserve` | the message says so |
//! | `too_much_alive` | `need > unallocated + private + usable`: the bytes are not there, however they are arranged |
//! | `other_processes` | the device was out, and with what others hold the request would have had room |
//! | `non_pytorch` | the same for what this process holds outside PyTorch beyond a CUDA context |
//! | `private_pools` | the same for what private pools hold unused |
//! | `fragmentation_possible` | `A <= unallocated + usable`: the bytes are there, perhaps not in one piece |
//! | `driver_had_room` | `A + 20 MiB <= usable`: expandable segments grow by pages of 20 MiB |
//!
//! Printed numbers are rounded, so each is a range ([`Amount`]). A cause is named only where it holds for every number in
//! the ranges; where it holds for some of them, it is left open ([`Undecided`]).

mod amount;
mod document;
mod judge;
mod log;
mod numbers;
mod read;
mod scan;
mod words;

pub use amount::Amount;
pub use document::{
    Kind, NextStep, OomCause, OomMessage, OomMessages, OtherProcess, SCHEMA_VERSION, ShownCause,
    Undecided,
};
pub use scan::Scanner;

#[cfg(test)]
mod tests;
