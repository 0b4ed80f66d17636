//! Common GPUs: how much memory each has, and how fast its datasheet says it is.
//!
//! Responsible for the table behind "what fits where" and behind plans for a GPU that is not here. Memory
//! as the vendors' datasheets state it, read as GiB. Processes find less, by one to nine per cent: error correction
//! takes a sixteenth of GDDR6, and the driver keeps some. So each card also has the least total capacity found in
//! public OOM messages of PyTorch on Linux, of this card or one of its kind with as much memory.
//! Not responsible for devices that are present: the program asks and measures those themselves.
//!
//! Rates are peaks, dense (no structured sparsity); real steps reach a part of them. A plan needs their
//! ratios. Where a document gives only a figure with sparsity, half of it stands here; where it gives none
//! that could be checked, none stands here.

use std::collections::BTreeMap;

use crate::bytes::Bytes;
use crate::cost::{DeviceProfile, Transfers};

/// A device model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Device {
    /// Its name.
    pub name: &'static str,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// What PyTorch finds of it, its total capacity; at least that much, whatever the driver.
    pub capacity_bytes: Bytes,
    /// How fast it is.
    pub speed: Speed,
    /// The document the figures are from.
    pub datasheet: &'static str,
}

/// Peak rates as a datasheet states them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Memory bandwidth, GB/s (10^9).
    pub memory_gb_per_second: f64,
    /// The bus to the host in one direction, GB/s: half of the bidirectional figure.
    pub host_gb_per_second: Option<f64>,
    /// FP32 without tensor cores, TFLOPS; what torch uses for float32 products unless told otherwise.
    pub fp32: f64,
    /// TF32 tensor cores, TFLOPS; what cuDNN convolutions use for float32.
    pub tf32: Option<f64>,
    /// FP16 tensor cores with FP32 accumulation, TFLOPS.
    pub fp16: Option<f64>,
    /// BF16 tensor cores, TFLOPS.
    pub bf16: Option<f64>,
}

/// What a process takes on a GPU apart from tensors: the CUDA context and loaded kernels, 0.2 to 1 GB
/// (pytorch issues 28113 and 28394). The middle is charged.
pub const CONTEXT_BYTES: Bytes = Bytes(600 << 20);

/// Stands in for a GPU that is neither here nor named.
pub const STAND_IN: &str = "A100 80 GB";

/// Seconds of an op that does almost nothing. No datasheet says it: a few microseconds is the order of a
/// CUDA kernel launch; it keeps tiny ops from being free and decides nothing else.
pub(crate) const LAUNCH_SECONDS: f64 = 5e-6;

/// `capacity` is in hundredths of GiB, as OOM messages have it.
const fn device(
    name: &'static str,
    gib: u64,
    capacity: u64,
    speed: Speed,
    datasheet: &'static str,
) -> Device {
    Device {
        name,
        memory_bytes: Bytes(gib << 30),
        capacity_bytes: Bytes((capacity << 30) / 100),
        speed,
        datasheet,
    }
}

const fn speed(memory: f64, host: Option<f64>, fp32: f64, tensor: [Option<f64>; 3]) -> Speed {
    let [tf32, fp16, bf16] = tensor;
    Speed {
        memory_gb_per_second: memory,
        host_gb_per_second: host,
        fp32,
        tf32,
        fp16,
        bf16,
    }
}

const PCIE3: Option<f64> = Some(16.0);
const PCIE4: Option<f64> = Some(32.0);
const PCIE5: Option<f64> = Some(64.0);
const NONE: [Option<f64>; 3] = [None, None, None];
const A100: [Option<f64>; 3] = [Some(156.0), Some(312.0), Some(312.0)];
const HOPPER: [Option<f64>; 3] = [Some(494.7), Some(989.4), Some(989.4)];

/// Ascending by memory.
pub const TABLE: [Device; 13] = [
    device(
        "RTX 4060",
        8,
        760,
        speed(272.0, None, 15.1, NONE),
        "NVIDIA GeForce RTX 4060 specifications",
    ),
    device(
        "RTX 3060",
        12,
        1175,
        speed(360.0, None, 12.7, NONE),
        "NVIDIA GeForce RTX 3060 specifications",
    ),
    device(
        "T4",
        16,
        1456,
        speed(300.0, PCIE3, 8.1, [None, Some(65.0), None]),
        "NVIDIA T4 Tensor Core GPU datasheet",
    ),
    device(
        "V100",
        16,
        1577,
        speed(900.0, PCIE3, 14.0, [None, Some(112.0), None]),
        "NVIDIA Tesla V100 GPU Accelerator datasheet, PCIe",
    ),
    device(
        "A10",
        24,
        2196,
        speed(600.0, PCIE4, 31.2, [Some(62.5), Some(125.0), Some(125.0)]),
        "NVIDIA A10 Tensor Core GPU datasheet",
    ),
    device(
        "L4",
        24,
        2196,
        speed(300.0, PCIE4, 30.3, [Some(60.0), Some(121.0), Some(121.0)]),
        "NVIDIA L4 Tensor Core GPU datasheet",
    ),
    device(
        "RTX 4090",
        24,
        2352,
        speed(1008.0, PCIE4, 82.6, [Some(82.6), Some(165.2), Some(165.2)]),
        "NVIDIA Ada GPU Architecture whitepaper, appendix A",
    ),
    device(
        "RTX 5090",
        32,
        3136,
        speed(1792.0, PCIE5, 104.8, NONE),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper",
    ),
    device(
        "A100 40 GB",
        40,
        3938,
        speed(1555.0, PCIE4, 19.5, A100),
        "NVIDIA A100 Tensor Core GPU datasheet",
    ),
    device(
        "L40S",
        48,
        4440,
        speed(864.0, PCIE4, 91.6, [Some(183.0), Some(362.0), Some(362.0)]),
        "NVIDIA L40S datasheet",
    ),
    device(
        "A100 80 GB",
        80,
        7910,
        speed(1935.0, PCIE4, 19.5, A100),
        "NVIDIA A100 Tensor Core GPU datasheet, 80GB PCIe",
    ),
    device(
        "H100",
        80,
        7910,
        speed(3350.0, PCIE5, 66.9, HOPPER),
        "NVIDIA H100 Tensor Core GPU datasheet, SXM",
    ),
    device(
        "H200",
        141,
        13971,
        speed(4800.0, PCIE5, 66.9, HOPPER),
        "NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
];

/// No GPU of the table has the name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} `{name}`: name one of {}", why(*several), names())]
pub struct UnknownGpu {
    /// The name as given.
    pub name: String,
    /// Whether it fits more than one.
    pub several: bool,
}

const fn why(several: bool) -> &'static str {
    if several {
        "more than one GPU begins with"
    } else {
        "no profile of a GPU"
    }
}

fn names() -> String {
    TABLE.map(|device| device.name).join(", ")
}

/// Letters and digits alone, lower case, without the vendor's own words.
fn plain(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    words
        .filter(|word| !matches!(*word, "nvidia" | "geforce" | "tesla" | "rtx"))
        .collect::<String>()
        .trim_start_matches("rtx")
        .to_owned()
}

/// The device of a name as people write it: `h100`, `RTX-4090`, `4090`, `a100-80gb`.
///
/// # Errors
///
/// The table has none, or several that begin so.
pub fn find(name: &str) -> Result<&'static Device, UnknownGpu> {
    let wanted = plain(name);
    let error = |several| UnknownGpu {
        name: name.to_owned(),
        several,
    };
    if wanted.is_empty() {
        return Err(error(false));
    }
    if let Some(device) = TABLE.iter().find(|device| plain(device.name) == wanted) {
        return Ok(device);
    }
    let mut begun = TABLE
        .iter()
        .filter(|device| plain(device.name).starts_with(&wanted));
    match (begun.next(), begun.next()) {
        (Some(device), None) => Ok(device),
        (first, _) => Err(error(first.is_some())),
    }
}

/// The datasheet of the GPU of a name as a device profile, [`find`]ing it; without a name, of the one that stands in.
///
/// # Errors
///
/// As [`find`].
pub fn profile_of(name: Option<&str>) -> Result<DeviceProfile, UnknownGpu> {
    name.map_or_else(|| Ok(stand_in()), |name| Ok(find(name)?.profile()))
}

/// The profile that stands in for a GPU that is neither here nor named; its name says so.
#[must_use]
pub fn stand_in() -> DeviceProfile {
    let device = TABLE.iter().find(|device| device.name == STAND_IN);
    let mut profile = device.unwrap_or(&TABLE[0]).profile();
    profile.name.push_str("; it stands in, as no GPU is here");
    profile
}

impl Device {
    /// What a process has there for tensors: what PyTorch finds without the CUDA context.
    #[must_use]
    pub fn room_bytes(&self) -> Bytes {
        self.capacity_bytes - CONTEXT_BYTES
    }

    /// Its datasheet as a device profile: peak rates, so times are the least that are possible.
    #[must_use]
    pub fn profile(&self) -> DeviceProfile {
        let speed = &self.speed;
        let rates = [
            ("float32", Some(speed.fp32)),
            (crate::cost::TF32, speed.tf32),
            ("float16", speed.fp16),
            ("bfloat16", speed.bf16),
        ];
        let flops: BTreeMap<String, f64> = rates
            .into_iter()
            .filter_map(|(name, rate)| Some((name.to_owned(), rate? * 1e12)))
            .collect();
        let host = speed.host_gb_per_second.map(|rate| rate * 1e9);
        DeviceProfile {
            name: format!("{}, from its datasheet", self.name),
            flops_per_second: flops,
            bytes_per_second: speed.memory_gb_per_second * 1e9,
            op_overhead_seconds: LAUNCH_SECONDS,
            transfers: Transfers {
                host_to_device_pinned: host,
                device_to_host_pinned: host,
                ..Transfers::default()
            },
            ..DeviceProfile::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_ascends() {
        assert!(TABLE.is_sorted_by_key(|device| device.memory_bytes));
    }

    #[test]
    fn cards_offer_nearly_what_their_datasheets_say() {
        for device in &TABLE {
            let part = device.capacity_bytes.as_f64() / device.memory_bytes.as_f64();
            assert!((0.9..1.0).contains(&part), "{}: {part}", device.name);
            assert!(device.room_bytes() > Bytes(6 << 30), "{}", device.name);
        }
    }

    #[test]
    fn names_as_people_write_them() {
        let name = |text: &str| find(text).map(|device| device.name);
        for device in &TABLE {
            assert_eq!(name(device.name), Ok(device.name));
        }
        for (text, expected) in [
            ("h100", "H100"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("rtx4090", "RTX 4090"),
            ("5090", "RTX 5090"),
            ("a10", "A10"),
            ("l4", "L4"),
            ("A100-80GB", "A100 80 GB"),
            ("a100_40", "A100 40 GB"),
        ] {
            assert_eq!(name(text), Ok(expected), "{text}");
        }
        assert!(find("a100").unwrap_err().several);
        for text in ["", "nvidia", "mi300x", "h1000"] {
            let error = find(text).unwrap_err();
            assert!(!error.several, "{text}");
            assert!(error.to_string().contains("H200"), "{error}");
        }
    }

    #[test]
    fn profiles_keep_the_order_of_the_datasheets() {
        for device in &TABLE {
            let profile = device.profile();
            let rate = |dtype: &str| profile.flops_per_second.get(dtype).copied();
            let fp32 = rate("float32").unwrap();
            for dtype in ["tf32", "float16", "bfloat16"] {
                assert!(
                    rate(dtype).is_none_or(|rate| rate >= fp32),
                    "{}",
                    device.name
                );
            }
            assert!((1e12..1e14).contains(&(profile.bytes_per_second * 10.0)));
            assert!(!device.datasheet.is_empty());
        }
        assert!(stand_in().name.starts_with(STAND_IN));
    }
}
