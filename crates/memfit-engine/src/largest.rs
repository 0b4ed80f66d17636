//! The largest value of a number that a step still fits with, found by few trials.
//!
//! Responsible for which value to try next. Not responsible for trying: a trial is a capture of the step with that
//! value, perhaps a plan for it.
//!
//! Peaks are polynomials in the sizes of a step, piece by piece: three trials tell the next one, and the answer is
//! verified, since the search ends only when a value fits and the next one does not.
//!
//! Invariant: a step that fits with a value is taken to fit with smaller ones.

use std::collections::BTreeMap;

/// Most trials of one search.
const MAX_TRIALS: usize = 32;

/// Trials that follow the law of the peak; later ones halve what is left.
const TRIALS_BY_LAW: usize = 12;

/// Trials that the law is taken from, the nearest to the budget.
const POINTS: usize = 3;

/// What a trial rules out at least once a bracket is known: one in so many.
const LEAST_CUT: u64 = 24;

/// Largest step upwards from what is known to fit.
const GROWTH: u64 = 8;

/// What came of one trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    /// Whether the step fits.
    pub fits: bool,
    /// The bytes that decide, where there are some: a step may fail with a value.
    pub bytes: Option<u64>,
}

/// A search for the largest value.
#[derive(Debug, Clone)]
pub struct LargestSearch {
    budget_bytes: u64,
    first: u64,
    trials: BTreeMap<u64, Trial>,
}

/// What a search wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// A trial with this value.
    Try(u64),
    /// Nothing: this value fits, and one more does not; 0 where not even 1 fits.
    Found(u64),
    /// Nothing: this value fits, and the search was given up before it met one that does not.
    GivenUp(u64),
}

impl LargestSearch {
    /// Begins one.
    #[must_use]
    pub fn new(budget_bytes: u64, first: u64) -> Self {
        Self {
            budget_bytes,
            first: first.max(1),
            trials: BTreeMap::new(),
        }
    }

    /// Takes note of a trial.
    pub fn tried(&mut self, value: u64, trial: Trial) {
        self.trials.insert(value, trial);
    }

    /// What it wants next.
    #[must_use]
    pub fn next(&self) -> Next {
        let over = self.over();
        let fits = self.fits_below(over);
        match over {
            Some(over) if over == fits + 1 => return Next::Found(fits),
            _ if self.trials.is_empty() => return Next::Try(self.first),
            _ if self.trials.len() >= MAX_TRIALS => return Next::GivenUp(fits),
            _ => {}
        }
        let lowest = fits + 1;
        let highest = over.map_or(fits.saturating_mul(GROWTH).max(lowest), |over| over - 1);
        let halved = lowest + (highest - lowest) / 2;
        // Where the step fails for another reason, the law knows nothing of it.
        let has_law = over.is_none_or(|over| self.trials[&over].bytes.is_some());
        let guess = if has_law && self.trials.len() < TRIALS_BY_LAW {
            self.by_law(lowest, highest)
        } else {
            None
        };
        let blind = if over.is_some() {
            halved
        } else {
            fits.saturating_mul(2).clamp(lowest, highest)
        };
        Next::Try(guess.unwrap_or(blind))
    }

    /// The smallest value that is known not to fit.
    fn over(&self) -> Option<u64> {
        let mut over = self.trials.iter().filter(|(_, trial)| !trial.fits);
        over.next().map(|(&value, _)| value)
    }

    /// The largest value that fits, below one that does not; 0 for none.
    fn fits_below(&self, over: Option<u64>) -> u64 {
        let below = self.trials.range(..over.unwrap_or(u64::MAX));
        let mut fitting = below.filter(|(_, trial)| trial.fits);
        fitting.next_back().map_or(0, |(&value, _)| value)
    }

    /// Where the law of the peak meets the budget, kept within bounds: the largest value that it lets fit, or one
    /// more where that is known to fit already.
    #[expect(
        clippy::cast_precision_loss,
        reason = "a guess needs no more than 53 bits"
    )]
    fn by_law(&self, lowest: u64, highest: u64) -> Option<u64> {
        let known = self.trials.iter();
        let known = known.filter_map(|(&value, trial)| Some((trial.bytes?, value)));
        // Sizes that are rounded up take the same bytes for many values: such a flat stretch is no law.
        let known: BTreeMap<u64, u64> = known.collect();
        let mut known: Vec<(u64, u64)> = known
            .iter()
            .map(|(&bytes, &value)| (value, bytes))
            .collect();
        known.sort_by_key(|&(value, bytes)| (bytes.abs_diff(self.budget_bytes), value));
        known.truncate(POINTS);
        if known.len() < 2 {
            return None;
        }
        let known: Vec<(f64, f64)> = known.iter().map(|&(x, y)| (x as f64, y as f64)).collect();
        let fits = |value: u64| interpolated(&known, value as f64) <= self.budget_bytes as f64;
        let (mut low, mut high) = (lowest, highest);
        if !fits(lowest) {
            high = lowest;
        }
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        if self.over().is_none() || highest - lowest < LEAST_CUT {
            return Some(low);
        }
        // Where the law is wrong, each trial still rules out a share of what is left.
        let share = (highest - lowest) / LEAST_CUT;
        Some(low.clamp(lowest + share, highest - share))
    }
}

/// The polynomial through points, at a place.
fn interpolated(points: &[(f64, f64)], at: f64) -> f64 {
    let term = |(index, &(x, y)): (usize, &(f64, f64))| {
        let others = points
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index);
        y * others
            .map(|(_, &(other, _))| (at - other) / (x - other))
            .product::<f64>()
    };
    points.iter().enumerate().map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches under a peak that is known, and says what was found and with how many trials.
    fn search(budget: u64, first: u64, peak: impl Fn(u64) -> Option<u64>) -> (Next, usize) {
        let mut search = LargestSearch::new(budget, first);
        loop {
            match search.next() {
                Next::Try(value) => {
                    assert!(!search.trials.contains_key(&value), "{value} was tried");
                    let bytes = peak(value);
                    let fits = bytes.is_some_and(|bytes| bytes <= budget);
                    search.tried(value, Trial { fits, bytes });
                }
                found => return (found, search.trials.len()),
            }
        }
    }

    #[test]
    fn the_largest_under_every_law_is_that_of_trying_all() {
        let laws: [&dyn Fn(u64) -> u64; 4] = [
            &|n| 1000 + 37 * n,
            &|n| 500 + 11 * n + 3 * n * n,
            &|n| 900 + 64 * n.div_ceil(16) * 16,
            &|n| (100 + 90 * n).max(20 * n * n),
        ];
        for (index, law) in laws.iter().enumerate() {
            for budget in [999, 1_000, 1_037, 5_000, 77_777, 1_000_000] {
                let largest = (1..100_000)
                    .take_while(|&n| law(n) <= budget)
                    .last()
                    .unwrap_or(0);
                for first in [1, 16, 500] {
                    let (found, trials) = search(budget, first, |n| Some(law(n)));
                    assert_eq!(found, Next::Found(largest), "{index} {budget} {first}");
                    assert!(trials <= 18, "{index} {budget} {first}: {trials}");
                }
            }
        }
    }

    #[test]
    fn a_value_that_the_step_fails_with_is_an_end() {
        let (found, trials) = search(1 << 30, 16, |n| (n <= 1024).then_some(1000 * n));
        assert_eq!(found, Next::Found(1024));
        assert!(trials <= 20, "{trials}");
        assert_eq!(search(1 << 30, 16, |_| None).0, Next::Found(0));
    }

    #[test]
    fn a_number_that_takes_nothing_is_given_up() {
        let (found, _) = search(1000, 1, |_| Some(10));
        assert!(matches!(found, Next::GivenUp(_)));
    }
}
