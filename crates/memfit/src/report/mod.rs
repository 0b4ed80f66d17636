//! What a command says, as structs, and the two ways to print them.
//!
//! `document.rs` holds the structs; they are the JSON contract, and the text is printed from them and
//! from the engine's own types, never the other way round. `measured.rs` holds what the host measured, `tracked.rs` those of counted code, `compiled.rs` those of
//! compiled steps, `doctor.rs` those of `memfit doctor`.

pub(crate) mod approximation;
pub(crate) mod calibration;
pub(crate) mod comparison;
pub(crate) mod compiled;
pub(crate) mod doctor;
pub(crate) mod document;
pub(crate) mod front;
pub(crate) mod html;
pub(crate) mod measured;
pub(crate) mod output_error;
pub(crate) mod pruning;
pub(crate) mod schema;
pub(crate) mod sharing;
pub(crate) mod table;
pub(crate) mod text;
pub(crate) mod tracked;
pub(crate) mod words;

use serde::Serialize;

use crate::error::Failure;

/// The JSON form: pretty, one trailing newline.
pub(crate) fn json<T: Serialize>(document: &T) -> Result<String, Failure> {
    let mut text = serde_json::to_string_pretty(document)
        .map_err(|error| Failure::Internal(format!("cannot write the report as JSON: {error}")))?;
    text.push('\n');
    Ok(text)
}
