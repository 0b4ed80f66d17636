//! `--largest NAME` of `memfit predict` and `memfit plan`: the largest value of an argument that fits.
//!
//! Responsible for the trials: a capture of the target with a value, and what fits it. Not responsible for which value
//! is tried next (the engine's [`LargestSearch`]).

use std::collections::BTreeMap;

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::largest::{LargestSearch, Next, Trial};
use memfit_engine::plan::{Class, Plan, PlanRequest, Verdict};
use memfit_engine::predict::PredictRequest;

use crate::args::Format;
use crate::error::Failure;
use crate::exit::Exit;
use crate::host::HostErrorKind;
use crate::report::document::{LargestDocument, LargestRow, SCHEMA_VERSION};
use crate::report::{json, text};
use crate::request::{LiveTarget, PlanChoice, Target};
use crate::session::Session;

/// Tried first where the command line sets no value: small steps are captured soon.
const FIRST: u64 = 8;

/// The largest value that the unplanned step fits with.
pub(crate) fn predict(
    target: &Target,
    name: &str,
    budget: Budget,
    device: Option<&str>,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let mut trials = Trials::new(target, name, budget, None, device, session)?;
    let rows = vec![trials.row(None)?];
    trials.report(rows)
}

/// The largest values that the step fits with: as it is, by exact plans, by equivalent ones too.
pub(crate) fn plan(
    target: &Target,
    name: &str,
    mut choice: PlanChoice,
    device: Option<&str>,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    if forget_leave(&mut choice.request) {
        let note =
            "note: `--largest` looks at exact and equivalent plans: `--allow` changes nothing";
        session.printer.note(note)?;
    }
    let budget = choice.request.budget;
    let mut trials = Trials::new(target, name, budget, Some(choice), device, session)?;
    let ways = [None, Some(Class::Exact), Some(Class::Equivalent)];
    let rows = ways.into_iter().map(|way| trials.row(way));
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    trials.report(rows)
}

/// Takes back leave to change numbers, and tells whether there was any: a faster plan that changes them would take the
/// place of an exact one that fits. Where no exact plan fits, an equivalent one is looked for all the same.
fn forget_leave(request: &mut PlanRequest) -> bool {
    let had_leave = request.allow == Class::Approximate || !request.allow_kinds.is_empty();
    request.allow = Class::Exact;
    request.allow_kinds.clear();
    had_leave
}

/// What came of a capture.
struct Tried {
    /// What the unplanned step needs.
    needed_bytes: Bytes,
    plan: Option<Plan>,
}

impl Tried {
    /// Whether that is enough for a way.
    fn trial(&self, way: Option<Class>, budget: Bytes) -> Trial {
        let fits_unplanned = self.needed_bytes <= budget;
        match (way, &self.plan) {
            (Some(class), Some(plan)) => Trial {
                fits: plan.verdict == Verdict::Fits && plan.promise <= class,
                bytes: Some(plan.minimum_peak_bytes.0),
            },
            _ => Trial {
                fits: fits_unplanned,
                bytes: Some(self.needed_bytes.0),
            },
        }
    }
}

/// The trials of one command; each value is captured once.
struct Trials<'s, 'h> {
    live: LiveTarget,
    name: String,
    budget: Bytes,
    first: u64,
    choice: Option<PlanChoice>,
    device: Option<&'s str>,
    session: &'s mut Session<'h>,
    /// What came of each value, or why the step fails with it.
    tried: BTreeMap<u64, Result<Tried, String>>,
}

impl<'s, 'h> Trials<'s, 'h> {
    fn new(
        target: &Target,
        name: &str,
        budget: Budget,
        choice: Option<PlanChoice>,
        device: Option<&'s str>,
        session: &'s mut Session<'h>,
    ) -> Result<Self, Failure> {
        let Target::Live(live) = target else {
            let message =
                format!("`--largest {name}` captures the step anew, and this is a saved trace");
            return Err(Failure::usage(message).hint("give the function: FILE.py:FUNCTION"));
        };
        let Budget::Absolute(budget) = budget else {
            let message = format!(
                "`--largest {name}` needs a budget in bytes: every value has a peak of its own"
            );
            return Err(Failure::usage(message).hint("write `--budget 3GiB`"));
        };
        let mut live = live.clone();
        let set = live.settings.iter().position(|(key, _)| key == name);
        let first = match set.map(|index| live.settings.remove(index).1) {
            None => FIRST,
            Some(text) => text.parse().map_err(|_| {
                Failure::usage(format!(
                    "`--set {name}={text}`: the first value to try is a whole number"
                ))
            })?,
        };
        Ok(Self {
            live,
            name: name.to_owned(),
            budget,
            first,
            choice,
            device,
            session,
            tried: BTreeMap::new(),
        })
    }

    /// The largest value of a way.
    fn row(&mut self, way: Option<Class>) -> Result<LargestRow, Failure> {
        let (mut value, mut is_largest) = self.search(way, 1)?;
        // The smallest pieces of an odd batch are larger than those of an even one.
        if way.is_some() && is_largest && value > 0 && self.fits(value + 2, way)? {
            (value, is_largest) = self.search(way, 2)?;
            value += u64::from(self.fits(value + 1, way)?);
        }
        let found = self.tried.get(&value).and_then(|tried| tried.as_ref().ok());
        let plan = found
            .and_then(|tried| tried.plan.as_ref())
            .filter(|_| way.is_some());
        let next = self.tried.get(&(value + 1));
        Ok(LargestRow {
            promise: way,
            value,
            predicted_peak_bytes: plan
                .map(|plan| plan.planned.predicted_peak_bytes)
                .or_else(|| found.map(|tried| tried.needed_bytes)),
            predicted_step_ratio: found.map(|_| plan.map_or(1.0, |plan| plan.predicted_step_ratio)),
            is_largest,
            next_fails: next.and_then(|tried| tried.as_ref().err().cloned()),
        })
    }

    /// The largest multiple of a number that fits, and whether the next one does not.
    fn search(&mut self, way: Option<Class>, unit: u64) -> Result<(u64, bool), Failure> {
        let mut search = LargestSearch::new(self.budget.0, self.first.div_ceil(unit));
        for (&value, tried) in &self.tried {
            if value.is_multiple_of(unit) {
                search.tried(value / unit, trial_of(tried, way, self.budget));
            }
        }
        loop {
            match search.next() {
                Next::Try(value) => {
                    let trial = self.trial(value * unit, way)?;
                    search.tried(value, trial);
                }
                Next::Found(value) => return Ok((value * unit, true)),
                Next::GivenUp(value) => return Ok((value * unit, false)),
            }
        }
    }

    fn fits(&mut self, value: u64, way: Option<Class>) -> Result<bool, Failure> {
        Ok(self.trial(value, way)?.fits)
    }

    fn trial(&mut self, value: u64, way: Option<Class>) -> Result<Trial, Failure> {
        if !self.tried.contains_key(&value) {
            self.capture(value)?;
        }
        Ok(trial_of(&self.tried[&value], way, self.budget))
    }

    /// Captures the step with a value, and plans it where that is asked for.
    fn capture(&mut self, value: u64) -> Result<(), Failure> {
        let mut live = self.live.clone();
        live.settings.push((self.name.clone(), value.to_string()));
        let target = Target::Live(live);
        let mut recorded = match self.session.record(&target, self.device) {
            Ok(recorded) => recorded,
            // Where smaller ones ran, this value is one that the target does not take.
            Err(Failure::Host(error))
                if error.kind == HostErrorKind::Workload
                    && self.tried.values().any(Result::is_ok) =>
            {
                self.tried.insert(value, Err(error.message));
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        let prediction = self
            .session
            .predict(&recorded.trace, PredictRequest::default())?;
        let plan = match &self.choice {
            Some(choice) => Some(self.session.plan(&target, &mut recorded, choice)?.plan),
            None => None,
        };
        let needed_bytes = prediction.needed_bytes();
        self.tried.insert(value, Ok(Tried { needed_bytes, plan }));
        Ok(())
    }

    fn report(self, rows: Vec<LargestRow>) -> Result<Exit, Failure> {
        let is_any = rows.iter().any(|row| row.value > 0);
        let document = LargestDocument {
            schema_version: SCHEMA_VERSION,
            target: self.live.name,
            argument: self.name,
            budget_bytes: self.budget,
            captures: self.tried.len() as u64,
            rows,
        };
        let report = match self.session.format {
            Format::Text => text::largest(&document, self.session.printer.report_palette()),
            Format::Json => json(&document)?,
        };
        self.session.printer.data(&report)?;
        Ok(if is_any { Exit::Done } else { Exit::No })
    }
}

fn trial_of(tried: &Result<Tried, String>, way: Option<Class>, budget: Bytes) -> Trial {
    match tried {
        Ok(tried) => tried.trial(way, budget),
        Err(_) => Trial {
            fits: false,
            bytes: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use memfit_engine::plan::ActionKind;

    use super::*;

    #[test]
    fn no_plan_that_changes_numbers_takes_the_place_of_an_exact_one() {
        let cases = [
            (Class::Exact, vec![], false),
            (Class::Equivalent, vec![], false),
            (Class::Approximate, vec![], true),
            (Class::Exact, vec![ActionKind::Shrink], true),
        ];
        for (allow, allow_kinds, had_leave) in cases {
            let mut request = PlanRequest {
                allow,
                allow_kinds,
                ..PlanRequest::default()
            };
            assert_eq!(forget_leave(&mut request), had_leave);
            assert_eq!(request, PlanRequest::default());
            assert!(!request.asks_for(ActionKind::Shrink));
        }
    }
}
