//! Kinds of action on the command line, and what is allowed: names and help are the engine's table of techniques.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use memfit_engine::plan::{ActionKind, Class, TECHNIQUES, Technique};

/// Reads the name of a technique, written with underscores or with dashes.
#[derive(Debug, Clone, Copy)]
pub(super) struct KindParser;

impl TypedValueParser for KindParser {
    type Value = ActionKind;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<ActionKind, Error> {
        let written = value.to_string_lossy().replace('-', "_");
        if let Some(technique) = TECHNIQUES.iter().find(|it| it.name == written) {
            return Ok(technique.kind);
        }
        Err(none_of(values(), command, argument, value))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue>>> {
        Some(Box::new(values()))
    }
}

/// The error for a word that is none of those known: clap says so, with what is nearest.
fn none_of(
    known: impl Iterator<Item = PossibleValue>,
    command: &Command,
    argument: Option<&Arg>,
    value: &OsStr,
) -> Error {
    let known = PossibleValuesParser::new(known.collect::<Vec<_>>());
    let refused = known.parse_ref(command, argument, value).err();
    refused.unwrap_or_else(|| Error::new(clap::error::ErrorKind::InvalidValue).with_cmd(command))
}

/// One thing that a user allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allowance {
    /// All actions of a class, and of the stricter ones.
    Class(Class),
    /// One kind of action that changes numbers.
    Kind(ActionKind),
}

/// The loosest class among what a user allows.
pub(crate) fn loosest(allowed: &[Allowance]) -> Class {
    let classes = allowed.iter().filter_map(|it| match it {
        Allowance::Class(class) => Some(*class),
        Allowance::Kind(_) => None,
    });
    classes.max().unwrap_or_default()
}

/// The kinds among what a user allows.
pub(crate) fn kinds_of(allowed: &[Allowance]) -> Vec<ActionKind> {
    let kinds = allowed.iter().filter_map(|it| match it {
        Allowance::Class(_) => None,
        Allowance::Kind(kind) => Some(*kind),
    });
    kinds.collect()
}

/// The classes with their help.
const CLASSES: [(&str, &str, Class); 3] = [
    (
        "exact",
        "Loss and every gradient stay bitwise equal",
        Class::Exact,
    ),
    (
        "equivalent",
        "Same mathematics; rounding may differ",
        Class::Equivalent,
    ),
    ("approximate", "Numbers may change", Class::Approximate),
];

/// Reads the name of a class, or of a technique that changes numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllowanceParser;

impl TypedValueParser for AllowanceParser {
    type Value = Allowance;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Allowance, Error> {
        let written = value.to_string_lossy().replace('-', "_");
        if let Some(&(_, _, class)) = CLASSES.iter().find(|it| it.0 == written) {
            return Ok(Allowance::Class(class));
        }
        if let Some(technique) = changing().find(|it| it.name == written) {
            return Ok(Allowance::Kind(technique.kind));
        }
        Err(none_of(allowances(), command, argument, value))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue>>> {
        Some(Box::new(allowances()))
    }
}

fn allowances() -> impl Iterator<Item = PossibleValue> {
    let classes = CLASSES
        .iter()
        .map(|&(name, help, _)| PossibleValue::new(name).help(help));
    let kinds = changing().map(|it| PossibleValue::new(it.name).help(it.help));
    classes.chain(kinds)
}

/// The techniques that change numbers.
fn changing() -> impl Iterator<Item = &'static Technique> {
    let all = TECHNIQUES.iter().copied();
    all.filter(|it| it.promise == Class::Approximate)
}

fn values() -> impl Iterator<Item = PossibleValue> {
    let value = |it: &&Technique| PossibleValue::new(it.name).help(it.help);
    TECHNIQUES.iter().map(value)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command as Typed, PlanChoiceArguments};

    fn chosen(option: &str, value: &str) -> Result<PlanChoiceArguments, String> {
        let words = ["memfit", "plan", "a.py:build", "--budget", "1GiB"];
        let read = Arguments::try_parse_from(words.into_iter().chain([option, value]));
        match read.map_err(|error| error.to_string())?.command {
            Typed::Plan(arguments) => Ok(arguments.choice),
            other => Err(format!("{other:?}")),
        }
    }

    fn read(value: &str) -> Result<Vec<ActionKind>, String> {
        chosen("--forbid", value).map(|choice| choice.forbid)
    }

    fn allowed(value: &str) -> Result<Vec<Allowance>, String> {
        chosen("--allow", value).map(|choice| choice.allow)
    }

    #[test]
    fn every_technique_is_read_by_its_name_with_underscores_or_dashes() {
        for technique in TECHNIQUES {
            assert_eq!(read(technique.name), Ok(vec![technique.kind]));
            assert_eq!(
                read(&technique.name.replace('_', "-")),
                Ok(vec![technique.kind])
            );
        }
    }

    #[test]
    fn another_word_is_refused_with_those_there_are() {
        let error = read("micro-match").unwrap_err();
        insta::assert_snapshot!(error, @r"
        error: invalid value 'micro-match' for '--forbid <KIND>'
          [possible values: remat, unneeded_saves, fuse_optimizer, one_by_one, micro_batch, allocator_settings, offload, shrink, offload_optimizer, optimizer_bits, offload_parameters, autocast, autocast_fp16, half_parameters, int8_weights, int8_dynamic, chunk, no_graph, undo_checkpoints]

          tip: a similar value exists: 'micro_batch'

        For more information, try '--help'.
        ");
        assert!(read("").is_err());
    }

    #[test]
    fn classes_and_what_changes_numbers_are_allowed_by_name() {
        let both = allowed("equivalent,shrink").unwrap();
        assert_eq!(loosest(&both), Class::Equivalent);
        assert_eq!(kinds_of(&both), vec![ActionKind::Shrink]);
        assert_eq!(loosest(&allowed("shrink").unwrap()), Class::Exact);
        let bits = kinds_of(&allowed("optimizer-bits").unwrap());
        assert_eq!(bits, vec![ActionKind::OptimizerBits]);
        assert_eq!(
            loosest(&allowed("approximate").unwrap()),
            Class::Approximate
        );
        // An exact action needs no leave.
        assert!(allowed("remat").is_err());
        insta::assert_snapshot!(allowed("shrunk").unwrap_err(), @r"
        error: invalid value 'shrunk' for '--allow <CLASS|KIND>'
          [possible values: exact, equivalent, approximate, shrink, optimizer_bits, autocast, autocast_fp16, half_parameters, int8_weights, int8_dynamic]

          tip: a similar value exists: 'shrink'

        For more information, try '--help'.
        ");
    }
}
