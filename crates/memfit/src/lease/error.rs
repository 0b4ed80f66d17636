//! Why a lease was not got, changed or kept.

use super::protocol::{Cause, REQUEST_BYTES, Reason, Refused};
use super::socket::SocketError;

/// Why a lease was not got, changed or kept.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// There is no broker to talk to.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The broker says no.
    #[error("{}", .0.message)]
    Refused(Refused),
    /// The broker does not let this client in, or lets it in no longer.
    #[error("the broker ended the connection: {0}")]
    Rejected(String),
    /// The connection broke and did not come back in time.
    #[error("the connection to the broker broke: {0}")]
    Broken(String),
    /// The lease has ended.
    #[error("lease {lease} has ended ({cause:?})")]
    Ended {
        /// Which.
        lease: u64,
        /// Why.
        cause: Cause,
    },
    /// The caller did not want to wait longer.
    #[error("gave up waiting")]
    GaveUp,
    /// This process is a child of the one that holds the lease.
    #[error("the lease belongs to the process this one was forked from; take one of your own")]
    Forked,
}

impl LeaseError {
    /// The broker would not read it.
    pub(super) fn too_long() -> Self {
        Self::Refused(Refused {
            reason: Reason::BadRequest,
            message: format!("the request is longer than {REQUEST_BYTES} bytes"),
            device: None,
            asked_bytes: None,
            largest_bytes: None,
            revision: None,
        })
    }

    /// Why, in a word for programs.
    #[must_use]
    pub fn reason(&self) -> String {
        let reason = match self {
            Self::Refused(refused) => {
                let reason = serde_json::to_value(refused.reason).unwrap_or_default();
                return reason.as_str().unwrap_or_default().to_owned();
            }
            Self::Socket(SocketError::NoBroker(_)) => "no_broker",
            Self::Socket(SocketError::Away(_)) => "broker_away",
            Self::Socket(_) => "socket",
            Self::Rejected(_) => "rejected",
            Self::Broken(_) => "broken",
            Self::Ended { .. } => "ended",
            Self::GaveUp => "gave_up",
            Self::Forked => "forked",
        };
        reason.to_owned()
    }

    /// Where there is not enough, what was asked for there, and the largest that could have been had, where it is that.
    #[must_use]
    pub fn shortage(&self) -> (Option<String>, Option<u64>, Option<u64>) {
        let Self::Refused(refused) = self else {
            return (None, None, None);
        };
        let device = refused.device.clone();
        (device, refused.asked_bytes, refused.largest_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_where_there_is_not_enough() {
        let LeaseError::Refused(refused) = LeaseError::too_long() else {
            panic!("not refused");
        };
        let refused = Refused {
            device: Some("host".to_owned()),
            asked_bytes: Some(8),
            largest_bytes: Some(5),
            ..refused
        };
        let shortage = LeaseError::Refused(refused).shortage();
        assert_eq!(shortage, (Some("host".to_owned()), Some(8), Some(5)));
        assert_eq!(LeaseError::Forked.shortage(), (None, None, None));
    }
}
