//! The allocator's simulator against the real allocator: the same operations, the same answers.
//!
//! The real one is `libc10_cuda.so` of the installed torch, run without a GPU on a stand-in runtime
//! (`stand_in_runtime.cpp`) by a driver program (`driver.cpp`). Compared are addresses, error texts, all
//! statistics, all segments with their blocks, and the trace. The tests skip, saying so, where there is no
//! compiler or no torch 2.15.
//!
//! With `MEMFIT_ORACLE=required` they fail instead; `.ci/run` sets that, so that a green run has compared.
//! `MEMFIT_ORACLE_OPERATIONS` sets how many random operations are run in each of the cases.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test fails by panicking, says on stderr what it skips and on stdout what it measured"
)]

mod cases;
mod counterfactual;
mod differential;
mod random;
mod real;
mod regressions;
mod script;
mod settings;
mod speed;
