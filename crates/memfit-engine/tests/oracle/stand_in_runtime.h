// How the driver program steers the stand-in runtime.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// The device: its bytes, and whether new address ranges are handed out downwards.
void stand_in_set_device(size_t total_bytes, bool is_descending);
// Bytes that somebody else holds on the device.
void stand_in_set_other(size_t other_bytes);
// Whether every event, recorded or yet to come, counts as complete.
void stand_in_set_events_ready(bool are_ready);
// Completes the oldest `count` incomplete events of a stream.
void stand_in_complete(uintptr_t stream, size_t count);
// Whether streams say that they are being captured.
void stand_in_set_capturing(bool is_capturing);
}
