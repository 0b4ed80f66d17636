//! A safetensors file that a model was loaded from, as a copy that is already there.
//!
//! Responsible for opening it and for knowing where each of its tensors lies. Not responsible for whether
//! a model's bytes are still those: that is found out byte by byte (`copy.rs`).
//!
//! The file stays open, so one that is deleted or replaced under its name is read as it was. Only what
//! is written into the same file can change it, and that is noticed when the bytes are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::ParkError;

/// Longest header that the format allows.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// An open safetensors file.
#[derive(Debug)]
pub(super) struct Weights {
    file: File,
    pub(super) path: PathBuf,
    /// Offset and length of each tensor's bytes.
    ranges: BTreeMap<String, (u64, u64)>,
}

/// What the header says of a tensor; its type and shape do not matter where its bytes are compared.
#[derive(Deserialize)]
struct Entry {
    data_offsets: (u64, u64),
}

impl Weights {
    pub(super) fn open(path: &Path) -> Result<Self, ParkError> {
        let refuse = |reason: String| ParkError::Source {
            path: path.to_owned(),
            reason,
        };
        let file = File::open(path).map_err(|error| refuse(error.to_string()))?;
        let metadata = file.metadata().map_err(|error| refuse(error.to_string()))?;
        if !metadata.is_file() {
            return Err(refuse("it is no file".to_owned()));
        }
        let ranges = ranges(&file, metadata.len()).map_err(refuse)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            ranges,
        })
    }

    /// Where a tensor of so many bytes lies.
    pub(super) fn offset(&self, name: &str, length: u64) -> Option<u64> {
        let &(offset, there) = self.ranges.get(name)?;
        (there == length).then_some(offset)
    }

    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

/// The header: its length in eight bytes, then JSON, then the tensors' bytes.
fn ranges(file: &File, length: u64) -> Result<BTreeMap<String, (u64, u64)>, String> {
    const NO_HEADER: &str = "it is no safetensors file";
    let mut prefix = [0; 8];
    let read = file.read_exact_at(&mut prefix, 0);
    read.map_err(|_| NO_HEADER.to_owned())?;
    let header_bytes = u64::from_le_bytes(prefix);
    let start = 8_u64.saturating_add(header_bytes);
    if header_bytes > MOST_HEADER_BYTES || start > length {
        return Err(NO_HEADER.to_owned());
    }
    let header_length = usize::try_from(header_bytes).map_err(|error| error.to_string())?;
    let mut header = vec![0; header_length];
    let read = file.read_exact_at(&mut header, 8);
    read.map_err(|error| error.to_string())?;
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|_| NO_HEADER.to_owned())?;
    let mut ranges = BTreeMap::new();
    for (name, value) in entries {
        if name == "__metadata__" {
            continue;
        }
        let entry = Entry::deserialize(value)
            .map_err(|_| format!("its header has no place for `{name}`"))?;
        let (from, to) = entry.data_offsets;
        let end = start.checked_add(to).filter(|&end| end <= length);
        if from > to || end.is_none() {
            return Err(format!("`{name}` ends behind its end"));
        }
        ranges.insert(name, (start + from, to - from));
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    #[test]
    fn tensors_are_found_by_name_and_length() {
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        let (_folder, path) = written(&with_header(header, b"xyz"));
        let weights = Weights::open(&path).unwrap();
        let offset = weights.offset("a", 3).unwrap();
        let mut bytes = [0; 3];
        weights.read(offset, &mut bytes).unwrap();
        assert_eq!(&bytes, b"xyz");
        assert_eq!(weights.offset("a", 4), None);
        assert_eq!(weights.offset("b", 3), None);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let far = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}}"#;
        let reversed = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[3,0]}}"#;
        let huge = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,18446744073709551615]}}"#;
        let negative = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[-1,3]}}"#;
        let cases: [Vec<u8>; 8] = [
            Vec::new(),
            vec![0xff; 100],
            1_000_u64.to_le_bytes().to_vec(),
            with_header("[1, 2]", b"xyz"),
            with_header(far, b"xyz"),
            with_header(reversed, b"xyz"),
            with_header(huge, b"xyz"),
            with_header(negative, b"xyz"),
        ];
        for bytes in cases {
            let (_folder, path) = written(&bytes);
            let error = Weights::open(&path).unwrap_err();
            assert!(matches!(error, ParkError::Source { .. }), "{error}");
        }
        assert!(Weights::open(Path::new("/")).is_err());
    }
}
