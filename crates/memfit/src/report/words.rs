//! The engine's enums in people's words, and numbers as people read them.
//!
//! Responsible for wording shared by the text reports. Not responsible for the words about techniques, which each has
//! in its room of the engine, nor for JSON, which uses serde's names.

use memfit_engine::bytes::Bytes;
pub(crate) use memfit_engine::plan::counted;
use memfit_engine::plan::{Class, Refusal, StopReason};
use memfit_engine::predict::reserved::Reserved;
use memfit_engine::trace::{Category, Phase};

/// Said in place of whatever only a history can tell.
pub(crate) const NO_HISTORY: &str =
    "no history was recorded: call `torch.cuda.memory._record_memory_history()` before";

pub(crate) const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
    }
}

/// The engine's word for a category, with spaces.
pub(crate) fn category(category: Category) -> String {
    spaced(category.name())
}

/// A name with spaces.
pub(crate) fn spaced(name: &str) -> String {
    name.replace('_', " ")
}

pub(crate) const fn class(class: Class) -> &'static str {
    match class {
        Class::Exact => "exact",
        Class::Equivalent => "equivalent",
        Class::Approximate => "approximate",
    }
}

/// What a class promises.
pub(crate) const fn promise(class: Class) -> &'static str {
    match class {
        Class::Exact => "loss and gradients stay bitwise equal",
        Class::Equivalent => "same mathematics, rounding may differ",
        Class::Approximate => "numerics change",
    }
}

/// What is behind a peak of reserved bytes: pieces that lie free, and settings if there are any.
pub(crate) fn reserved(reserved: &Reserved) -> String {
    let settings = match reserved.settings.as_str() {
        "" => String::new(),
        settings => format!(", with {settings}"),
    };
    format!(
        "held by the caching allocator, {} of it in pieces{settings}",
        reserved.fragmentation_bytes
    )
}

pub(crate) const fn stop_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::NothingToDo => "the unplanned step fits",
        StopReason::ProvedOptimal => "proved optimal under its costs",
        StopReason::NearBound => "as near to the lower bound as makes no difference",
        StopReason::LocalOptimum => "no single change improves it",
        StopReason::MoveLimit => "the limit on candidates was reached",
        StopReason::TimeLimit => "the time limit was reached",
        StopReason::ProvedInfeasible => "proved: no allowed plan can fit",
        StopReason::NotFound => "no allowed plan that fits was found",
    }
}

/// A part of a whole as `54.3 %`.
pub(crate) fn share(part: Bytes, whole: Bytes) -> String {
    if whole == Bytes::ZERO {
        return "-".to_owned();
    }
    format!("{:.1} %", 100.0 * part.as_f64() / whole.as_f64())
}

/// How far a measurement is from a prediction: `+0.02 %`.
pub(crate) fn deviation(predicted: Bytes, measured: Bytes) -> String {
    if measured == Bytes::ZERO {
        return "-".to_owned();
    }
    let percent = 100.0 * (predicted.as_f64() - measured.as_f64()) / measured.as_f64();
    if percent.abs() < 0.005 {
        // No sign where nothing is left to show it for.
        return "0.00 %".to_owned();
    }
    format!("{percent:+.2} %")
}

/// `0.94 %`, with two digits that say something.
pub(crate) fn percent(part: f64) -> String {
    let percent = 100.0 * part;
    if percent > 0.0 && percent < 0.01 {
        return "less than 0.01 %".to_owned();
    }
    let digits = if percent >= 10.0 {
        0
    } else if percent >= 1.0 {
        1
    } else {
        2
    };
    if percent > 0.0 && percent < 0.005 {
        return format!("{percent:.1e} %");
    }
    format!("{percent:.digits$} %")
}

/// A factor of time: `1.17 x`.
pub(crate) fn ratio(ratio: f64) -> String {
    format!("{ratio:.2} x")
}

/// A duration: `3.2 s`, `48 ms`.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{:.0} ms", seconds * 1000.0)
    }
}

/// Why techniques are not used: the first one's name, and the reason. What has the same reason is named in its row.
pub(crate) fn refusals(refusals: &[Refusal]) -> Vec<(&'static str, String)> {
    let mut causes: Vec<(&str, &'static str, Vec<&'static str>)> = Vec::new();
    for refusal in refusals {
        let title = refusal.kind.technique().title;
        let mut known = causes.iter_mut();
        match known.find(|(reason, _, _)| *reason == refusal.reason) {
            Some((_, _, others)) => others.push(title),
            None => causes.push((&refusal.reason, title, Vec::new())),
        }
    }
    let rows = causes.into_iter().map(|(reason, first, others)| {
        let same = if others.is_empty() {
            String::new()
        } else {
            format!("; the same for {}", others.join(", "))
        };
        (first, format!("{reason}{same}"))
    });
    rows.collect()
}

/// At most `width` characters, cut at the front: the end of a path says more.
pub(crate) fn tail(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept: String = text
        .chars()
        .skip(length - width.saturating_sub(1))
        .collect();
    format!("…{kept}")
}

/// What the engine calls an owner without a name.
const UNNAMED: &str = "(none)";

/// A source line with its file's last two folders: enough to find it, short enough to read.
pub(crate) fn source(line: &str) -> String {
    if line == UNNAMED {
        return "(no source line)".to_owned();
    }
    let parts: Vec<&str> = line.rsplitn(4, '/').take(3).collect();
    let short: Vec<&str> = parts.into_iter().rev().collect();
    short.join("/")
}

/// A module path with its layer numbers taken out: `transformer.h.11.mlp` is one of `transformer.h.*.mlp`.
pub(crate) fn fold_module(path: &str) -> String {
    if path == UNNAMED {
        return "(outside any module)".to_owned();
    }
    let parts = path.split('.').map(|part| {
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            "*"
        } else {
            part
        }
    });
    parts.collect::<Vec<_>>().join(".")
}

/// Text of somebody else's, at most so many characters, without any that a terminal obeys or that turn what
/// follows around.
pub(crate) fn inert(text: &str, width: usize) -> String {
    let turns = |c| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let harmless = |c: char| if c.is_control() || turns(c) { '?' } else { c };
    text.chars().map(harmless).take(width).collect()
}

#[cfg(test)]
mod tests {
    use memfit_engine::plan::ActionKind;

    use super::*;

    #[test]
    fn long_paths_keep_their_ends() {
        assert_eq!(
            tail("transformer.h.0.mlp", 9),
            "…h.0.mlp".replace('h', ".h")
        );
        assert_eq!(tail("short", 9), "short");
        assert_eq!(
            source("/a/site-packages/torch/nn/linear.py:12"),
            "torch/nn/linear.py:12"
        );
        assert_eq!(source("train.py:3"), "train.py:3");
    }

    #[test]
    fn one_cause_is_told_once() {
        let refusal = |kind, reason: &str| Refusal {
            kind,
            reason: reason.to_owned(),
        };
        let told = refusals(&[
            refusal(ActionKind::MicroBatch, "the step does not train"),
            refusal(ActionKind::FuseOptimizer, "there is no optimizer"),
            refusal(ActionKind::Chunk, "the step does not train"),
        ]);
        let same = "the step does not train; the same for chunking";
        let expected = [
            ("micro-batches", same.to_owned()),
            (
                "optimizer step in backward",
                "there is no optimizer".to_owned(),
            ),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn layers_of_one_kind_fold_together() {
        assert_eq!(
            fold_module("transformer.h.11.mlp.c_fc"),
            "transformer.h.*.mlp.c_fc"
        );
        assert_eq!(fold_module("layer1.0.conv2"), "layer1.*.conv2");
        assert_eq!(fold_module("(none)"), "(outside any module)");
    }

    #[test]
    fn numbers_as_people_read_them() {
        assert_eq!(share(Bytes(1), Bytes(3)), "33.3 %");
        assert_eq!(share(Bytes(0), Bytes(0)), "-");
        assert_eq!(deviation(Bytes(1001), Bytes(1000)), "+0.10 %");
        assert_eq!(seconds(0.0481), "48 ms");
        assert_eq!(seconds(3.21), "3.2 s");
        assert_eq!(counted(1, "tensor"), "1 tensor");
        assert_eq!(counted(0, "tensor"), "0 tensors");
    }
}
