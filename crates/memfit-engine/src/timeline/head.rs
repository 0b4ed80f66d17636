//! The summary at the front of a packed timeline.
//!
//! Responsible for the names and units of its fields, which the page's `model.js` reads. Not responsible for the
//! numbers in them.

use serde::Serialize;

use super::Moment;
use super::select::Reason;

#[derive(Serialize)]
pub(super) struct Head {
    pub(super) schema_version: u32,
    pub(super) devices: Vec<DeviceHead>,
    /// Devices that are left out.
    pub(super) devices_untold: usize,
}

#[derive(Serialize)]
pub(super) struct DeviceHead {
    pub(super) index: u32,
    pub(super) events: usize,
    pub(super) moments: Moment,
    pub(super) first_time_us: u64,
    pub(super) last_time_us: u64,
    pub(super) peak: MomentHead,
    pub(super) owners: Vec<OwnerHead>,
    pub(super) owners_untold: usize,
    /// Owners `0..bands` of the list have a band of their own.
    pub(super) bands: usize,
    /// Moments at which the map of segments is most complete.
    pub(super) chosen: Vec<MomentHead>,
    pub(super) refusals: Vec<RefusalHead>,
    pub(super) refusals_untold: usize,
    pub(super) annotations: Vec<AnnotationHead>,
    pub(super) annotations_untold: usize,
    pub(super) grids: Vec<GridHead>,
    pub(super) lives: ListHead,
    pub(super) segments: ListHead,
    /// Stacks with text; lives may refer to later ones.
    pub(super) stacks: usize,
    pub(super) stacks_untold: usize,
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct MomentHead {
    pub(super) moment: Moment,
    pub(super) reason: Reason,
    pub(super) allocated_bytes: u64,
    pub(super) active_bytes: u64,
    pub(super) reserved_bytes: u64,
    /// What the listed lives have of the active and the reserved bytes.
    pub(super) listed_active_bytes: u64,
    pub(super) listed_reserved_bytes: u64,
}

#[derive(Serialize)]
pub(super) struct OwnerHead {
    pub(super) name: String,
    pub(super) peak_bytes: u64,
    pub(super) peak_count: u64,
    pub(super) highest_bytes: u64,
    /// The stack with the most bytes at the peak, if it is numbered.
    pub(super) stack: Option<u32>,
}

#[derive(Serialize)]
pub(super) struct RefusalHead {
    pub(super) moment: Moment,
    pub(super) event: usize,
    pub(super) requested_bytes: u64,
    pub(super) device_free_bytes: u64,
    pub(super) stack: u32,
}

#[derive(Serialize)]
pub(super) struct AnnotationHead {
    pub(super) moment: Moment,
    pub(super) is_start: bool,
    pub(super) name: String,
}

#[derive(Serialize)]
pub(super) struct GridHead {
    pub(super) first: Moment,
    pub(super) width: u32,
    pub(super) count: u32,
    pub(super) unit: u64,
}

#[derive(Serialize)]
pub(super) struct ListHead {
    pub(super) listed: usize,
    pub(super) total: usize,
    pub(super) unit: u64,
}
