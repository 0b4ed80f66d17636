//! Who holds what, who waits, and how the machine is: the document behind `memfit ps`.

use memfit_memory::pressure::Pressure;
use serde::{Deserialize, Serialize};

use super::amounts::Amounts;

/// The broker's answer to `status`. Integers are bytes unless the name says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The broker's process.
    pub pid: u32,
    /// Its version of memfit.
    pub version: String,
    /// How long it has run.
    pub up_seconds: f64,
    /// Whether grants are held back until clients of before a restart are back.
    pub is_held_back: bool,
    /// The devices.
    pub devices: Vec<DeviceStatus>,
    /// The leases, in the order of their grants.
    pub leases: Vec<LeaseStatus>,
    /// The requests that wait, in the order of service.
    pub waiting: Vec<WaitingStatus>,
    /// How short the host is of memory.
    pub pressure: Pressure,
    /// Why the state file could not be written last time.
    pub state_error: Option<String>,
}

/// A device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// `host` or `cuda:0`.
    pub name: String,
    /// What the broker may grant.
    pub capacity_bytes: u64,
    /// What it has granted.
    pub granted_bytes: u64,
    /// What it could still grant.
    pub free_bytes: u64,
    /// What it could also grant, if others had not taken it; absent where that does not matter to it.
    pub occupied_bytes: Option<u64>,
    /// All memory of the device, granted by the broker or not; absent where it is unknown, as with older brokers.
    pub total_bytes: Option<u64>,
    /// What is in use of that, by any process; likewise.
    pub used_bytes: Option<u64>,
}

impl DeviceStatus {
    /// How much more the broker could grant than is free; nothing where all of it is, or where it is unknown.
    #[must_use]
    pub fn shortfall(&self) -> Option<u64> {
        let unused = self.total_bytes?.saturating_sub(self.used_bytes?);
        self.free_bytes
            .checked_sub(unused)
            .filter(|bytes| *bytes > 0)
    }
}

/// A lease.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Its number.
    pub lease: u64,
    /// Its holder's process.
    pub pid: u32,
    /// What the holder calls itself.
    pub name: String,
    /// What the memory is for.
    pub label: Option<String>,
    /// Bytes by device.
    pub claims: Amounts,
    /// What would do when asked to shrink.
    pub floor: Amounts,
    /// Higher goes first.
    pub priority: i8,
    /// How often it changed.
    pub revision: u64,
    /// `reserved`, `committed`, or `away`: its holder lives and has not come back after a restart.
    pub state: String,
    /// Since the grant.
    pub held_seconds: f64,
    /// What its holder was asked to shrink it to.
    pub asked: Option<Amounts>,
}

/// A request that waits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitingStatus {
    /// Its client's process.
    pub pid: u32,
    /// What the client calls itself.
    pub name: String,
    /// What the memory is for.
    pub label: Option<String>,
    /// The bytes that it lacks.
    pub claims: Amounts,
    /// Higher goes first.
    pub priority: i8,
    /// How long so far.
    pub waited_seconds: f64,
    /// How long it still waits; `null` for ever.
    pub left_seconds: Option<f64>,
    /// Grants that went to later requests meanwhile.
    pub overtaken_count: u32,
    /// Whether nothing behind it gets memory on its devices.
    pub is_next: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(free_bytes: u64, total_bytes: Option<u64>, used_bytes: Option<u64>) -> DeviceStatus {
        DeviceStatus {
            free_bytes,
            total_bytes,
            used_bytes,
            ..DeviceStatus::default()
        }
    }

    #[test]
    fn what_could_be_granted_and_is_not_free_is_short() {
        let short = |free, total, used| device(free, total, used).shortfall();
        // 80 in all, of which 70 may be granted and 30 are: 40 more.
        assert_eq!(short(40, Some(80), Some(30)), None);
        assert_eq!(short(40, Some(80), Some(40)), None);
        assert_eq!(short(40, Some(80), Some(41)), Some(1));
        assert_eq!(short(40, Some(80), Some(80)), Some(40));
        assert_eq!(short(40, Some(80), Some(u64::MAX)), Some(40));
        assert_eq!(short(0, Some(80), Some(80)), None);
        assert_eq!(short(40, None, Some(80)), None);
        assert_eq!(short(40, Some(80), None), None);
    }

    #[test]
    fn brokers_and_clients_of_other_versions_understand_each_other() {
        let before = r#"{"name":"host","capacity_bytes":5,"granted_bytes":1,"free_bytes":4}"#;
        let known: DeviceStatus = serde_json::from_str(before).unwrap();
        assert_eq!((known.free_bytes, known.used_bytes), (4, None));
        let after = before.replace('}', r#","used_bytes":3,"of_tomorrow":[1]}"#);
        let known: DeviceStatus = serde_json::from_str(&after).unwrap();
        assert_eq!(known.used_bytes, Some(3));
    }
}
