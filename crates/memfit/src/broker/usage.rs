//! What is in use of each GPU, by any process: NVML, read in a thread of its own.
//!
//! Responsible for reading only when somebody asks and at most once a second, and for holding the broker up
//! no longer than [`PATIENCE`]: a driver may take seconds to open and may never answer. Not responsible for
//! the host (`pressure.rs`), nor for what follows for grants (`occupancy.rs`).

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::log::Log;
use crate::device::{Driver, Gpu};

/// How long an answer stands for now.
const FRESH: Duration = Duration::from_secs(1);
/// How long to wait for one.
const PATIENCE: Duration = Duration::from_millis(50);

/// The devices that answered.
type Reading = BTreeMap<String, Gpu>;

/// The GPUs as they were a second ago or less.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// Absent where there is nothing to read.
    reader: Option<Reader>,
    latest: Reading,
    /// When the reader was last asked, or found busy.
    asked: Option<Instant>,
}

/// The other end of the thread.
#[derive(Debug)]
struct Reader {
    questions: Sender<()>,
    answers: Receiver<Reading>,
    /// Whether an answer is still to come.
    is_busy: bool,
}

impl Usage {
    /// Opens NVML in the background if one of the devices is a GPU.
    pub(super) fn of<'a>(devices: impl Iterator<Item = &'a str>, log: Log) -> Self {
        let gpus = devices.filter_map(|name| {
            let index: u32 = name.strip_prefix("cuda:")?.parse().ok()?;
            Some((name.to_owned(), index))
        });
        let gpus: Vec<(String, u32)> = gpus.collect();
        if gpus.is_empty() {
            return Self::default();
        }
        Self::read_by(move || match Driver::open() {
            Ok(driver) => {
                // Open until the process ends: to close it in this thread meanwhile would be a race.
                let driver: &'static Driver = Box::leak(Box::new(driver));
                Some(move || {
                    let told = gpus.iter().filter_map(|(name, index)| {
                        driver.gpu(*index).map(|gpu| (name.clone(), gpu))
                    });
                    told.collect()
                })
            }
            Err(reason) => {
                log.warn("gpus_not_seen", json!({ "reason": reason }));
                None
            }
        })
    }

    /// Reads with what `open` gives, in a thread that ends with the last question, or at once where it gives nothing.
    fn read_by<R: FnMut() -> Reading>(open: impl FnOnce() -> Option<R> + Send + 'static) -> Self {
        let (questions, asked) = channel();
        let (answer, answers) = channel();
        let thread = thread::Builder::new().name("memfit-nvml".to_owned());
        let started = thread.spawn(move || {
            let Some(mut read) = open() else { return };
            while asked.recv().is_ok() && answer.send(read()).is_ok() {}
        });
        let reader = started.ok().map(|_thread| Reader {
            questions,
            answers,
            is_busy: false,
        });
        Self {
            reader,
            ..Self::default()
        }
    }

    /// Whether the driver has been asked and has not answered yet, so that nothing is known at the moment.
    pub(super) fn is_awaited(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.is_busy)
    }

    /// The GPUs that are known at `now`; the others report nothing.
    pub(super) fn at(&mut self, now: Instant) -> &Reading {
        let Some(reader) = &mut self.reader else {
            return &self.latest;
        };
        let is_fresh = self
            .asked
            .is_some_and(|asked| now.saturating_duration_since(asked) < FRESH);
        let patience = if is_fresh {
            Duration::ZERO
        } else {
            self.asked = Some(now);
            self.latest.clear();
            reader.ask();
            PATIENCE
        };
        if reader.is_busy {
            match reader.answers.recv_timeout(patience) {
                Ok(reading) => {
                    reader.is_busy = false;
                    self.latest = reading;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.reader = None,
            }
        }
        &self.latest
    }
}

impl Reader {
    /// Asks anew, unless the last question is not answered yet.
    fn ask(&mut self) {
        // An answer that was not waited for may be old.
        let has_old = self.is_busy && self.answers.try_recv().is_ok();
        if has_old || !self.is_busy {
            // A thread that is gone is noticed by the request that waits for its answer.
            let _gone = self.questions.send(());
            self.is_busy = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(used_bytes: u64) -> Reading {
        let gpu = Gpu {
            total_bytes: 80,
            used_bytes,
            ..Gpu::default()
        };
        Reading::from([("cuda:0".to_owned(), gpu)])
    }

    /// The `step`th second of a test.
    fn second(began: Instant, step: u64) -> Instant {
        began + Duration::from_secs(step)
    }

    /// Asks without moving on until there is an answer.
    fn patient(usage: &mut Usage, now: Instant) -> Reading {
        let began = Instant::now();
        while usage.at(now).is_empty() && began.elapsed() < Duration::from_secs(60) {
            thread::yield_now();
        }
        usage.latest.clone()
    }

    /// Numbers its readings from 1.
    fn counting() -> Usage {
        Usage::read_by(|| {
            let mut count = 0;
            Some(move || {
                count += 1;
                reading(count)
            })
        })
    }

    #[test]
    fn nothing_is_opened_where_no_device_is_a_gpu() {
        let log = Log {
            is_quiet: true,
            is_verbose: false,
        };
        let mut usage = Usage::of(["host"].into_iter(), log);
        assert!(usage.reader.is_none());
        assert!(usage.at(Instant::now()).is_empty());
    }

    #[test]
    fn questions_within_a_second_are_one_reading_and_later_ones_another() {
        let (mut usage, began) = (counting(), Instant::now());
        assert_eq!(patient(&mut usage, began), reading(1));
        assert_eq!(usage.at(began + Duration::from_millis(999)), &reading(1));
        assert_eq!(patient(&mut usage, second(began, 1)), reading(2));
    }

    #[test]
    fn a_driver_that_hangs_is_waited_for_once_a_second_and_what_it_says_too_late_is_not_now() {
        let (open, gate) = channel::<()>();
        let (enter, entered) = channel();
        let mut usage = Usage::read_by(move || {
            let mut count = 0;
            Some(move || {
                count += 1;
                let _seen = enter.send(count);
                // The end of the test opens it too.
                let _open = gate.recv();
                reading(count)
            })
        });
        let began = Instant::now();
        assert!(usage.at(began).is_empty());
        assert!(began.elapsed() >= PATIENCE);
        assert!(usage.is_awaited());
        let waited = Instant::now();
        for _ in 0..1000 {
            assert!(usage.at(began).is_empty());
        }
        assert!(waited.elapsed() < 500 * PATIENCE);
        // No second question while the first is open: the second answer is that of the second after.
        assert!(usage.at(second(began, 1)).is_empty());
        open.send(()).unwrap();
        assert_eq!(patient(&mut usage, second(began, 1)), reading(1));
        assert!(usage.at(second(began, 2)).is_empty());
        open.send(()).unwrap();
        // The answer lies there once the thread is at the next question, and an hour passes.
        let reader = usage.reader.as_ref().unwrap();
        reader.questions.send(()).unwrap();
        assert!(entered.iter().any(|count| count == 3));
        open.send(()).unwrap();
        assert_eq!(patient(&mut usage, second(began, 3600)), reading(3));
        assert!(!usage.is_awaited());
    }

    #[test]
    fn what_cannot_be_opened_is_unknown() {
        let mut usage = Usage::read_by(|| None::<fn() -> Reading>);
        let began = Instant::now();
        while usage.reader.is_some() && began.elapsed() < Duration::from_secs(60) {
            assert!(usage.at(began).is_empty());
        }
        assert!(usage.reader.is_none());
    }
}
