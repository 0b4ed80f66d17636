//! The JSON document of `memfit calibrate`; also what a profile file holds, but for the path.
//!
//! Responsible for the shape, a contract as that of `document.rs`. Not responsible for the numbers.

use memfit_engine::cost::DeviceProfile;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `memfit calibrate --format json`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize, Serialize)]
#[schemars(rename = "Calibration")]
pub(crate) struct CalibrateDocument {
    pub(crate) schema_version: u32,
    pub(crate) kind: String,
    /// The file the profile was written to; not in the file itself.
    #[serde(default)]
    pub(crate) path: String,
    pub(crate) device_kind: String,
    pub(crate) device_name: String,
    pub(crate) torch_version: String,
    pub(crate) threads: u32,
    pub(crate) date: String,
    /// Time the measurement took.
    pub(crate) seconds: f64,
    pub(crate) disk: MeasuredDisk,
    /// Over all measurements: how much longer the median run took than the fastest, relative to it.
    pub(crate) median_spread: f64,
    pub(crate) warnings: Vec<String>,
    pub(crate) samples: Vec<MeasuredSize>,
    /// What plans use.
    pub(crate) profile: DeviceProfile,
}

/// Where and how files were written and read.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize, Serialize)]
pub(crate) struct MeasuredDisk {
    pub(crate) folder: String,
    pub(crate) method: String,
}

/// One size of one op.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize, Serialize)]
pub(crate) struct MeasuredSize {
    pub(crate) what: String,
    /// Work of an op that computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) flops: Option<u64>,
    /// Work of an op that moves bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    pub(crate) seconds: f64,
    pub(crate) per_second: f64,
    pub(crate) spread: f64,
    pub(crate) runs: u32,
}
