//! The jobs of a transfer on a few threads.
//!
//! Responsible for doing each of them once, in order, until one fails or the caller asks to stop. Not
//! responsible for what they do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::error::ParkError;
use crate::store::Interrupted;

/// Most threads for one transfer: what a disk or memory can feed.
const MOST_THREADS: usize = 4;

/// Does all jobs, in order, on a few threads; the first error ends it.
pub(super) fn in_parallel<T: Send>(
    jobs: Vec<T>,
    work: &(impl Fn(T) -> Result<(), ParkError> + Sync),
    interrupted: Interrupted<'_>,
) -> Result<(), ParkError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(MOST_THREADS).min(jobs.len());
    let jobs = Mutex::new(jobs.into_iter());
    let failed = AtomicBool::new(false);
    let turn = || {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(job) = job.filter(|_| !failed.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        work(job)
            .inspect_err(|_| failed.store(true, Ordering::Relaxed))
            .map(|()| true)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            .filter_map(|_| {
                let named = std::thread::Builder::new().name("memfit-park".to_owned());
                // Where no thread can be had, the others do its work.
                named.spawn_scoped(scope, || while_true(&turn)).ok()
            })
            .collect();
        let mut own = Ok(true);
        while let Ok(true) = own {
            own = if interrupted() {
                failed.store(true, Ordering::Relaxed);
                Err(ParkError::Interrupted)
            } else {
                turn()
            };
        }
        let mut done = own.map(drop);
        for other in others {
            // It panics on nothing; if it did, its jobs are not done.
            let other = other.join().unwrap_or(Err(ParkError::Interrupted));
            done = done.and(other);
        }
        done
    })
}

/// Takes turns until there is none left.
fn while_true(turn: &impl Fn() -> Result<bool, ParkError>) -> Result<(), ParkError> {
    while turn()? {}
    Ok(())
}
