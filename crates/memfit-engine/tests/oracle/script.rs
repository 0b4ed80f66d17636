//! Operations on an allocator, as a script for the driver program and as calls of the simulator.
//!
//! Both sides answer in the same lines, which are compared byte by byte.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use memfit_engine::allocator::{
    BlockId, Device, FreeOrder, PoolStat, Settings, Simulator, Stat, Statistics, TraceEvent,
};
use memfit_engine::snapshot::{Action, BlockState};

/// One operation. `driver.cpp` has the other half of the meaning.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operation {
    /// Answers with the address, or with the error.
    Malloc {
        slot: usize,
        bytes: u64,
        stream: u64,
    },
    Free {
        slot: usize,
    },
    RecordStream {
        slot: usize,
        stream: u64,
    },
    EventsReady(bool),
    Complete {
        stream: u64,
        count: u64,
    },
    /// 0 is the default pool.
    EmptyCache {
        pool: u64,
    },
    Begin {
        pool: u64,
        stream: Option<u64>,
    },
    End {
        pool: u64,
    },
    Release {
        pool: u64,
    },
    LastResort {
        pool: u64,
        is_on: bool,
    },
    NoSplit {
        pool: u64,
    },
    Capture(bool),
    Fraction(f64),
    Other(u64),
    Settings(&'static str),
    ResetPeaks,
    ResetAccumulated,
    /// Answers with all counters.
    Statistics,
    /// Answers with all segments and blocks.
    Segments,
    /// Answers with what happened since the last time.
    Trace,
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malloc {
                slot,
                bytes,
                stream,
            } => write!(formatter, "m {slot} {bytes} {stream:x}"),
            Self::Free { slot } => write!(formatter, "f {slot}"),
            Self::RecordStream { slot, stream } => write!(formatter, "r {slot} {stream:x}"),
            Self::EventsReady(are_ready) => write!(formatter, "e {}", u8::from(*are_ready)),
            Self::Complete { stream, count } => write!(formatter, "c {stream:x} {count}"),
            Self::EmptyCache { pool } => write!(formatter, "y {pool}"),
            Self::Begin { pool, stream: None } => write!(formatter, "b {pool} *"),
            Self::Begin {
                pool,
                stream: Some(stream),
            } => write!(formatter, "b {pool} {stream:x}"),
            Self::End { pool } => write!(formatter, "n {pool}"),
            Self::Release { pool } => write!(formatter, "l {pool}"),
            Self::LastResort { pool, is_on } => write!(formatter, "u {pool} {}", u8::from(*is_on)),
            Self::NoSplit { pool } => write!(formatter, "p {pool}"),
            Self::Capture(is_on) => write!(formatter, "q {}", u8::from(*is_on)),
            Self::Fraction(fraction) => write!(formatter, "g {fraction}"),
            Self::Other(bytes) => write!(formatter, "o {bytes}"),
            Self::Settings(text) => write!(formatter, "x {text}"),
            Self::ResetPeaks => formatter.write_str("P"),
            Self::ResetAccumulated => formatter.write_str("A"),
            Self::Statistics => formatter.write_str("s"),
            Self::Segments => formatter.write_str("S"),
            Self::Trace => formatter.write_str("T"),
        }
    }
}

/// The script of operations.
pub(crate) fn script(operations: &[Operation]) -> String {
    let mut text = String::new();
    for operation in operations {
        let _ = writeln!(text, "{operation}");
    }
    text
}

/// What the simulator answers.
pub(crate) fn simulate(settings: &str, device: Device, operations: &[Operation]) -> String {
    let mut side = SimulatorSide {
        simulator: Simulator::new(
            &Settings::parse(settings).unwrap(),
            FreeOrder::SegmentCounter,
            device,
        ),
        slots: BTreeMap::new(),
        answer: String::new(),
    };
    side.simulator.record_trace(true);
    for operation in operations {
        side.run(operation);
    }
    side.answer
}

struct SimulatorSide {
    simulator: Simulator,
    slots: BTreeMap<usize, BlockId>,
    answer: String,
}

impl SimulatorSide {
    fn run(&mut self, operation: &Operation) {
        let simulator = &mut self.simulator;
        let private = |pool: &u64| (0, *pool);
        match operation {
            Operation::Malloc {
                slot,
                bytes,
                stream,
            } => self.malloc(*slot, *bytes, *stream),
            Operation::Free { slot } => {
                if let Some(block) = self.slots.remove(slot) {
                    simulator.free(block);
                }
            }
            Operation::RecordStream { slot, stream } => {
                if let Some(&block) = self.slots.get(slot) {
                    simulator.record_stream(block, *stream);
                }
            }
            Operation::EventsReady(are_ready) => simulator.set_events_ready(*are_ready),
            Operation::Complete { stream, count } => simulator.complete_events(*stream, *count),
            Operation::EmptyCache { pool } => {
                simulator.empty_cache((*pool > 0).then_some((0, *pool)));
            }
            Operation::Begin { pool, stream } => simulator.begin_pool(private(pool), *stream),
            Operation::End { pool } => simulator.end_pool(private(pool)),
            Operation::Release { pool } => simulator.release_pool(private(pool)),
            Operation::LastResort { pool, is_on } => {
                simulator.set_last_resort(private(pool), *is_on);
            }
            Operation::NoSplit { pool } => simulator.set_no_split(private(pool)),
            Operation::Capture(is_on) => simulator.set_capturing(*is_on),
            Operation::Fraction(fraction) => simulator.set_memory_fraction(*fraction),
            Operation::Other(bytes) => simulator.set_other_bytes(*bytes),
            Operation::Settings(text) => {
                // PyTorch reads some options only once; the others start from their defaults again.
                let mut settings = Settings::parse(text).unwrap();
                let fraction = simulator.settings().per_process_memory_fraction;
                settings.per_process_memory_fraction = fraction;
                simulator.set_settings(&settings);
            }
            Operation::ResetPeaks => simulator.reset_peaks(),
            Operation::ResetAccumulated => simulator.reset_accumulated(),
            Operation::Statistics => write_statistics(&mut self.answer, simulator.statistics()),
            Operation::Segments => write_segments(&mut self.answer, simulator),
            Operation::Trace => {
                for event in simulator.take_trace() {
                    write_event(&mut self.answer, &event);
                }
            }
        }
    }

    fn malloc(&mut self, slot: usize, bytes: u64, stream: u64) {
        match self.simulator.malloc(bytes, stream) {
            Ok(block) => {
                let address = self.simulator.address(block);
                let _ = writeln!(self.answer, "{address:x}");
                self.slots.insert(slot, block);
            }
            Err(error) => {
                let _ = writeln!(self.answer, "{error}");
                self.slots.remove(&slot);
            }
        }
    }
}

fn write_stat(text: &mut String, stat: &Stat) {
    let _ = write!(
        text,
        " {}/{}/{}/{}",
        stat.current, stat.peak, stat.allocated, stat.freed
    );
}

fn write_statistics(text: &mut String, statistics: &Statistics) {
    let pools: [(&str, &PoolStat); 9] = [
        ("allocation", &statistics.allocation),
        ("segment", &statistics.segment),
        ("active", &statistics.active),
        ("inactive_split", &statistics.inactive_split),
        ("allocated_bytes", &statistics.allocated_bytes),
        ("reserved_bytes", &statistics.reserved_bytes),
        ("active_bytes", &statistics.active_bytes),
        ("inactive_split_bytes", &statistics.inactive_split_bytes),
        ("requested_bytes", &statistics.requested_bytes),
    ];
    text.push_str("statistics");
    for (name, stat) in pools {
        let _ = write!(text, " {name}");
        write_stat(text, &stat.all);
        write_stat(text, &stat.small);
        write_stat(text, &stat.large);
    }
    let _ = write!(
        text,
        " retries {} ooms {} rejections {} syncs {} device_allocs {} device_frees {}",
        statistics.num_alloc_retries,
        statistics.num_ooms,
        statistics.num_oom_rejections,
        statistics.num_sync_all_streams,
        statistics.num_device_alloc,
        statistics.num_device_free
    );
    write_stat(text, &statistics.oversize_allocations);
    write_stat(text, &statistics.oversize_segments);
    text.push('\n');
}

fn write_segments(text: &mut String, simulator: &Simulator) {
    let segments = simulator.segments();
    for segment in &segments {
        let _ = write!(
            text,
            "segment {:x} {} stream {:x} {}{} counter {} pool {},{}",
            segment.address,
            segment.total_size,
            segment.stream,
            if segment.is_small { "small" } else { "large" },
            if segment.is_expandable {
                " expandable"
            } else {
                ""
            },
            segment.counter,
            segment.pool.0,
            segment.pool.1
        );
        for block in &segment.blocks {
            let state = match block.state {
                BlockState::Allocated => "allocated",
                BlockState::AwaitingFree => "awaiting",
                BlockState::Inactive => "inactive",
            };
            let _ = write!(text, " {}:{}:{state}", block.size, block.requested_size);
        }
        text.push('\n');
    }
    let _ = writeln!(text, "segments {}", segments.len());
}

fn write_event(text: &mut String, event: &TraceEvent) {
    let action = match event.action {
        Action::Alloc => "alloc",
        Action::FreeRequested => "free_requested",
        Action::FreeCompleted => "free_completed",
        Action::SegmentAlloc => "segment_alloc",
        Action::SegmentFree => "segment_free",
        Action::SegmentMap => "segment_map",
        Action::SegmentUnmap => "segment_unmap",
        Action::Snapshot => "snapshot",
        Action::OutOfMemory => "oom",
        Action::Annotate => "annotate",
    };
    let _ = writeln!(
        text,
        "{action} {:x} {} {:x} {},{}",
        event.address, event.size, event.stream, event.pool.0, event.pool.1
    );
}
