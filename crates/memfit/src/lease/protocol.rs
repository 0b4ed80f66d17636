//! What client and broker say to each other: one JSON document a line.
//!
//! Responsible for the shapes and limits of messages. Not responsible for sockets, nor for what a
//! request means ([`memfit_engine::share::lease`]).
//!
//! The client speaks first, with `hello`. A request that cannot be granted, or not be read but for its number, is
//! answered with `refused` and changes nothing; any other line that cannot be read ends the connection after one
//! `error`, and a client that holds leases may come back to them. Sizes are bytes and devices are names, `host`
//! or `cuda:0`.

use serde::{Deserialize, Serialize};

use super::amounts::Amounts;

/// The version of the protocol; both sides must speak the same.
pub const VERSION: u32 = 1;
/// Longest line that the broker reads, its end included.
pub const REQUEST_BYTES: usize = 16 << 10;
/// The same for the first line, which may present all that a client holds.
pub const HELLO_BYTES: usize = 256 << 10;
/// Longest line that a client reads: a status names every lease.
pub const REPLY_BYTES: usize = 16 << 20;
/// Longest name or label.
pub const NAME_BYTES: usize = 200;

/// From a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// The first message.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// What to call the process.
        name: String,
        /// Who this was before the broker went away.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resume: Option<Resume>,
    },
    /// Asks for a lease.
    Reserve {
        /// The client's name for this request; the answer carries it.
        request: u64,
        /// Bytes by device.
        claims: Amounts,
        /// What would do when asked to shrink; the claims when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        floor: Option<Amounts>,
        /// Higher goes first.
        #[serde(default)]
        priority: i8,
        /// How long to wait: 0 is not at all, `null` is for ever.
        wait_ms: Option<u64>,
        /// The lease ends after so long unless renewed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        time_to_live_ms: Option<u64>,
        /// What the memory is for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        label: Option<String>,
    },
    /// Takes up a reservation.
    Commit {
        /// The client's name for this request.
        request: u64,
        /// The reserved lease.
        lease: u64,
        /// The revision that the client knows.
        revision: u64,
    },
    /// Asks for more, or gives a part back.
    Resize {
        /// The client's name for this request.
        request: u64,
        /// The committed lease.
        lease: u64,
        /// The revision that the client knows.
        revision: u64,
        /// What it shall hold.
        claims: Amounts,
        /// How long growth may wait: 0 is not at all, `null` is for ever.
        wait_ms: Option<u64>,
    },
    /// Keeps a lease with a time to live.
    Renew {
        /// The client's name for this request.
        request: u64,
        /// The lease.
        lease: u64,
    },
    /// Gives a lease back.
    Release {
        /// The client's name for this request.
        request: u64,
        /// The lease.
        lease: u64,
    },
    /// Takes back a request that waits.
    Cancel {
        /// The request that waits.
        request: u64,
    },
    /// Will not shrink.
    Decline {
        /// The lease that was to shrink.
        lease: u64,
    },
    /// Asks who holds what.
    Status {
        /// The client's name for this request.
        request: u64,
    },
}

/// A client that was here before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// The number that `welcome` gave it.
    pub client: u64,
    /// All leases it holds; what is not named ends.
    pub leases: Vec<Held>,
}

/// A lease as its holder knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// The lease.
    pub lease: u64,
    /// How often it changed.
    pub revision: u64,
    /// Bytes by device.
    pub claims: Amounts,
    /// Whether it was taken up.
    #[serde(default)]
    pub is_committed: bool,
}

impl Held {
    /// Its number, how often it changed, and its bytes by device.
    #[must_use]
    pub fn told(self) -> (u64, u64, Amounts) {
        (self.lease, self.revision, self.claims)
    }
}

/// From the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The answer to `hello`.
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// The number of this client, for `resume`.
        client: u64,
        /// Capacity by device.
        devices: Amounts,
        /// The resumed leases as they stand; this is the truth about them.
        leases: Vec<Held>,
    },
    /// A lease was reserved.
    Granted {
        /// Which request.
        request: u64,
        /// The lease, at revision 1.
        lease: u64,
        /// Bytes by device.
        claims: Amounts,
        /// It expires unless committed within.
        commit_within_ms: u64,
    },
    /// A lease was committed, resized or renewed.
    Changed {
        /// Which request.
        request: u64,
        /// The lease.
        lease: u64,
        /// Its revision now.
        revision: u64,
        /// Its bytes now.
        claims: Amounts,
    },
    /// The request waits; another answer follows.
    Queued {
        /// Which request.
        request: u64,
        /// Requests that are served before it.
        ahead: u64,
    },
    /// The request was refused and nothing changed.
    Refused {
        /// Which request.
        request: u64,
        /// Why.
        refusal: Refused,
    },
    /// A lease ended.
    Ended {
        /// Which request ended it, if one did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        request: Option<u64>,
        /// The lease.
        lease: u64,
        /// Why.
        cause: Cause,
    },
    /// Somebody needs bytes of this lease: `resize` it or `decline`.
    Shrink {
        /// The lease.
        lease: u64,
        /// What it should hold.
        to: Amounts,
        /// After that the broker asks no longer.
        within_ms: u64,
    },
    /// The answer to `status`.
    Status {
        /// Which request.
        request: u64,
        /// Who holds what.
        status: Box<super::status::Status>,
    },
    /// The connection ends, because of this.
    Error {
        /// What was wrong.
        message: String,
    },
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// For programs.
    pub reason: Reason,
    /// For people.
    pub message: String,
    /// Where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// What was asked for there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
    /// The largest that would have been granted there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_bytes: Option<u64>,
    /// The lease's revision, where another was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
}

/// Why a request was refused, in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the engine's `Refusal` says what each means")]
pub enum Reason {
    UnknownDevice,
    AboveCapacity,
    FloorAboveClaims,
    NoRoom,
    TimedOut,
    Contended,
    AlreadyWaiting,
    Cancelled,
    UnknownLease,
    UnknownRequest,
    Stale,
    WrongPhase,
    HeldBack,
    NotRecorded,
    /// It cannot be read, or is longer than it may be.
    BadRequest,
    /// The client holds or asks for more leases than one may.
    TooMany,
}

/// Why a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the engine's `End` says what each means")]
pub enum Cause {
    Released,
    Expired,
    ClientGone,
    NotPresented,
    Lost,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lease::frame::Lines;

    /// Messages that are valid, one of each kind that has fields worth breaking.
    const VALID: [&str; 5] = [
        r#"{"hello":{"version":1,"name":"n","resume":{"client":7,"leases":[{"lease":1,"revision":2,"claims":{"host":3}}]}}}"#,
        r#"{"reserve":{"request":1,"claims":{"host":18446744073709551615,"cuda:0":0},"floor":{},"wait_ms":null}}"#,
        r#"{"resize":{"request":2,"lease":3,"revision":4,"claims":{"host":5},"wait_ms":0}}"#,
        r#"{"cancel":{"request":9}}"#,
        r#"{"status":{"request":0}}"#,
    ];

    /// A message with some bytes changed, taken out or put in, perhaps without its end.
    fn broken() -> impl Strategy<Value = Vec<u8>> {
        let edits =
            prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..6);
        (0..VALID.len(), edits, any::<bool>()).prop_map(|(which, edits, ends)| {
            let mut bytes = VALID[which].as_bytes().to_vec();
            for (place, byte, how) in edits {
                let place = place.index(bytes.len().max(1));
                match how {
                    0 if place < bytes.len() => bytes[place] = byte,
                    1 if place < bytes.len() => drop(bytes.remove(place)),
                    _ => bytes.insert(place.min(bytes.len()), byte),
                }
            }
            if ends {
                bytes.push(b'\n');
            }
            bytes
        })
    }

    #[test]
    fn the_samples_are_messages() {
        for text in VALID {
            serde_json::from_str::<Request>(text).unwrap();
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused_and_what_is_read_can_be_said_again(
            messages in prop::collection::vec(broken(), 1..5),
            size in 1..64_usize,
            limit in 8..400_usize,
        ) {
            let mut lines = Lines::new(limit);
            for piece in messages.concat().chunks(size) {
                lines.push(piece);
                loop {
                    match lines.next() {
                        Ok(Some(line)) => {
                            prop_assert!(line.len() < limit);
                            if let Ok(request) = serde_json::from_slice::<Request>(line) {
                                let said = serde_json::to_vec(&request).unwrap();
                                prop_assert_eq!(serde_json::from_slice::<Request>(&said).unwrap(), request);
                            }
                            // A client reads what a broker says with the same care.
                            let _reply = serde_json::from_slice::<Reply>(line);
                        }
                        Ok(None) => break,
                        // Nothing after it can be read: the connection ends.
                        Err(_) => return Ok(()),
                    }
                }
            }
        }
    }
}
