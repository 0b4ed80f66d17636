//! Why a text is no configuration of the allocator.

/// Why a text is no valid configuration. The first words are PyTorch's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// No such option.
    #[error("Unrecognized key '{key}' in CUDA allocator config.")]
    UnknownKey {
        /// As written.
        key: String,
    },
    /// An option without a value, or a text that ends too early.
    #[error("Index out of bounds in ConfigTokenizer: the text ends where {expected} should follow")]
    EndsEarly {
        /// What should have followed.
        expected: &'static str,
    },
    /// A list that is not closed.
    #[error("Expected closing bracket ']' in ConfigTokenizer but reached end of config")]
    NotClosed,
    /// Neither `True` nor `False`.
    #[error("Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{token}'")]
    NotABool {
        /// Which token it is, from 0.
        index: usize,
        /// As written.
        token: String,
    },
    /// Not a whole number, or one beyond 64 bits.
    #[error("stoull: '{token}' is not a whole number below 2^64")]
    NotAWholeNumber {
        /// As written.
        token: String,
    },
    /// Not a number, or one that a double cannot hold.
    #[error("stod: '{token}' is not a number that a double holds")]
    NotANumber {
        /// As written.
        token: String,
    },
    /// A backend that does not exist.
    #[error("Unknown allocator backend, options are native and cudaMallocAsync")]
    UnknownBackend,
    /// `large_segment_size_mb` is too small.
    #[error("CachingAllocator option large_segment_size_mb must be > {minimum_mib} MB")]
    LargeSegmentTooSmall {
        /// What it must exceed.
        minimum_mib: u64,
    },
    /// `max_split_size_mb` or `max_non_split_rounding_mb` is too small.
    #[error("CachingAllocator option {option} too small, must be >= {minimum_mib}")]
    TooSmall {
        /// The option.
        option: &'static str,
        /// The least it may be: the size of a large segment.
        minimum_mib: u64,
    },
    /// A threshold outside (0, 1).
    #[error("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")]
    InvalidThreshold,
    /// A fraction outside [0, 1].
    #[error("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")]
    InvalidFraction,
    /// Divisions of an interval that are no power of two.
    #[error("For roundups, the divisions has to be power of 2 or 0 to disable roundup ")]
    InvalidDivisions,
    /// Divisions of all intervals that are no power of two.
    #[error("For roundups, the divisions has to be power of 2 ")]
    InvalidDivisionsOfAll,
    /// An interval that is no power of two.
    #[error("For roundups, the intervals have to be power of 2 ")]
    InvalidInterval,
    /// Register threads that are no power of two.
    #[error("Number of register threads has to be power of 2, got {count}")]
    InvalidThreads {
        /// As written.
        count: u64,
    },
    /// Too many register threads.
    #[error("Number of register threads should be less than or equal to 128, got {count}")]
    TooManyThreads {
        /// As written.
        count: u64,
    },
    /// `pinned_reserve_segment_size_mb` of 0.
    #[error("Pinned reserve segment size has to be greater than 0")]
    InvalidPinnedReserve,
}
