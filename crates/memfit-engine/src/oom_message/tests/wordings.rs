//! What each torch wrote, from public bug reports and from the strings of torch 2.15's libraries.

use super::super::{Amount, Kind, OomCause};
use super::{causes, only, open};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const ADVICE: &str = "If reserved but unallocated memory is large try setting \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation";

/// The middle of a printed number, to the MiB.
fn mib(amount: Option<Amount>) -> Option<u64> {
    let amount = amount?;
    Some(u64::midpoint(amount.low_bytes.0, amount.high_bytes.0) / MIB)
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table of texts")]
fn every_wording_gives_its_numbers() {
    // Text; device; request, total, allocated, free, unallocated, limit in MiB.
    type Row<'a> = (&'a str, u32, [Option<u64>; 6]);
    let table: [Row<'_>; 9] = [
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total capacity; 10.90 GiB \
             already allocated; 576.00 KiB free; 30.96 MiB cached)",
            0,
            [Some(1), Some(11_438), Some(11_161), Some(0), Some(30), None],
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.79 GiB total capacity; 6.12 GiB \
             already allocated; 9.69 MiB free; 6.20 GiB reserved in total by PyTorch)",
            1,
            [Some(20), Some(7_976), Some(6_266), Some(9), Some(81), None],
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 192.00 MiB (GPU 0; 4.00 GiB total \
             capacity; 3.08 GiB already allocated; 0 bytes free; 3.60 GiB allowed; 3.47 GiB reserved in total by PyTorch) If \
             reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
            0,
            [
                Some(192),
                Some(4_096),
                Some(3_153),
                Some(0),
                Some(399),
                Some(3_686),
            ],
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 \
             GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by \
             PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb",
            0,
            [
                Some(1_740),
                Some(6_144),
                Some(3_000),
                Some(0),
                Some(2_355),
                None,
            ],
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB of \
             which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has \
             966.00 MiB memory in use. Of the allocated memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by \
             PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF",
            0,
            [
                Some(1_996),
                Some(14_919),
                Some(734),
                Some(1_617),
                Some(33),
                None,
            ],
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.00 GiB of \
             which 40.00 GiB is free. Including non-PyTorch memory, this process has 39.00 GiB memory in use. 39.50 GiB allowed; \
             Of the allocated memory 38.00 GiB is allocated by PyTorch, with 1.50 GiB allocated in private pools (e.g., CUDA \
             Graphs), and 100.00 MiB is reserved by PyTorch but unallocated. ",
            3,
            // Free blocks of private pools are in what is printed as allocated.
            [
                Some(2_048),
                Some(80_896),
                Some(37_376),
                Some(40_960),
                Some(100),
                Some(40_448),
            ],
        ),
        (
            "OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 15.98 GiB of which \
             34.00 MiB is free. Of the allocated memory 15.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch \
             but unallocated.",
            0,
            [
                Some(256),
                Some(16_363),
                Some(15_360),
                Some(34),
                Some(200),
                None,
            ],
        ),
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. Of the \
             allocated memory 15.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please use \
             `empty_cache` to release all unoccupied cached memory.",
            0,
            [Some(8_192), Some(15_472), Some(15_360), None, Some(0), None],
        ),
        (
            "Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; 2.88 MiB free; 1.25 GiB \
             reserved in total by PyTorch)",
            0,
            [Some(20), Some(2_007), Some(1_269), Some(2), Some(10), None],
        ),
    ];
    for (text, device, numbers) in table {
        let it = only(text);
        assert_eq!(
            (it.kind, it.device, it.is_cut),
            (Kind::Allocator, Some(device), false),
            "{text}"
        );
        let read = [
            it.requested,
            it.total,
            it.allocated,
            it.free,
            it.unallocated,
            it.allowed,
        ];
        assert_eq!(read.map(mib), numbers, "{text}");
    }
}

#[test]
fn other_allocators_say_what_they_say() {
    let pool = only(
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n\
         Currently allocated     : 20.50 GiB\nRequested               : 50.00 MiB\nDevice limit            : 23.64 GiB\n\
         Free (according to CUDA): 12.81 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : \
         17179869184.00 GiB",
    );
    assert_eq!(
        (pool.kind, pool.is_cut, pool.allowed),
        (Kind::DriverPool, false, None)
    );
    assert_eq!(mib(pool.requested), Some(50));
    assert_eq!(causes(&pool), []);
    let capped = only(
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 4.00 GiB\n\
         Requested               : 1.50 GiB\nDevice limit            : 23.64 GiB\nFree (according to CUDA): 18.00 GiB\n\
         PyTorch limit (set by user-supplied memory fraction)\n                        : 5.00 GiB",
    );
    assert_eq!(causes(&capped), [OomCause::Limit]);
    let rejected = only(
        "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed \
         per_process_memory_fraction limit. Requested size: 1.21 GiB",
    );
    assert_eq!(
        (rejected.kind, mib(rejected.requested)),
        (Kind::Rejected, Some(1_239))
    );
    assert_eq!(causes(&rejected), [OomCause::Limit]);
    for text in [
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes",
    ] {
        let it = only(text);
        assert_eq!(
            (it.kind, causes(&it), open(&it)),
            (Kind::Driver, vec![], vec![]),
            "{text}"
        );
        assert!(it.summary.contains("no number"), "{}", it.summary);
    }
    for text in [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
         allocate 12000000000 bytes. Error code 12 (Cannot allocate memory)",
        "[enforce fail at ..\\c10\\core\\CPUAllocator.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried to allocate \
         12000000000 bytes. Buy new RAM!",
    ] {
        let it = only(text);
        assert_eq!(
            (it.kind, mib(it.requested), causes(&it)),
            (Kind::Host, Some(11_444), vec![])
        );
        assert!(it.next[0].command.starts_with("memfit run "), "{text}");
    }
    let absurd = only("CUDA out of memory. Tried to allocate more than 1EB memory.");
    assert!(
        absurd.summary.contains("no device has that"),
        "{}",
        absurd.summary
    );
}

#[test]
fn expandable_segments_are_said() {
    let start = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 60.00 GiB is \
        free. Of the allocated memory 10.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. ";
    let on = only(&format!(
        "{start}expandable_segments is enabled. If instead the process is running out"
    ));
    assert!(on.is_expandable);
    assert_eq!(causes(&on), [OomCause::DriverHadRoom]);
    let short = only(&format!(
        "{start}This allocation exceeds the expandable-segment reserve of 1.00 GiB for this stream, and a single allocation"
    ));
    assert_eq!(causes(&short), [OomCause::ExpandableReserve]);
    assert!(!only(&format!("{start}{ADVICE}")).is_expandable);
}

/// A message of torch 2 in MiB: request, total, free, rest.
fn second(request: u64, total: u64, free: u64, rest: &str) -> String {
    format!(
        "CUDA out of memory. Tried to allocate {request}.00 MiB. GPU 0 has a total capacity of {total}.00 MiB of which \
         {free}.00 MiB is free. {rest}"
    )
}

fn parts(allocated: u64, unallocated: u64) -> String {
    format!(
        "Of the allocated memory {allocated}.00 MiB is allocated by PyTorch, and {unallocated}.00 MiB is reserved by \
         PyTorch but unallocated. {ADVICE}"
    )
}

#[test]
fn each_cause_is_named_where_the_numbers_show_it() {
    use OomCause::{
        DriverHadRoom, FragmentationPossible, Limit, NonPytorch, OtherProcesses, PrivatePools,
        TooMuchAlive,
    };
    let own = "Including non-PyTorch memory, this process has 6100.00 MiB memory in use. ";
    let others = "Process 7 has 2000.00 MiB memory in use. ";
    for (text, expected) in [
        (
            second(500, 8000, 100, &format!("{own}{}", parts(5800, 100))),
            vec![TooMuchAlive],
        ),
        (
            second(
                500,
                8200,
                100,
                &format!("{others}{own}{}", parts(5800, 100)),
            ),
            vec![TooMuchAlive, OtherProcesses],
        ),
        // Even without the others there is too little.
        (
            second(
                5000,
                8200,
                100,
                &format!("{others}{own}{}", parts(5800, 100)),
            ),
            vec![TooMuchAlive],
        ),
        (
            second(
                500,
                8200,
                100,
                &format!("{others}{own}{}", parts(3900, 2000)),
            ),
            vec![OtherProcesses, FragmentationPossible],
        ),
        (
            second(
                500,
                8200,
                2000,
                &format!("{own}6200.00 MiB allowed; {}", parts(5800, 100)),
            ),
            vec![Limit, TooMuchAlive],
        ),
        (
            second(
                500,
                8200,
                2000,
                &format!("{own}6200.00 MiB allowed; {}", parts(5000, 900)),
            ),
            vec![Limit, FragmentationPossible],
        ),
        (
            second(
                500,
                8200,
                100,
                &format!(
                    "Including non-PyTorch memory, this process has 8100.00 MiB memory in use. {}",
                    parts(4000, 100)
                ),
            ),
            vec![TooMuchAlive, NonPytorch],
        ),
        (
            second(500, 8200, 2000, &format!("{own}{}", parts(5900, 100))),
            vec![DriverHadRoom],
        ),
        (
            second(
                500,
                8000,
                100,
                &format!(
                    "{own}Of the allocated memory 5800.00 MiB is allocated by PyTorch, with 700.00 MiB allocated in private pools \
                     (e.g., CUDA Graphs), and 100.00 MiB is reserved by PyTorch but unallocated. "
                ),
            ),
            vec![PrivatePools],
        ),
        (
            second(9000, 8000, 100, &format!("{own}{}", parts(5800, 100))),
            vec![TooMuchAlive],
        ),
    ] {
        assert_eq!(causes(&only(&text)), expected, "{text}");
    }
}

#[test]
fn rounding_is_said_and_not_decided() {
    // 6.20 - 6.12 GiB may be 71.7 to 92.2 MiB.
    let text = |request: &str| {
        format!(
            "CUDA out of memory. Tried to allocate {request} (GPU 0; 7.79 GiB total capacity; 6.12 GiB already allocated; 0 bytes \
             free; 6.20 GiB reserved in total by PyTorch)"
        )
    };
    let (certain, perhaps, never) = (text("70.00 MiB"), text("80.00 MiB"), text("100.00 MiB"));
    assert_eq!(causes(&only(&certain)), [OomCause::FragmentationPossible]);
    let perhaps = only(&perhaps);
    assert_eq!(causes(&perhaps), []);
    assert!(open(&perhaps).starts_with(&[OomCause::TooMuchAlive, OomCause::FragmentationPossible]));
    assert!(
        perhaps.undecided[0].summary.contains("rounded"),
        "{:?}",
        perhaps.undecided
    );
    assert_eq!(causes(&only(&never)), [OomCause::TooMuchAlive]);
    // A segment of 20 MiB serves requests from 1 MiB: 10 MiB in no block may have held it.
    let segment = only(&second(20, 8000, 5, &parts(7000, 10)));
    assert_eq!(causes(&segment), []);
    assert!(
        segment.undecided[0]
            .summary
            .contains("20.0 MiB is what PyTorch asks")
    );
}

#[test]
fn a_process_seen_from_outside_its_container_is_not_another_one() {
    let rest = format!(
        "Process 77 has 6900.00 MiB memory in use. {}",
        parts(5800, 100)
    );
    let it = only(&second(500, 8000, 100, &rest));
    assert_eq!(causes(&it), [OomCause::TooMuchAlive]);
    assert!(
        it.undecided
            .iter()
            .any(|it| it.summary.contains("container")),
        "{it:#?}"
    );
    // One that holds less than PyTorch reserved is not this one.
    let rest = format!(
        "Process 77 has 2000.00 MiB memory in use. {}",
        parts(5800, 100)
    );
    assert_eq!(
        causes(&only(&second(500, 8000, 100, &rest))),
        [OomCause::TooMuchAlive, OomCause::OtherProcesses]
    );
    // Where the driver cannot tell, torch prints 2^64 bytes.
    let rest = format!(
        "Process 77 has 17179869184.00 GiB memory in use. Including non-PyTorch memory, this process has 17179869184.00 GiB \
         memory in use. {}",
        parts(5800, 100)
    );
    let it = only(&second(500, 8000, 100, &rest));
    assert_eq!(
        (it.is_cut, it.this_process, it.other_processes[0].bytes),
        (false, None, None)
    );
    assert_eq!(causes(&it), [OomCause::TooMuchAlive]);
}

#[test]
fn a_limit_that_alone_is_not_in_the_way_is_said() {
    let it = only(&second(
        500,
        8200,
        100,
        &format!("6200.00 MiB allowed; {}", parts(6000, 100)),
    ));
    assert_eq!(causes(&it), [OomCause::Limit, OomCause::TooMuchAlive]);
    assert_eq!(it.causes[0].is_enough, Some(false));
    let it = only(&second(
        500,
        8200,
        2000,
        &format!("6200.00 MiB allowed; {}", parts(6000, 100)),
    ));
    assert_eq!(it.causes[0].is_enough, Some(true));
    assert_eq!(
        it.summary,
        "a limit of this process refused and too much is alive; it is enough that the limit is raised or less is alive"
    );
    assert!(it.next[0].command.contains("--device-memory 8200MiB"));
    assert_eq!(it.total.unwrap().low_bytes.0 / GIB, 8);
}
