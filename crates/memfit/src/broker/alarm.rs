//! When the broker's clock looks next.
//!
//! Responsible for telling when a sleeping thread has to be woken because something happens earlier. Not responsible
//! for sleeping (`mod.rs`) nor for what happens then (`server.rs`).

use memfit_engine::share::lease::Millis;

/// What the clock sleeps towards.
///
/// Invariant: it holds what the sleeper was told last, and nothing else. A deadline that was announced but not slept
/// towards yet must not be in here: were it cancelled meanwhile, a later one would wake no thread.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    set_for: Option<Millis>,
}

impl Alarm {
    /// The sleeper sleeps until the next deadline, or for ever where there is none.
    pub(super) fn set(&mut self, next: Option<Millis>) {
        self.set_for = next;
    }

    /// Whether the next deadline comes before the sleeper wakes by itself.
    pub(super) fn is_late_for(&self, next: Option<Millis>) -> bool {
        match (next, self.set_for) {
            (Some(next), Some(set_for)) => next < set_for,
            (Some(_), None) => true,
            (None, _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// The next deadline is another one, or there is none.
        Deadline(Option<u64>),
        /// The event loop comes to the sleeper.
        Poll,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let deadline = prop::option::of(0..20_u64).prop_map(Step::Deadline);
        prop::collection::vec(prop_oneof![2 => deadline, 1 => Just(Step::Poll)], 1..40)
    }

    proptest! {
        /// However deadlines come and go between two polls, no thread sleeps past one.
        #[test]
        fn nobody_sleeps_past_a_deadline(steps in steps()) {
            let (mut alarm, mut next) = (Alarm::default(), None);
            let (mut sleeps_until, mut is_woken) = (None, false);
            for step in steps {
                match step {
                    Step::Deadline(at) => {
                        next = at.map(Millis);
                        is_woken |= alarm.is_late_for(next);
                    }
                    Step::Poll if is_woken => {
                        is_woken = false;
                        sleeps_until = next;
                        alarm.set(next);
                    }
                    Step::Poll => {}
                }
                let is_in_time = next.is_none_or(|next| sleeps_until.is_some_and(|at| at <= next));
                prop_assert!(is_woken || is_in_time, "{next:?} {sleeps_until:?}");
            }
        }
    }
}
