//! The command line as meant.
//!
//! Responsible for turning words into targets, settings and requests, and for refusing what cannot
//! mean anything before any model is built. Not responsible for whether a target exists: only the
//! Python side can know.

use std::path::PathBuf;

use memfit_engine::bytes::Budget;
use memfit_engine::cost::devices::{self, Device};
use memfit_engine::plan::PlanRequest;

use crate::args::{
    DeviceChoice, PlanChoiceArguments, PredictArguments, TargetArguments, kinds_of, loosest,
};
use crate::error::Failure;

/// What a command works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// A function that builds a workload.
    Live(LiveTarget),
    /// A saved trace.
    Saved(PathBuf),
}

/// A function that builds a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LiveTarget {
    /// `FILE.py:FUNCTION` or `package.module:FUNCTION`.
    pub(crate) name: String,
    /// Arguments for the function, in the order given.
    pub(crate) settings: Vec<(String, String)>,
}

impl Target {
    pub(crate) fn parse(arguments: &TargetArguments) -> Result<Self, Failure> {
        let text = arguments.target.as_str();
        if PathBuf::from(text)
            .extension()
            .is_some_and(|extension| extension == "memfit")
        {
            if let Some(setting) = arguments.settings.first() {
                return Err(Failure::usage(format!(
                    "`--set {setting}` has no meaning for a saved trace: `{text}` builds no model"
                )));
            }
            return Ok(Self::Saved(PathBuf::from(text)));
        }
        let forms = "write FILE.py:FUNCTION, package.module:FUNCTION or FILE.memfit";
        match text.rsplit_once(':') {
            Some((place, function)) if !place.is_empty() && !function.is_empty() => {
                let settings = parse_settings(&arguments.settings)?;
                Ok(Self::Live(LiveTarget {
                    name: text.to_owned(),
                    settings,
                }))
            }
            Some(_) => Err(Failure::usage(format!("cannot read `{text}` as a target")).hint(forms)),
            None => Err(Failure::usage(format!("`{text}` names no function")).hint(forms)),
        }
    }

    /// The live target; `command` needs one.
    pub(crate) fn live(self, command: &str) -> Result<LiveTarget, Failure> {
        match self {
            Self::Live(live) => Ok(live),
            Self::Saved(path) => Err(Failure::usage(format!(
                "`{command}` needs a live model, and `{}` is a saved trace",
                path.display()
            ))
            .hint("give the function that builds the workload: FILE.py:FUNCTION")),
        }
    }
}

fn parse_settings(texts: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let mut settings: Vec<(String, String)> = Vec::with_capacity(texts.len());
    for text in texts {
        let Some((name, value)) = text.split_once('=') else {
            return Err(Failure::usage(format!(
                "cannot read `--set {text}`: write NAME=VALUE"
            )));
        };
        let name = name.trim();
        if name.is_empty() {
            return Err(Failure::usage(format!(
                "cannot read `--set {text}`: the name is empty"
            )));
        }
        if settings.iter().any(|(known, _)| known == name) {
            return Err(Failure::usage(format!("`--set {name}` is given twice")));
        }
        settings.push((name.to_owned(), value.to_owned()));
    }
    Ok(settings)
}

/// Which plans are asked for, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlanChoice {
    pub(crate) request: PlanRequest,
    pub(crate) profile: bool,
    /// A profile that `memfit calibrate` wrote.
    pub(crate) costs: Option<PathBuf>,
    /// Seconds to plan for.
    pub(crate) time_limit: Option<f64>,
    /// Where to offload to: a folder, or `host`.
    pub(crate) offload: Option<String>,
    /// A GPU whose datasheet gives the costs.
    pub(crate) gpu: Option<&'static Device>,
}

impl PlanChoice {
    pub(crate) fn parse(arguments: &PlanChoiceArguments, budget: Budget) -> Result<Self, Failure> {
        let request = PlanRequest {
            budget,
            allow: loosest(&arguments.allow),
            allow_kinds: kinds_of(&arguments.allow),
            own_loop: arguments.own_loop,
            own_backward: false,
            forbid: arguments.forbid.clone(),
            keep: arguments.keep.clone(),
            offload: None,
        };
        let gpu = arguments.gpu.as_deref().map(devices::find).transpose();
        let gpu = gpu.map_err(|error| {
            Failure::usage(error.to_string())
                .hint("measure another one where it is: `memfit calibrate --device cuda`")
        })?;
        Ok(Self {
            request,
            profile: arguments.profile,
            costs: arguments.costs.clone(),
            time_limit: time_limit(arguments.time_limit)?,
            offload: arguments.offload.clone(),
            gpu,
        })
    }
}

/// What a prediction is held against, read before any model is built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// No more than this.
    Budget(Budget),
    /// What a process finds on a GPU.
    Gpu(&'static Device),
}

impl Limit {
    /// The limit of the command line, where it has one.
    pub(crate) fn parse(arguments: &PredictArguments) -> Result<Option<Self>, Failure> {
        if let Some(name) = &arguments.gpu {
            if arguments.device == Some(DeviceChoice::Cpu) {
                let message = format!("`--gpu {name}` names a GPU, and `--device cpu` is none");
                return Err(Failure::usage(message).hint("`--gpu` alone implies `--device cuda`"));
            }
            let device = devices::find(name).map_err(|error| {
                Failure::usage(error.to_string())
                    .hint("of any other, say what it has: `--device cuda --budget 22GiB`")
            })?;
            return Ok(Some(Self::Gpu(device)));
        }
        let budget = arguments.budget.as_deref().map(Budget::of_step);
        Ok(budget.transpose()?.map(Self::Budget))
    }

    /// The same in bytes, or in a part of the peak.
    pub(crate) fn budget(self) -> Budget {
        match self {
            Self::Budget(budget) => budget,
            Self::Gpu(device) => Budget::Absolute(device.room_bytes()),
        }
    }
}

fn time_limit(seconds: Option<f64>) -> Result<Option<f64>, Failure> {
    match seconds {
        Some(seconds) if !(seconds.is_finite() && seconds > 0.0) => Err(Failure::usage(format!(
            "`--time-limit {seconds}` is no number of seconds"
        ))),
        seconds => Ok(seconds),
    }
}

impl DeviceChoice {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(target: &str, settings: &[&str]) -> Result<Target, String> {
        let settings = settings.iter().map(|&text| text.to_owned()).collect();
        Target::parse(&TargetArguments {
            target: target.to_owned(),
            settings,
        })
        .map_err(|failure| failure.message().unwrap())
    }

    #[test]
    fn targets_as_people_write_them() {
        let live = |name: &str| {
            Target::Live(LiveTarget {
                name: name.to_owned(),
                settings: vec![],
            })
        };
        assert_eq!(parse("a/b.py:build", &[]), Ok(live("a/b.py:build")));
        assert_eq!(
            parse("package.module:build", &[]),
            Ok(live("package.module:build"))
        );
        assert_eq!(parse("C:\\x.py:build", &[]), Ok(live("C:\\x.py:build")));
        assert_eq!(
            parse("step.memfit", &[]),
            Ok(Target::Saved("step.memfit".into()))
        );
        for bad in ["", "build", "a.py", "a.py:", ":build", "step.trace"] {
            assert!(parse(bad, &[]).is_err(), "{bad}");
        }
    }

    #[test]
    fn settings_keep_their_order_and_everything_after_the_first_equals_sign() {
        let Ok(Target::Live(live)) = parse("a.py:b", &["n=1", "text=a=b", "empty="]) else {
            panic!()
        };
        let expected = [("n", "1"), ("text", "a=b"), ("empty", "")];
        let expected: Vec<_> = expected.map(|(n, v)| (n.to_owned(), v.to_owned())).into();
        assert_eq!(live.settings, expected);
        for bad in [&["n"][..], &["=1"], &["n=1", "n=2"]] {
            assert!(parse("a.py:b", bad).is_err(), "{bad:?}");
        }
        assert!(
            parse("step.memfit", &["n=1"])
                .unwrap_err()
                .contains("builds no model")
        );
    }
}
