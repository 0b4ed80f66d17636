//! The allocator's settings: `PYTORCH_CUDA_ALLOC_CONF`, parsed as PyTorch parses it.
//!
//! Responsible for what every option may be and what it becomes. Not responsible for splitting the text
//! into tokens (`tokens.rs`). The rules, their order and the wording of the errors are those of
//! `ConfigTokenizer` and `AcceleratorAllocatorConfig` in `c10/core/AllocatorConfig.{h,cpp}` and of
//! `c10/cuda/CUDAAllocatorConfig.cpp` in torch 2.15: the text is read once for the backend, once for the
//! options of CUDA, once for `large_segment_size_mb`, and once for the options of every device.
//! PyTorch does not look at the separators, only at how many tokens there are; neither does this.

use super::settings_error::SettingsError;
use super::sizes::{DIVISION_INTERVALS, LARGE_SEGMENT_BYTES, MIN_LARGE_BYTES};
use super::tokens::Tokens;

const MIB: u64 = 1 << 20;

/// The size that stands for no limit.
pub const UNLIMITED: u64 = u64::MAX;

/// Who serves the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// PyTorch's caching allocator, the one simulated here.
    #[default]
    Native,
    /// CUDA's own `cudaMallocAsync`.
    CudaMallocAsync,
}

/// How much address space an expandable segment reserves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reserve {
    /// A fraction of the device's memory.
    Fraction(f64),
    /// So many GiB.
    Gib(f64),
}

impl Reserve {
    /// In bytes, on a device of `total_bytes`. A value beyond 64 bits saturates.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "PyTorch computes in double and truncates (ExpandableSegmentReserveSpec)"
    )]
    pub fn bytes(self, total_bytes: u64) -> u64 {
        match self {
            Self::Fraction(fraction) => (fraction * total_bytes as f64) as u64,
            Self::Gib(gib) => (gib * (1_u64 << 30) as f64) as u64,
        }
    }
}

/// Every option the allocator knows. Sizes are bytes.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "PyTorch has that many switches, independent of each other"
)]
pub struct Settings {
    /// `backend`.
    pub backend: Backend,
    /// `large_segment_size_mb`: segments for blocks above 1 MiB and below 10 MiB.
    pub large_segment_bytes: u64,
    /// `max_split_size_mb`: larger blocks are never split; [`UNLIMITED`] by default.
    pub max_split_bytes: u64,
    /// `max_non_split_rounding_mb`: the slack allowed when a block of `max_split_size_mb` or more is
    /// handed out whole.
    pub max_non_split_rounding_bytes: u64,
    /// `garbage_collection_threshold`: share of the allowed memory above which old cached segments are
    /// given back; 0 is off.
    pub garbage_collection_threshold: f64,
    /// `roundup_power2_divisions`: by interval, [1 MiB, 2 MiB) first; 0 is off.
    pub roundup_power2_divisions: [u64; DIVISION_INTERVALS],
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `expandable_segments_reserve`; 9/8 of the device's memory when not set.
    pub expandable_segments_reserve: Option<Reserve>,
    /// `expandable_segments_reserve_by_class`, in the order written.
    pub expandable_segments_reserve_by_class: Vec<(String, Reserve)>,
    /// `per_process_memory_fraction`: the share of the device this process may take.
    pub per_process_memory_fraction: f64,
    /// `throw_on_cudamalloc_oom`: refuse before asking the driver.
    pub throw_on_cudamalloc_oom: bool,
    /// `graph_capture_record_stream_reuse`.
    pub graph_capture_record_stream_reuse: bool,
    /// `release_lock_on_cudamalloc`; changes no decision.
    pub release_lock_on_cudamalloc: bool,
    /// `pinned_use_cuda_host_register`; concerns host memory alone, as do all `pinned_` options.
    pub pinned_use_cuda_host_register: bool,
    /// `pinned_num_register_threads`.
    pub pinned_num_register_threads: u64,
    /// `pinned_reserve_segment_size_mb`, in MiB as written; 0 is off.
    pub pinned_reserve_segment_mib: u64,
    /// `pinned_free_catch_all`.
    pub pinned_free_catch_all: bool,
    /// `pinned_use_background_threads`.
    pub pinned_use_background_threads: bool,
    /// `pinned_max_round_threshold_mb`.
    pub pinned_max_round_threshold_bytes: u64,
    /// `pinned_max_cached_size_mb`.
    pub pinned_max_cached_bytes: u64,
    /// What PyTorch would warn of, such as a value that it ignores.
    pub warnings: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            backend: Backend::Native,
            large_segment_bytes: LARGE_SEGMENT_BYTES,
            max_split_bytes: UNLIMITED,
            max_non_split_rounding_bytes: LARGE_SEGMENT_BYTES,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; DIVISION_INTERVALS],
            expandable_segments: false,
            expandable_segments_reserve: None,
            expandable_segments_reserve_by_class: Vec::new(),
            per_process_memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            graph_capture_record_stream_reuse: false,
            release_lock_on_cudamalloc: false,
            pinned_use_cuda_host_register: false,
            pinned_num_register_threads: 1,
            pinned_reserve_segment_mib: 0,
            pinned_free_catch_all: false,
            pinned_use_background_threads: false,
            pinned_max_round_threshold_bytes: UNLIMITED,
            pinned_max_cached_bytes: UNLIMITED,
            warnings: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads a configuration such as `expandable_segments:True,max_split_size_mb:256`.
    ///
    /// # Errors
    ///
    /// What PyTorch refuses, in its words.
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let tokens = Tokens::new(text);
        let mut settings = Self::default();
        settings.read_backend(&tokens)?;
        each(&tokens, |key, at| {
            settings.read_cuda_option(&tokens, key, at)
        })?;
        settings.read_large_segment(&tokens)?;
        each(&tokens, |key, at| settings.read_option(&tokens, key, at))?;
        Ok(settings)
    }

    /// The first reading looks for `backend` alone, and stops there.
    fn read_backend(&mut self, tokens: &Tokens) -> Result<(), SettingsError> {
        let mut at = 0;
        while let Some(key) = tokens.key(at) {
            if key == "backend" {
                self.backend = match tokens.get(at + 2)? {
                    "cudaMallocAsync" => Backend::CudaMallocAsync,
                    _ => Backend::Native,
                };
                return Ok(());
            }
            at = tokens.skip_value(at)? + 2;
        }
        Ok(())
    }

    /// Options of CUDA; gives the index of the value's last token.
    fn read_cuda_option(
        &mut self,
        tokens: &Tokens,
        key: &str,
        at: usize,
    ) -> Result<usize, SettingsError> {
        let value = at + 2;
        match key {
            "backend" => match tokens.get(value)? {
                "native" | "cudaMallocAsync" => {}
                _ => return Err(SettingsError::UnknownBackend),
            },
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
                self.release_lock_on_cudamalloc = tokens.boolean(value)?;
            }
            "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
                self.pinned_use_cuda_host_register = tokens.boolean(value)?;
            }
            "pinned_num_register_threads" => {
                let count = tokens.whole(value)?;
                if !count.is_power_of_two() {
                    return Err(SettingsError::InvalidThreads { count });
                }
                if count > 128 {
                    return Err(SettingsError::TooManyThreads { count });
                }
                self.pinned_num_register_threads = count;
            }
            "pinned_reserve_segment_size_mb" => {
                self.pinned_reserve_segment_mib = tokens.whole(value)?;
                if self.pinned_reserve_segment_mib == 0 {
                    return Err(SettingsError::InvalidPinnedReserve);
                }
            }
            "graph_capture_record_stream_reuse" => {
                self.graph_capture_record_stream_reuse = tokens.boolean(value)?;
            }
            "per_process_memory_fraction" => {
                let fraction = tokens.number(value)?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(SettingsError::InvalidFraction);
                }
                self.per_process_memory_fraction = fraction;
            }
            "pinned_free_catch_all" => self.pinned_free_catch_all = tokens.boolean(value)?,
            "throw_on_cudamalloc_oom" => self.throw_on_cudamalloc_oom = tokens.boolean(value)?,
            "expandable_segments_reserve" => {
                if let Some(reserve) = self.reserve(tokens.get(value)?) {
                    self.expandable_segments_reserve = Some(reserve);
                }
            }
            "expandable_segments_reserve_by_class" => return self.read_classes(tokens, value),
            key if is_option_of_every_device(key) => return tokens.skip_value(at),
            key => {
                return Err(SettingsError::UnknownKey { key: key.into() });
            }
        }
        Ok(value)
    }

    /// `[name:value,...]`, from its bracket on.
    fn read_classes(&mut self, tokens: &Tokens, bracket: usize) -> Result<usize, SettingsError> {
        let mut classes: Vec<(String, Reserve)> = Vec::new();
        let mut at = bracket;
        while tokens.get(at + 1)? != "]" {
            let name = tokens.get(at + 1)?.to_owned();
            at += 3;
            if let Some(reserve) = self.reserve(tokens.get(at)?) {
                classes.retain(|(known, _)| *known != name);
                classes.push((name, reserve));
            }
            if tokens.get(at + 1)? == "," {
                at += 1;
            }
        }
        self.expandable_segments_reserve_by_class = classes;
        Ok(at + 1)
    }

    /// A fraction, or GiB with a `G` behind; a bad value is ignored with a warning.
    fn reserve(&mut self, token: &str) -> Option<Reserve> {
        let gib = token.strip_suffix(['G', 'g']);
        let number = gib.unwrap_or(token).parse::<f64>().ok();
        let Some(number) = number.filter(|number| number.is_finite() && *number > 0.0) else {
            self.warnings.push(format!(
                "Ignoring invalid expandable-segment reserve value '{token}' in \
                 PYTORCH_CUDA_ALLOC_CONF (expected a positive, finite fraction like 0.5 or an \
                 absolute size like 40G); using default."
            ));
            return None;
        };
        Some(if gib.is_some() {
            Reserve::Gib(number)
        } else {
            Reserve::Fraction(number)
        })
    }

    /// Read before the others, whose limits depend on it.
    fn read_large_segment(&mut self, tokens: &Tokens) -> Result<(), SettingsError> {
        each(tokens, |key, at| {
            if key != "large_segment_size_mb" {
                return tokens.skip_value(at);
            }
            let mib = tokens.whole(at + 2)?;
            let minimum_mib = MIN_LARGE_BYTES / MIB;
            if mib <= minimum_mib {
                return Err(SettingsError::LargeSegmentTooSmall { minimum_mib });
            }
            self.large_segment_bytes = mib_to_bytes(mib);
            Ok(at + 2)
        })?;
        self.max_non_split_rounding_bytes = self.large_segment_bytes;
        Ok(())
    }

    /// Options of every device; gives the index of the value's last token.
    fn read_option(
        &mut self,
        tokens: &Tokens,
        key: &str,
        at: usize,
    ) -> Result<usize, SettingsError> {
        let value = at + 2;
        match key {
            "max_split_size_mb" => {
                self.max_split_bytes =
                    self.at_least_a_segment(tokens, value, "max_split_size_mb")?;
            }
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding_bytes =
                    self.at_least_a_segment(tokens, value, "max_non_split_rounding_mb")?;
            }
            "garbage_collection_threshold" => {
                let threshold = tokens.number(value)?;
                if !(threshold > 0.0 && threshold < 1.0) {
                    return Err(SettingsError::InvalidThreshold);
                }
                self.garbage_collection_threshold = threshold;
            }
            "roundup_power2_divisions" => return self.read_divisions(tokens, value),
            "expandable_segments" => self.expandable_segments = tokens.boolean(value)?,
            "pinned_use_background_threads" => {
                self.pinned_use_background_threads = tokens.boolean(value)?;
            }
            "pinned_max_round_threshold_mb" => {
                self.pinned_max_round_threshold_bytes = mib_to_bytes(tokens.whole(value)?);
            }
            "pinned_max_cached_size_mb" => {
                self.pinned_max_cached_bytes = mib_to_bytes(tokens.whole(value)?);
            }
            _ => return tokens.skip_value(at),
        }
        Ok(value)
    }

    fn at_least_a_segment(
        &self,
        tokens: &Tokens,
        value: usize,
        option: &'static str,
    ) -> Result<u64, SettingsError> {
        let mib = tokens.whole(value)?;
        let minimum_mib = self.large_segment_bytes / MIB;
        if mib < minimum_mib {
            return Err(SettingsError::TooSmall {
                option,
                minimum_mib,
            });
        }
        Ok(mib_to_bytes(mib))
    }

    /// One number for all intervals, or `[boundary:divisions,...,>:divisions]`.
    fn read_divisions(&mut self, tokens: &Tokens, value: usize) -> Result<usize, SettingsError> {
        let slots = &mut self.roundup_power2_divisions;
        if tokens.get(value)? != "[" {
            let divisions = tokens.whole(value)?;
            if !divisions.is_power_of_two() {
                return Err(SettingsError::InvalidDivisionsOfAll);
            }
            slots.fill(divisions);
            return Ok(value);
        }
        let mut at = value + 1;
        let mut last = 0;
        let mut is_first = true;
        loop {
            match tokens.key(at) {
                Some("]") => return Ok(at),
                Some(boundary) => {
                    let divisions = tokens.whole(at + 2)?;
                    if divisions != 0 && !divisions.is_power_of_two() {
                        return Err(SettingsError::InvalidDivisions);
                    }
                    if boundary == ">" {
                        // Behind the last boundary; without one, slot 0 keeps its own.
                        slots[last + 1..].fill(divisions);
                    } else {
                        let mib = tokens.whole(at)?;
                        if !mib.is_power_of_two() {
                            return Err(SettingsError::InvalidInterval);
                        }
                        let slot = (mib.ilog2() as usize).min(DIVISION_INTERVALS - 1);
                        if is_first {
                            slots[..slot].fill(divisions);
                        }
                        slots[slot] = divisions;
                        (last, is_first) = (slot, false);
                    }
                    at += if tokens.get(at + 3)? == "]" { 3 } else { 4 };
                }
                None => return Err(SettingsError::NotClosed),
            }
        }
    }
}

/// Reads every option; `read` gives the index of a value's last token.
fn each(
    tokens: &Tokens,
    mut read: impl FnMut(&str, usize) -> Result<usize, SettingsError>,
) -> Result<(), SettingsError> {
    let mut at = 0;
    while let Some(key) = tokens.key(at) {
        // The token behind the value should be a comma; PyTorch does not look.
        at = read(key, at)? + 2;
    }
    Ok(())
}

fn is_option_of_every_device(key: &str) -> bool {
    matches!(
        key,
        "large_segment_size_mb"
            | "max_split_size_mb"
            | "max_non_split_rounding_mb"
            | "garbage_collection_threshold"
            | "roundup_power2_divisions"
            | "expandable_segments"
            | "pinned_use_background_threads"
            | "pinned_max_round_threshold_mb"
            | "pinned_max_cached_size_mb"
    )
}

/// PyTorch's clamp: the most whole MiB that 64 bits hold.
fn mib_to_bytes(mib: u64) -> u64 {
    mib.min(u64::MAX / MIB) * MIB
}

impl std::fmt::Display for Settings {
    /// The options that change the allocator's decisions and differ from the defaults, as they would be
    /// written; `default` when there are none.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let default = Self::default();
        let mut options = Vec::new();
        if self.expandable_segments {
            options.push("expandable_segments:True".to_owned());
        }
        if self.max_split_bytes != default.max_split_bytes {
            options.push(format!("max_split_size_mb:{}", self.max_split_bytes / MIB));
        }
        if self.max_non_split_rounding_bytes != self.large_segment_bytes {
            options.push(format!(
                "max_non_split_rounding_mb:{}",
                self.max_non_split_rounding_bytes / MIB
            ));
        }
        if self.large_segment_bytes != default.large_segment_bytes {
            options.push(format!(
                "large_segment_size_mb:{}",
                self.large_segment_bytes / MIB
            ));
        }
        if self.garbage_collection_threshold > 0.0 {
            options.push(format!(
                "garbage_collection_threshold:{}",
                self.garbage_collection_threshold
            ));
        }
        if self.per_process_memory_fraction < 1.0 {
            options.push(format!(
                "per_process_memory_fraction:{}",
                self.per_process_memory_fraction
            ));
        }
        if self.throw_on_cudamalloc_oom {
            options.push("throw_on_cudamalloc_oom:True".to_owned());
        }
        if let Some(reserve) = self.expandable_segments_reserve {
            options.push(match reserve {
                Reserve::Fraction(value) => format!("expandable_segments_reserve:{value}"),
                Reserve::Gib(value) => format!("expandable_segments_reserve:{value}G"),
            });
        }
        if let Some(divisions) = describe_divisions(&self.roundup_power2_divisions) {
            options.push(format!("roundup_power2_divisions:{divisions}"));
        }
        if options.is_empty() {
            return formatter.write_str("default");
        }
        formatter.write_str(&options.join(","))
    }
}

/// `None` when no interval is divided, one number when all are alike, else every slot.
fn describe_divisions(slots: &[u64; DIVISION_INTERVALS]) -> Option<String> {
    let first = slots[0];
    if slots.iter().all(|&slot| slot == first) {
        return (first > 0).then(|| first.to_string());
    }
    let slots: Vec<String> = (0..)
        .zip(slots)
        .map(|(log, divisions)| format!("{}:{divisions}", 1_u64 << log))
        .collect();
    Some(format!("[{}]", slots.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_values() {
        let settings = Settings::parse(
            "expandable_segments:True, max_split_size_mb:256,garbage_collection_threshold:0.8,\
             roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:32,\
             per_process_memory_fraction:0.5,expandable_segments_reserve:40G",
        )
        .unwrap();
        assert!(settings.expandable_segments);
        assert_eq!(settings.max_split_bytes, 256 * MIB);
        assert_eq!(settings.large_segment_bytes, 32 * MIB);
        assert_eq!(settings.max_non_split_rounding_bytes, 32 * MIB);
        assert_eq!(
            settings.roundup_power2_divisions,
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]
        );
        assert_eq!(
            settings.expandable_segments_reserve,
            Some(Reserve::Gib(40.0))
        );
        assert_eq!(Settings::parse(""), Ok(Settings::default()));
        assert_eq!(Settings::parse(" "), Ok(Settings::default()));
    }

    #[test]
    fn a_written_configuration_reads_back_as_itself() {
        for text in [
            "default",
            "expandable_segments:True,max_split_size_mb:256",
            "max_non_split_rounding_mb:64,large_segment_size_mb:32",
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.25",
            "throw_on_cudamalloc_oom:True,expandable_segments_reserve:0.5",
            "roundup_power2_divisions:8",
            "roundup_power2_divisions:[1:0,2:0,4:2,8:2,16:2,32:2,64:2,128:2,256:2,512:2,1024:2,2048:2,\
             4096:2,8192:2,16384:2,32768:16]",
        ] {
            let settings = match text {
                "default" => Settings::default(),
                text => Settings::parse(text).unwrap(),
            };
            assert_eq!(settings.to_string(), text);
        }
    }
}
