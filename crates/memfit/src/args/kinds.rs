//! Kinds of action on the command line: their names and help are the engine's table of techniques.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use memfit_engine::plan::{ActionKind, TECHNIQUES, Technique};

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
        // It is none of them: clap says so, with what is nearest.
        let refused = PossibleValuesParser::new(values()).parse_ref(command, argument, value);
        Err(refused
            .err()
            .unwrap_or_else(|| Error::new(clap::error::ErrorKind::InvalidValue).with_cmd(command)))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue>>> {
        Some(Box::new(values()))
    }
}

fn values() -> impl Iterator<Item = PossibleValue> {
    let value = |it: &&Technique| PossibleValue::new(it.name).help(it.help);
    TECHNIQUES.iter().map(value)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command as Typed};

    fn read(value: &str) -> Result<Vec<ActionKind>, String> {
        let words = [
            "memfit",
            "plan",
            "a.py:build",
            "--budget",
            "1GiB",
            "--forbid",
        ];
        let read = Arguments::try_parse_from(words.into_iter().chain([value]));
        match read.map_err(|error| error.to_string())?.command {
            Typed::Plan(arguments) => Ok(arguments.choice.forbid),
            other => Err(format!("{other:?}")),
        }
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
          [possible values: remat, unneeded_saves, fuse_optimizer, one_by_one, micro_batch, allocator_settings, offload, offload_optimizer, offload_parameters, chunk]

          tip: a similar value exists: 'micro_batch'

        For more information, try '--help'.
        ");
        assert!(read("").is_err());
    }
}
