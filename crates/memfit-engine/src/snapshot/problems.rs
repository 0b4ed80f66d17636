//! Problems of a snapshot, as many as are shown.
//!
//! Responsible for counting those that are not. Not responsible for finding any.

use super::{MOST_PROBLEMS, Problem};

/// Problems, no more than are shown.
#[derive(Default)]
pub(super) struct Problems {
    shown: Vec<Problem>,
    count: u64,
}

impl Problems {
    pub(super) fn of_whole(&mut self, what: String) {
        self.add(Problem {
            device: None,
            event: None,
            what,
        });
    }

    pub(super) fn of_device(&mut self, device: u32, what: String) {
        self.add(Problem {
            device: Some(device),
            event: None,
            what,
        });
    }

    pub(super) fn of_events(&mut self, device: u32, faults: Vec<(u64, String)>, count: u64) {
        let shown = faults.len() as u64;
        for (event, what) in faults {
            self.add(Problem {
                device: Some(device),
                event: Some(event),
                what,
            });
        }
        self.count += count - shown;
    }

    pub(super) fn add(&mut self, problem: Problem) {
        self.count += 1;
        if self.shown.len() < MOST_PROBLEMS {
            self.shown.push(problem);
        }
    }

    pub(super) fn finish(mut self) -> Vec<Problem> {
        let rest = self.count - self.shown.len() as u64;
        if rest > 0 {
            let what = format!("{rest} more problems are not listed");
            self.shown.push(Problem {
                device: None,
                event: None,
                what,
            });
        }
        self.shown
    }
}
