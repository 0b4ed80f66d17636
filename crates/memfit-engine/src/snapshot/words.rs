//! The strings that a snapshot is made of, numbered ahead, so that a key is compared as a number.

macro_rules! words {
    ($($name:ident = $text:literal),* $(,)?) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Number { $($name),* }
        $(pub(super) const $name: u32 = Number::$name as u32;)*
        /// All of them, in the order of their numbers.
        pub(super) const ALL: &[&str] = &[$($text),*];
    };
}

words! {
    EMPTY = "",
    // The whole.
    SEGMENTS = "segments",
    DEVICE_TRACES = "device_traces",
    ALLOCATOR_SETTINGS = "allocator_settings",
    EXTERNAL_ANNOTATIONS = "external_annotations",
    // Events.
    ACTION = "action",
    ADDR = "addr",
    DEVICE_FREE = "device_free",
    SIZE = "size",
    STREAM = "stream",
    TIME_US = "time_us",
    FRAMES = "frames",
    POOL_ID = "pool_id",
    CATEGORY = "category",
    USER_METADATA = "user_metadata",
    COMPILE_CONTEXT = "compile_context",
    NOT_AVAILABLE = "N/A",
    // Actions.
    ALLOC = "alloc",
    FREE_REQUESTED = "free_requested",
    FREE_COMPLETED = "free_completed",
    SEGMENT_ALLOC = "segment_alloc",
    SEGMENT_FREE = "segment_free",
    SEGMENT_MAP = "segment_map",
    SEGMENT_UNMAP = "segment_unmap",
    SNAPSHOT = "snapshot",
    OOM = "oom",
    ANNOTATE = "annotate",
    // Frames.
    NAME = "name",
    FILENAME = "filename",
    LINE = "line",
    // Segments and blocks.
    DEVICE = "device",
    ADDRESS = "address",
    TOTAL_SIZE = "total_size",
    SEGMENT_TYPE = "segment_type",
    SMALL = "small",
    SEGMENT_POOL_ID = "segment_pool_id",
    IS_EXPANDABLE = "is_expandable",
    BLOCKS = "blocks",
    REQUESTED_SIZE = "requested_size",
    STATE = "state",
    ACTIVE_ALLOCATED = "active_allocated",
    ACTIVE_AWAITING_FREE = "active_awaiting_free",
    ACTIVE_PENDING_FREE = "active_pending_free",
    INACTIVE = "inactive",
    HISTORY = "history",
    REAL_SIZE = "real_size",
    // Annotations.
    STAGE = "stage",
    START = "START",
    END = "END",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_stands_for_its_text() {
        assert_eq!(ALL[EMPTY as usize], "");
        assert_eq!(ALL[ACTION as usize], "action");
        assert_eq!(ALL[END as usize], "END");
        assert_eq!(ALL.len(), END as usize + 1);
    }
}
