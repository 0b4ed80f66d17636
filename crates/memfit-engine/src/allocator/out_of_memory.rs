//! A refused request, in numbers and in PyTorch's words.

use std::fmt;

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct OutOfMemory {
    /// What was asked for.
    pub requested_bytes: u64,
    /// The block it would have become.
    pub block_bytes: u64,
    /// The segment that would have been taken for it: what PyTorch says it tried to allocate.
    pub segment_bytes: u64,
    /// The device's memory.
    pub total_bytes: u64,
    /// What of it is free.
    pub free_bytes: u64,
    /// The limit by the memory fraction.
    pub allowed_bytes: Option<u64>,
    /// Held by tensors.
    pub allocated_bytes: u64,
    /// Taken from the driver.
    pub reserved_bytes: u64,
    /// Free blocks of private pools; PyTorch words them as allocated.
    pub private_free_bytes: u64,
    /// With expandable segments, the address space one of them reserves at most.
    pub expandable_reserve_bytes: Option<u64>,
    /// Refused by `throw_on_cudamalloc_oom` before the driver was asked.
    pub is_rejection: bool,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_rejection {
            return write!(
                formatter,
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed \
                 per_process_memory_fraction limit. Requested size: {}",
                size(self.requested_bytes)
            );
        }
        write!(
            formatter,
            "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} \
             is free. ",
            size(self.segment_bytes),
            size(self.total_bytes),
            size(self.free_bytes)
        )?;
        if let Some(allowed) = self.allowed_bytes {
            write!(formatter, "{} allowed; ", size(allowed))?;
        }
        let in_use = self.allocated_bytes.wrapping_add(self.private_free_bytes);
        write!(
            formatter,
            "Of the allocated memory {} is allocated by PyTorch, ",
            size(in_use)
        )?;
        if self.private_free_bytes > 0 {
            write!(
                formatter,
                "with {} allocated in private pools (e.g., CUDA Graphs), ",
                size(self.private_free_bytes)
            )?;
        }
        write!(
            formatter,
            "and {} is reserved by PyTorch but unallocated. ",
            size(self.reserved_bytes.wrapping_sub(in_use))
        )?;
        self.advise(formatter)
    }
}

impl OutOfMemory {
    fn advise(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.expandable_reserve_bytes {
            None => formatter.write_str(
                "If reserved but unallocated memory is large try setting \
                 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See \
                 documentation for Memory Management  \
                 (https://docs.pytorch.org/docs/stable/notes/cuda.html\
                 #optimizing-memory-usage-with-pytorch-cuda-alloc-conf)",
            ),
            Some(reserve) if reserve < self.segment_bytes => write!(
                formatter,
                "This allocation exceeds the expandable-segment reserve of {} for this stream, and a \
                 single allocation cannot span expandable segments. Raise PYTORCH_CUDA_ALLOC_CONF \
                 expandable_segments_reserve or expandable_segments_reserve_by_class (or unset it) so \
                 that a segment is at least {}.",
                size(reserve),
                size(self.segment_bytes)
            ),
            Some(_) => formatter.write_str(
                "expandable_segments is enabled. If instead the process is running out of virtual \
                 address space (VSZ), expandable segments may be over-reserving VA (each segment \
                 reserves ~9/8 of device memory, times the number of streams); reduce it via \
                 PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / \
                 expandable_segments_reserve_by_class.",
            ),
        }
    }
}

/// Bytes as PyTorch's `format_size` writes them.
#[expect(
    clippy::cast_precision_loss,
    reason = "two digits behind the point, as PyTorch prints them"
)]
fn size(bytes: u64) -> String {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    let in_units = |unit: u64| bytes as f64 / unit as f64;
    if bytes <= KIB {
        format!("{bytes} bytes")
    } else if bytes <= MIB {
        format!("{:.2} KiB", in_units(KIB))
    } else if bytes <= GIB {
        format!("{:.2} MiB", in_units(MIB))
    } else {
        format!("{:.2} GiB", in_units(GIB))
    }
}
