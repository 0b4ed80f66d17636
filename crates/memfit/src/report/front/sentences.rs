//! The front in sentences, for the text report and the page alike.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{Class, Front, FrontPoint, FrontStop};

use crate::report::words;

/// A factor of time with a digit more than in other reports: neighbours on a front lie close together.
pub(crate) fn ratio(ratio: f64) -> String {
    format!("{ratio:.3} x")
}

/// The whole story in one sentence.
pub(crate) fn headline(front: &Front) -> String {
    let unplanned = front.unplanned.predicted_peak_bytes;
    match least(front, Class::Exact) {
        Some(point) if point.predicted_peak_bytes < unplanned => format!(
            "From {unplanned} down to {} with exact plans, at up to {} the step time",
            point.predicted_peak_bytes,
            ratio(point.predicted_step_ratio)
        ),
        _ => format!("No exact plan lowers the peak of {unplanned}"),
    }
}

/// What else is worth saying.
pub(crate) fn sentences(front: &Front) -> Vec<String> {
    let unplanned = front.unplanned.predicted_peak_bytes;
    let mut sentences = Vec::new();
    let exact = |point: &&FrontPoint| point.promise == Class::Exact;
    let cheap = |point: &&FrontPoint| point.predicted_step_ratio <= 1.01;
    let cheapest = front.points.iter().filter(exact).find(cheap);
    if let Some(point) = cheapest.filter(|point| point.predicted_peak_bytes < unplanned) {
        sentences.push(format!(
            "Down to {} ({} of the unplanned peak) costs at most 1 % more time.",
            point.predicted_peak_bytes,
            words::share(point.predicted_peak_bytes, unplanned)
        ));
    }
    let half = |point: &&FrontPoint| point.predicted_peak_bytes <= Bytes(unplanned.0 / 2);
    if let Some(point) = front.points.iter().filter(exact).rfind(half) {
        sentences.push(format!(
            "Half the unplanned peak: {} the step time.",
            ratio(point.predicted_step_ratio)
        ));
    }
    if let Some(point) = least(front, Class::Equivalent) {
        sentences.push(format!(
            "Where rounding may differ: down to {} at {} the step time.",
            point.predicted_peak_bytes,
            ratio(point.predicted_step_ratio)
        ));
    }
    sentences
}

/// The plan with the smallest peak of a class.
pub(crate) fn least(front: &Front, class: Class) -> Option<&FrontPoint> {
    front.points.iter().find(|point| point.promise == class)
}

/// How much was looked at, and why no more.
pub(crate) fn search(front: &Front) -> String {
    let reason = match front.stop_reason {
        FrontStop::Resolved => "no gap is worth another plan",
        FrontStop::PlanLimit => "the limit on plans was reached",
    };
    format!(
        "{} planned, {}; {reason}",
        words::counted(front.plans, "budget"),
        words::counted(front.evaluations, "candidate")
    )
}

/// Kinds of action as `--forbid` names them, with their counts where a plan chooses them.
pub(crate) fn actions(point: &FrontPoint) -> String {
    if point.actions.is_empty() {
        return "none: the unplanned step".to_owned();
    }
    let parts = point.actions.iter().map(|action| {
        let technique = action.kind.technique();
        match technique.short {
            Some(_) => format!("{} {}", technique.name, action.count),
            None => technique.name.to_owned(),
        }
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// What a plan does, in few words.
pub(crate) fn techniques(point: &FrontPoint) -> String {
    if point.actions.is_empty() {
        return "nothing".to_owned();
    }
    let parts = point.actions.iter().map(|action| {
        let technique = action.kind.technique();
        match technique.short {
            Some(short) => short(action.count),
            None => technique.title.to_owned(),
        }
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// What a plan does, in whole words.
pub(crate) fn effects(point: &FrontPoint) -> String {
    if point.actions.is_empty() {
        return "nothing: the unplanned step".to_owned();
    }
    let parts = point.actions.iter().map(|action| {
        let title = action.kind.technique().title;
        format!("{title} ({})", action.effect())
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// All about a plan in a few sentences.
pub(crate) fn told(point: &FrontPoint) -> String {
    let reserved = point
        .reserved
        .as_ref()
        .map_or_else(String::new, |reserved| {
            format!(" ({} reserved)", reserved.peak_reserved_bytes)
        });
    format!(
        "Peak {}{reserved} at {} the step time, {}: {}. Does {}. At this budget no plan is faster than {}.",
        point.predicted_peak_bytes,
        ratio(point.predicted_step_ratio),
        words::class(point.promise),
        words::promise(point.promise),
        effects(point),
        ratio(point.lower_bound_ratio),
    )
}
