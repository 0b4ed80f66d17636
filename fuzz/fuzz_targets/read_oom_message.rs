//! Any bytes as a log with OOM messages: answers whose ranges hold, never a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memfit_engine::oom_message::Scanner;

fuzz_target!(|data: &[u8]| {
    let mut scanner = Scanner::new();
    scanner.push(data);
    let found = scanner.finish("fuzz");
    let counted: u64 = found.messages.iter().map(|it| it.count).sum();
    assert_eq!(found.message_count, counted + found.further_count);
    for message in &found.messages {
        assert!(!message.summary.is_empty());
        for amount in message.causes.iter().filter_map(|it| it.bytes) {
            assert!(amount.low_bytes <= amount.high_bytes);
        }
    }
});
