//! What a file is when it is no pickle.
//!
//! Responsible for telling from the first bytes, so that the error names the thing. Not responsible for
//! reading any of it.

use super::error::SnapshotError;

/// So many bytes are looked at.
pub(super) const HEAD_BYTES: usize = 512;

/// Start of a zip archive's first entry.
const ZIP: &[u8] = b"PK\x03\x04";

/// Start of a gzip member (RFC 1952).
const GZIP: &[u8] = &[0x1f, 0x8b];

/// What `torch.save` wrote before its zip format: a pickle of the number `0x1950a86a20f9469cfc6c`
/// (`MAGIC_NUMBER` in `torch/serialization.py`).
const LEGACY_TORCH_SAVE: &[u8] = &[
    0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19,
];

const WRITE_ONE: &str = "`torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")` writes a snapshot";
const UNPACK: &str = "unpack it first; only gzip is unpacked while reading";

/// Starts of files, what they are and what to do.
const KNOWN: &[(&[u8], &str, &str)] = &[
    (
        &[0x28, 0xb5, 0x2f, 0xfd],
        "a file compressed by zstd",
        UNPACK,
    ),
    (
        &[0xfd, b'7', b'z', b'X', b'Z', 0],
        "a file compressed by xz",
        UNPACK,
    ),
    (ZIP, "a zip archive", UNPACK),
    (b"BZh", "a file compressed by bzip2", UNPACK),
    (b"\x93NUMPY", "a NumPy array", WRITE_ONE),
    (b"\x89HDF\r\n", "an HDF5 file", WRITE_ONE),
    (b"GGUF", "a GGUF model", WRITE_ONE),
    (b"\x7fELF", "a program", WRITE_ONE),
    (b"\x89PNG", "a picture", WRITE_ONE),
    (b"%PDF", "a PDF document", WRITE_ONE),
];

/// Whether the file is gzip'ed.
pub(super) fn is_gzip(head: &[u8]) -> bool {
    head.starts_with(GZIP)
}

/// The error for a file that cannot be a snapshot; `None` when it may be one.
pub(super) fn something_else(head: &[u8]) -> Option<SnapshotError> {
    if head.is_empty() {
        return Some(SnapshotError::Empty);
    }
    if is_gzip(head) {
        let what = "a gzip file inside a gzip file";
        return Some(SnapshotError::SomethingElse {
            what,
            advice: "unpack it once",
        });
    }
    // The first entry is `NAME/data.pkl`, in TorchScript `NAME/data/0`.
    if head.starts_with(ZIP) && contains(head, b"/data") {
        let evidence = "it is a zip archive, as `torch.save` writes it".to_owned();
        return Some(SnapshotError::Checkpoint { evidence });
    }
    if head.first() == Some(&0x80)
        && head
            .get(2..)
            .is_some_and(|h| h.starts_with(LEGACY_TORCH_SAVE))
    {
        let evidence = "it starts as `torch.save` wrote before its zip format".to_owned();
        return Some(SnapshotError::Checkpoint { evidence });
    }
    if is_safetensors(head) {
        let evidence = "it starts as a safetensors file".to_owned();
        return Some(SnapshotError::Checkpoint { evidence });
    }
    let known = KNOWN.iter().find(|(start, ..)| head.starts_with(start));
    let text = || text_kind(head).map(|what| (what, WRITE_ONE));
    known
        .map(|&(_, what, advice)| (what, advice))
        .or_else(text)
        .map(|(what, advice)| SnapshotError::SomethingElse { what, advice })
}

fn contains(head: &[u8], part: &[u8]) -> bool {
    head.windows(part.len()).any(|window| window == part)
}

/// Eight bytes of header length, then the header's JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    let Some((length, rest)) = head.split_first_chunk::<8>() else {
        return false;
    };
    // safetensors itself refuses headers above 100 MB.
    u64::from_le_bytes(*length) <= 100_000_000 && rest.starts_with(b"{\"")
}

/// What kind of text it is, if it is text. A binary pickle has its first control byte early.
fn text_kind(head: &[u8]) -> Option<&'static str> {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // A character may be cut by the end of the head.
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            std::str::from_utf8(&head[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    if text.chars().any(|c| c.is_control() && !c.is_whitespace()) {
        return None;
    }
    let start = text.trim_start_matches('\u{feff}').trim_start();
    let lower = start.get(..14).unwrap_or(start).to_ascii_lowercase();
    // Text pickles of protocol 0 start so; the reader names the opcode that it refuses.
    if ["(", "]", "}", "c__"]
        .iter()
        .any(|opening| start.starts_with(opening))
    {
        return None;
    }
    Some(match lower.as_str() {
        lower if lower.starts_with("<!doctype html") || lower.starts_with("<html") => {
            "an HTML page"
        }
        lower if lower.starts_with('<') => "XML text",
        lower if lower.starts_with("{\"schema_vers") => "a memfit file",
        lower if lower.starts_with(['{', '[']) => "JSON text",
        lower if lower.starts_with("version https") => "a Git LFS pointer",
        _ => "text",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(head: &[u8]) -> String {
        something_else(head).map_or_else(|| "a pickle".to_owned(), |error| error.to_string())
    }

    #[test]
    fn files_are_named_for_what_they_are() {
        assert!(said(b"").contains("empty"));
        assert!(said(b"PK\x03\x04..model/data.pkl").contains("model checkpoint"));
        assert!(said(b"PK\x03\x04..notes.txt").contains("zip archive"));
        assert!(said(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.").contains("model checkpoint"));
        assert!(said(b"\x40\0\0\0\0\0\0\0{\"__metadata__\"").contains("safetensors"));
        assert!(said(b"{\"segments\": []}").contains("JSON text"));
        assert!(said(b"  [1, 2]").contains("JSON text"));
        assert!(said(b"<!DOCTYPE html><html>").contains("HTML page"));
        assert!(said("caf\u{e9} au lait".as_bytes()).contains("text"));
        assert!(said(b"\x28\xb5\x2f\xfdxxxx").contains("zstd"));
        assert!(said(b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS"));
        assert!(said(b"{\"schema_version\":1,\"kind\"").contains("memfit file"));
        assert_eq!(said(b"\x80\x04\x95"), "a pickle");
        assert_eq!(said(b"}."), "a pickle");
    }
}
