//! Engine work that Ctrl-C can end.
//!
//! Responsible for running a pure computation on its own thread while this one asks the host whether
//! the user wants to stop (Python keeps the signal handler, and only this thread may ask it). Not
//! responsible for stopping the computation: it is pure, so it is left behind and dies with the
//! process.

use std::any::Any;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::error::Failure;
use crate::host::Host;

/// Time between two questions.
const POLL: Duration = Duration::from_millis(50);
/// The engine's recursion is bounded, but its candidates are many: the same stack as a main thread.
const STACK_BYTES: usize = 8 << 20;

/// Runs `job`, or returns early when the user interrupts.
///
/// # Errors
///
/// [`Failure::Interrupted`]; [`Failure::Internal`] when the job panicked.
pub(crate) fn interruptible<T: Send + 'static>(
    host: &mut dyn Host,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            // The receiver is gone only after an interruption.
            let _unwanted = sender.send(job());
        })
        .map_err(|error| Failure::Internal(format!("cannot start a thread: {error}")))?;
    loop {
        match receiver.recv_timeout(POLL) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) if host.interrupted() => {
                return Err(Failure::Interrupted);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let panic = thread.join().err();
                return Err(Failure::Internal(panic_message(panic.as_deref())));
            }
        }
    }
}

/// The words of a panic.
pub(crate) fn panic_message(panic: Option<&(dyn Any + Send)>) -> String {
    let words = panic.and_then(|payload| {
        payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
    });
    format!(
        "internal error: {}",
        words.unwrap_or("the engine stopped without a message")
    )
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Instant;

    use memfit_engine::cost::DeviceProfile;
    use memfit_engine::plan::{Asked, Plan, PlanRequest};
    use serde_json::Value;

    use super::*;
    use crate::host::{HostError, Pruning, Script, Settings};

    /// Whether the user wants to stop.
    struct User(bool);

    impl Host for User {
        fn insist_on_weights(&mut self) -> Result<(), HostError> {
            unreachable!()
        }
        fn build(&mut self, _: &str, _: &Settings, _: Option<&str>) -> Result<(), HostError> {
            unreachable!()
        }
        fn capture(
            &mut self,
            _: &str,
            _: &Settings,
            _: Option<&str>,
        ) -> Result<Vec<u8>, HostError> {
            unreachable!()
        }
        fn alternatives(
            &mut self,
            _: &str,
            _: &Settings,
            _: Option<&str>,
            _: &[u8],
            _: &[Asked],
        ) -> Result<Vec<u8>, HostError> {
            unreachable!()
        }
        fn op_seconds(&mut self, _: &str, _: &Settings, _: &[u8]) -> Result<Value, HostError> {
            unreachable!()
        }
        fn device_profile(&mut self, _: &str, _: Option<&Path>) -> Result<Value, HostError> {
            unreachable!()
        }
        fn offer(
            &mut self,
            _: &str,
            _: &str,
            _: Option<&DeviceProfile>,
        ) -> Result<Value, HostError> {
            unreachable!()
        }
        fn overhead_bytes(&mut self, _: &str) -> Result<u64, HostError> {
            unreachable!()
        }
        fn examine(&mut self, _: Option<&str>) -> Result<Value, HostError> {
            unreachable!()
        }
        fn profile_path(&mut self, _: &str) -> Result<PathBuf, HostError> {
            unreachable!()
        }
        fn calibrate(&mut self, _: &str, _: f64, _: Option<&Path>) -> Result<String, HostError> {
            unreachable!()
        }
        fn prune(&mut self, _: &str, _: &Settings, _: &Pruning) -> Result<Value, HostError> {
            unreachable!()
        }
        fn verify(&mut self, _: &str, _: &Settings, _: &Plan) -> Result<Value, HostError> {
            unreachable!()
        }
        fn verify_compiled(
            &mut self,
            _: &str,
            _: &Settings,
            _: &[u8],
            _: u64,
            _: &PlanRequest,
        ) -> Result<Value, HostError> {
            unreachable!()
        }
        fn run_script(&mut self, _: &Script) -> Result<Value, HostError> {
            unreachable!()
        }
        fn interrupted(&mut self) -> bool {
            self.0
        }
    }

    #[test]
    fn a_result_comes_back() {
        assert_eq!(interruptible(&mut User(false), || 7).unwrap(), 7);
    }

    #[test]
    fn long_work_ends_with_the_users_patience() {
        let start = Instant::now();
        let result = interruptible(&mut User(true), || {
            std::thread::sleep(Duration::from_secs(30));
        });
        assert!(matches!(result, Err(Failure::Interrupted)));
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_panic_is_a_bug_and_keeps_its_words() {
        let result: Result<(), Failure> =
            interruptible(&mut User(false), || panic!("out of {}", "tea"));
        let Err(Failure::Internal(message)) = result else {
            panic!("not internal")
        };
        assert_eq!(message, "internal error: out of tea");
    }
}
