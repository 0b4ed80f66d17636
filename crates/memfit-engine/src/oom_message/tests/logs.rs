//! Logs as people have them, and hostile ones.

use proptest::prelude::*;

use super::super::{Kind, Scanner};
use super::{only, scan};

const MESSAGE: &str = "CUDA out of memory. Tried to allocate 576.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which \
    370.69 MiB is free. Process 16335 has 25.34 GiB memory in use. Including non-PyTorch memory, this process has 5.55 GiB \
    memory in use. Of the allocated memory 4.89 GiB is allocated by PyTorch, and 77.08 MiB is reserved by PyTorch but \
    unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF";

#[test]
fn a_message_is_found_wherever_it_stands() {
    let expected = only(MESSAGE);
    let wrapped = |width: usize, prefix: &str| {
        let bytes = MESSAGE.as_bytes().chunks(width);
        let lines = bytes.map(|line| format!("{prefix}{}\n", String::from_utf8_lossy(line)));
        lines.collect::<String>()
    };
    let utf_16: Vec<u8> = [0xff, 0xfe]
        .into_iter()
        .chain(MESSAGE.encode_utf16().flat_map(u16::to_le_bytes))
        .collect();
    let logs: [Vec<u8>; 8] = [
        format!("Epoch 1\nloss 0.3\nTraceback:\n  x\ntorch.OutOfMemoryError: {MESSAGE}\n\n").into(),
        wrapped(80, "").into(),
        wrapped(37, "[rank0]: ").into(),
        wrapped(60, "2026-01-02 10:11:12,345 - __main__ - ERROR - ").into(),
        format!(
            "\x1b[1;31mtorch.OutOfMemoryError\x1b[0m: {}",
            MESSAGE.replace("576", "\x1b[33m576\x1b[0m")
        )
        .into(),
        format!("{{\"level\":\"error\",\"msg\":\"{MESSAGE}\"}}").into(),
        MESSAGE.replace(' ', "\r\n").into(),
        utf_16,
    ];
    for log in logs {
        let found = scan(&log);
        assert_eq!(found.message_count, 1, "{}", String::from_utf8_lossy(&log));
        assert_eq!(
            found.messages[0],
            expected,
            "{}",
            String::from_utf8_lossy(&log)
        );
    }
}

#[test]
fn equal_messages_are_counted_and_others_told_apart() {
    let other = MESSAGE.replace("GPU 0", "GPU 1");
    let log = format!("[rank0]: {MESSAGE}\n[rank1]: {other}\n").repeat(5);
    let found = scan(log.as_bytes());
    let told: Vec<_> = found
        .messages
        .iter()
        .map(|it| (it.device, it.count))
        .collect();
    assert_eq!(told, [(Some(0), 5), (Some(1), 5)]);
    assert_eq!((found.message_count, found.further_count), (10, 0));
    let many: String = (0..150)
        .map(|it| MESSAGE.replace("576.00", &format!("{it}.00")))
        .collect();
    let found = scan(many.as_bytes());
    assert_eq!(
        (
            found.messages.len(),
            found.message_count,
            found.further_count
        ),
        (100, 150, 50)
    );
}

#[test]
fn no_message_is_seen_where_there_is_none() {
    for text in [
        "",
        "training went well",
        "skipped a batch: out of memory",
        "we ran out of memory. Tried to allocate a table for ten",
        "except torch.cuda.OutOfMemoryError:",
        "Tried to allocate 20.00 MiB",
        "MPS backend out of memory (MPS allocated: 7.00 GB, max allowed: 9.07 GB). Tried to allocate 256 bytes on private pool.",
        "DefaultCPUAllocator: all is well",
    ] {
        assert_eq!(scan(text.as_bytes()).message_count, 0, "{text}");
    }
}

#[test]
fn a_message_that_ends_early_decides_no_more_than_it_says() {
    for end in 0..MESSAGE.len() {
        let found = scan(&MESSAGE.as_bytes()[..end]);
        assert!(found.message_count <= 1);
        if let Some(it) = found.messages.first() {
            let is_whole = MESSAGE[..end].contains("unallocated.");
            assert_eq!(it.is_cut, !is_whole, "{}", &MESSAGE[..end]);
            assert!(
                is_whole || it.summary.contains("does not tell"),
                "{}",
                it.summary
            );
        }
    }
}

#[test]
fn numbers_that_nobody_has_are_not_believed() {
    for number in [
        "99999999999999999999999999.00",
        "1.2.3",
        "..",
        "-1",
        "1e5",
        "",
    ] {
        let text = MESSAGE.replace("576.00", number);
        for it in scan(text.as_bytes()).messages {
            assert_eq!(it.requested, None, "{number}");
            assert_eq!(it.causes, [], "{number}");
        }
    }
    let text = MESSAGE.replace("Process 16335", "Process 99999999999999999999999");
    assert!(only(&text).is_cut);
}

#[test]
fn a_long_log_is_read_in_pieces() {
    let filler = "2026-01-01 a line of a log that says nothing at all\n".repeat(30_000);
    let log = format!(
        "{filler}{MESSAGE}\n{filler}{MESSAGE}\n{filler}{}",
        MESSAGE.replace("GPU 0", "GPU 2")
    );
    for size in [1_000, 65_536, 1 << 20, log.len()] {
        let mut scanner = Scanner::new();
        log.as_bytes()
            .chunks(size)
            .for_each(|piece| scanner.push(piece));
        let found = scanner.finish("log");
        let told: Vec<_> = found
            .messages
            .iter()
            .map(|it| (it.device, it.count))
            .collect();
        assert_eq!(told, [(Some(0), 2), (Some(2), 1)], "{size}");
    }
    let one_line = "x".repeat(3 << 20) + MESSAGE + &"y".repeat(3 << 20);
    assert_eq!(scan(one_line.as_bytes()).message_count, 1);
}

#[test]
fn a_log_full_of_its_words_is_read_all_the_same() {
    let words = "CUDA out of memory. Tried to allocate ".repeat(20_000);
    assert_eq!(scan(words.as_bytes()).message_count, 0);
    let log = format!("{words}\n{MESSAGE}\n{words}");
    assert_eq!(scan(log.as_bytes()).message_count, 1);
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(log in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let _found = scan(&log);
    }

    #[test]
    fn no_damaged_message_makes_it_panic(
        damage in proptest::collection::vec((0..MESSAGE.len(), any::<u8>()), 1..20),
        kind in 0_u8..3,
    ) {
        let mut log = MESSAGE.as_bytes().to_vec();
        for (place, byte) in damage {
            match kind {
                0 => log[place] = byte,
                1 => log.insert(place, byte),
                _ => drop(log.remove(place % log.len())),
            }
        }
        for it in scan(&log).messages {
            prop_assert_eq!(it.kind, Kind::Allocator);
            for cause in it.causes {
                prop_assert!(cause.bytes.is_none_or(|it| it.low_bytes <= it.high_bytes));
            }
        }
    }
}
