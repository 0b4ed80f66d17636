//! The `.memfit` file: one header line, then the compressed body.
//!
//! ```text
//! {"schema_version":1,"kind":"trace","memfit":"0.1.0"}\n   plain text: `head -1` reads it
//! <zlib stream of the JSON body>
//! ```
//!
//! Responsible for encoding, decoding and refusing what is not such a file, without trusting any
//! length in it. Not responsible for reading from disk, nor for what the body means.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};

use crate::plan::{self, Plan};
use crate::trace::{self, Trace, TraceError};

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A [`Trace`].
    Trace,
    /// A [`Plan`].
    Plan,
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    schema_version: u32,
    kind: FileKind,
    memfit: String,
}

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It does not start with a header line.
    #[error("this is not a memfit file: it does not start with a memfit header line")]
    NotMemfit,
    /// It was written by a later memfit.
    #[error(
        "the file has schema version {found}, this memfit reads up to {known}: install memfit {writer} or newer"
    )]
    TooNew {
        /// The file's version.
        found: u32,
        /// The newest that is known for what it holds.
        known: u32,
        /// The memfit that wrote it.
        writer: String,
    },
    /// A trace was expected and a plan found, or the reverse.
    #[error("the file holds a {found}, a {wanted} is needed")]
    WrongKind {
        /// What it holds.
        found: &'static str,
        /// What is needed.
        wanted: &'static str,
    },
    /// The compressed body is damaged or cut off.
    #[error("the file is damaged or cut off: {0}")]
    Damaged(String),
    /// The body would grow beyond the limit.
    #[error("the file unpacks to more than {MAX_BODY_BYTES} bytes, which no trace does")]
    TooLarge,
    /// The body is not a trace or plan of this schema.
    #[error("the file's body is not valid: {0}")]
    Body(String),
    /// The trace breaks a rule.
    #[error("the trace is not valid: {0}")]
    Trace(#[from] TraceError),
}

/// A header longer than this is no header.
const MAX_HEADER_BYTES: usize = 4096;
/// A body larger than this is a decompression bomb: the largest real traces are some tens of MiB.
const MAX_BODY_BYTES: u64 = 2 << 30;

/// Encodes a trace.
#[must_use]
pub fn encode(trace: &Trace) -> Vec<u8> {
    encode_body(FileKind::Trace, trace)
}

/// Encodes a plan.
#[must_use]
pub fn encode_plan(plan: &Plan) -> Vec<u8> {
    encode_body(FileKind::Plan, plan)
}

/// Decodes and checks a trace.
///
/// # Errors
///
/// Anything but a whole, valid trace of a known schema.
pub fn decode(file: &[u8]) -> Result<Trace, FileError> {
    let trace: Trace = decode_body(file, FileKind::Trace)?;
    trace.check()?;
    Ok(trace)
}

/// Decodes a plan.
///
/// # Errors
///
/// Anything but a whole plan of a known schema.
pub fn decode_plan(file: &[u8]) -> Result<Plan, FileError> {
    decode_body(file, FileKind::Plan)
}

/// What a file holds, from its header alone.
///
/// # Errors
///
/// Not a memfit file, or one of a later schema.
pub fn peek_kind(file: &[u8]) -> Result<FileKind, FileError> {
    split_header(file).map(|(header, _)| header.kind)
}

fn encode_body<T: Serialize>(kind: FileKind, body: &T) -> Vec<u8> {
    let header = Header {
        schema_version: kind.schema_version(),
        kind,
        memfit: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut file = serde_json::to_vec(&header).expect("a header of plain fields always serialises");
    file.push(b'\n');
    let mut encoder = ZlibEncoder::new(file, Compression::fast());
    let body = serde_json::to_vec(body).expect("tables with string keys always serialise");
    encoder
        .write_all(&body)
        .expect("writing to a vector cannot fail");
    encoder.finish().expect("writing to a vector cannot fail")
}

fn split_header(file: &[u8]) -> Result<(Header, &[u8]), FileError> {
    let window = &file[..file.len().min(MAX_HEADER_BYTES)];
    let end = window
        .iter()
        .position(|&byte| byte == b'\n')
        .ok_or(FileError::NotMemfit)?;
    // Version first, leniently: a later header may have other kinds, and must still be named as later.
    let loose: serde_json::Value =
        serde_json::from_slice(&file[..end]).map_err(|_| FileError::NotMemfit)?;
    let version = loose
        .get("schema_version")
        .and_then(serde_json::Value::as_u64);
    let version = version.ok_or(FileError::NotMemfit)?;
    let kind = loose.get("kind").cloned();
    let kind = kind.and_then(|kind| serde_json::from_value::<FileKind>(kind).ok());
    let known = kind.map_or(NEWEST_VERSION, FileKind::schema_version);
    if version > u64::from(known) {
        let writer = loose
            .get("memfit")
            .and_then(|w| w.as_str())
            .unwrap_or("a later")
            .to_owned();
        return Err(FileError::TooNew {
            found: u32::try_from(version).unwrap_or(u32::MAX),
            known,
            writer,
        });
    }
    let header = serde_json::from_value(loose).map_err(|_| FileError::NotMemfit)?;
    Ok((header, &file[end + 1..]))
}

fn decode_body<T: for<'a> Deserialize<'a>>(file: &[u8], wanted: FileKind) -> Result<T, FileError> {
    let (header, body) = split_header(file)?;
    if header.kind != wanted {
        return Err(FileError::WrongKind {
            found: header.kind.name(),
            wanted: wanted.name(),
        });
    }
    let mut json = Vec::new();
    ZlibDecoder::new(body)
        .take(MAX_BODY_BYTES + 1)
        .read_to_end(&mut json)
        .map_err(|error| FileError::Damaged(error.to_string()))?;
    if json.len() as u64 > MAX_BODY_BYTES {
        return Err(FileError::TooLarge);
    }
    serde_json::from_slice(&json).map_err(|error| FileError::Body(error.to_string()))
}

/// Where a file holds something unknown, it is of a later schema if its version is above this.
const NEWEST_VERSION: u32 = if trace::SCHEMA_VERSION > plan::SCHEMA_VERSION {
    trace::SCHEMA_VERSION
} else {
    plan::SCHEMA_VERSION
};

impl FileKind {
    const fn schema_version(self) -> u32 {
        match self {
            Self::Trace => trace::SCHEMA_VERSION,
            Self::Plan => plan::SCHEMA_VERSION,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Plan => "plan",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::sample;

    #[test]
    fn a_trace_survives_the_round_trip() {
        let trace = sample::chain();
        assert_eq!(decode(&encode(&trace)).unwrap(), trace);
        assert_eq!(peek_kind(&encode(&trace)).unwrap(), FileKind::Trace);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let file = encode(&sample::chain());
        for length in 0..file.len() {
            assert!(
                decode(&file[..length]).is_err(),
                "{length} of {} bytes",
                file.len()
            );
        }
    }

    #[test]
    fn later_schemas_and_strangers_are_named() {
        let later = b"{\"schema_version\":99,\"kind\":\"poem\",\"memfit\":\"7.0.0\"}\n";
        assert!(matches!(
            decode(later),
            Err(FileError::TooNew { found: 99, .. })
        ));
        assert!(matches!(decode(b"PK\x03\x04\n"), Err(FileError::NotMemfit)));
        assert!(matches!(
            decode_plan(&encode(&sample::chain())),
            Err(FileError::WrongKind { .. })
        ));
    }

    #[test]
    fn a_plan_of_version_1_is_read() {
        let trace = sample::chain();
        let op_seconds = vec![1.0; trace.ops.len()];
        let costs = crate::cost::CostSource::profile(op_seconds);
        let request = plan::PlanRequest {
            budget: crate::bytes::Budget::Absolute(crate::bytes::Bytes(1)),
            ..plan::PlanRequest::default()
        };
        let plan = plan::plan(&trace, &costs, &request).unwrap();
        assert!(!plan.actions.is_empty());
        let json = serde_json::to_string(&plan).unwrap();
        let before = json.replace("\"promise\"", "\"class\"");
        assert_ne!(before, json);
        let mut encoder = ZlibEncoder::new(
            b"{\"schema_version\":1,\"kind\":\"plan\",\"memfit\":\"0.1.0\"}\n".to_vec(),
            Compression::fast(),
        );
        encoder.write_all(before.as_bytes()).unwrap();
        assert_eq!(decode_plan(&encoder.finish().unwrap()).unwrap(), plan);
        assert_eq!(decode_plan(&encode_plan(&plan)).unwrap(), plan);
    }

    proptest! {
        #[test]
        fn damaged_bytes_never_panic(at in 0usize..400, byte: u8) {
            let mut file = encode(&sample::chain());
            let at = at % file.len();
            file[at] = byte;
            let _ = decode(&file);
        }
    }
}
