//! The report as one page that opens offline.
//!
//! Responsible for putting template, style, script and packed sections into one file of at most
//! [`MAX_BYTES`]. Not responsible for what is in the sections (`memfit_engine::timeline`) nor for drawing
//! (`page/*.js`).
//!
//! Invariants: the page names no address on a network and its content policy forbids any; text from a snapshot is
//! either escaped or compressed, so that the browser never reads it as markup or script; the same report gives
//! the same bytes.

mod narrative;

use std::fmt::Write as _;

use memfit_engine::explain::Explanation;
use memfit_engine::snapshot::Snapshot;
use memfit_engine::timeline::{Packed, deflated, pack, subjects};

use super::text;
use crate::printer::Palette;

/// Size that no page exceeds, whatever the snapshot.
const MAX_BYTES: usize = 5_000_000;

/// Bytes of the text report that are written out; it is there twice.
const MAX_TEXT: usize = 200_000;
/// Bytes of one short text, such as the headline.
const MAX_LINE: usize = 4_000;

const TEMPLATE: &str = include_str!("template.html");
const STYLE: &str = include_str!("style.css");
/// In the order in which they are read; one scope, so that no name leaks.
const SCRIPTS: [&str; 10] = [
    include_str!("page/decode.js"),
    include_str!("page/words.js"),
    include_str!("page/model.js"),
    include_str!("page/ink.js"),
    include_str!("page/view.js"),
    include_str!("page/timeline.js"),
    include_str!("page/memory_map.js"),
    include_str!("page/segment_map.js"),
    include_str!("page/tables.js"),
    include_str!("page/findings.js"),
];
/// Starts the page when everything else is there.
const MAIN: &str = include_str!("page/main.js");

/// The page of an explained snapshot.
#[must_use]
pub(crate) fn explanation(snapshot: &Snapshot, explanation: &Explanation) -> String {
    let story = narrative::story(explanation);
    let told = Page {
        source: &explanation.source,
        headline: &story.headline,
        summary: &story.sentences,
        text: &text::explanation(explanation, Palette::PLAIN),
        explanation: &narrative::findings(explanation),
    };
    page(&told, |left| pack(snapshot, &subjects(snapshot), left))
}

/// What a page says.
#[derive(Debug, Clone, Copy)]
struct Page<'a> {
    /// The snapshot's name.
    source: &'a str,
    /// The whole story in one sentence.
    headline: &'a str,
    /// A few more.
    summary: &'a [String],
    /// The text report, for readers without JavaScript.
    text: &'a str,
    /// What the explanation found, as JSON.
    explanation: &'a [u8],
}

/// The page; `pack` gets the bytes that are left for the timeline.
fn page(page: &Page<'_>, pack: impl FnOnce(usize) -> Packed) -> String {
    let explanation = section("explanation", &deflated(page.explanation));
    let empty = filled(page, "", "00000000");
    // Three bytes become four characters, and each section has an element around it.
    let left = MAX_BYTES.saturating_sub(empty.len() + explanation.len() + 16_000);
    let packed = pack(left / 4 * 3);
    let mut sections = section("head", &packed.head);
    for (number, device) in packed.devices.iter().enumerate() {
        for (name, bytes) in [
            ("columns", &device.columns),
            ("lives", &device.lives),
            ("segments", &device.segments),
            ("texts", &device.texts),
        ] {
            sections.push_str(&section(&format!("{name}-{number}"), bytes));
        }
    }
    sections.push_str(&explanation);
    let nonce = checksum(sections.as_bytes());
    filled(page, &sections, &format!("{nonce:016x}"))
}

/// The template with its places filled, in one pass: what is filled in is not searched again.
fn filled(page: &Page<'_>, sections: &str, nonce: &str) -> String {
    let summary = page.summary.iter().fold(String::new(), |mut text, one| {
        // Writing into a string cannot fail.
        let _infallible = write!(text, "<p>{}</p>", escaped(one, MAX_LINE));
        text
    });
    let mut html = String::with_capacity(sections.len() + 2 * page.text.len() + 100_000);
    let mut pieces = TEMPLATE.split("{{");
    html.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or((piece, ""));
        match name {
            "nonce" => html.push_str(nonce),
            "version" => html.push_str(env!("CARGO_PKG_VERSION")),
            "title" => {
                html.push_str(&escaped(page.source, 300));
                html.push_str(" · memfit");
            }
            "source" => html.push_str(&escaped(page.source, MAX_LINE)),
            "headline" => html.push_str(&escaped(page.headline, MAX_LINE)),
            "summary" => html.push_str(&summary),
            "text" => html.push_str(&escaped(page.text, MAX_TEXT)),
            "style" => html.push_str(STYLE),
            "script" => {
                html.extend(SCRIPTS);
                html.push_str(MAIN);
            }
            _ => html.push_str(sections),
        }
        html.push_str(rest);
    }
    html
}

/// Text as it stands in HTML, at most about so many bytes of it.
pub(in crate::report) fn escaped(text: &str, most: usize) -> String {
    let mut html = String::with_capacity(text.len().min(most));
    for character in text.chars() {
        if html.len() >= most {
            html.push('…');
            break;
        }
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            // Escape sequences and the like have no place in a page; lines and tabs do.
            control if control.is_control() && control != '\n' && control != '\t' => {
                html.push('\u{fffd}');
            }
            other => html.push(other),
        }
    }
    html
}

/// A compressed section as an element that the browser does not run.
fn section(name: &str, bytes: &[u8]) -> String {
    format!(
        "<script type=\"text/plain\" id=\"{name}\">{}</script>\n",
        base64(bytes)
    )
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            if place <= group.len() {
                let digit = (bits >> (18 - 6 * place)) & 63;
                text.push(char::from(ALPHABET[digit as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

/// FNV-1a (Fowler, Noll and Vo), so that the page's own script is told from any other by a number that its content
/// gives.
pub(in crate::report) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hostile(text: &str) -> String {
        let summary = [text.to_owned()];
        let story = Page {
            source: text,
            headline: text,
            summary: &summary,
            text,
            explanation: b"{}",
        };
        let snapshot = Snapshot::default();
        page(&story, |left| pack(&snapshot, &[], left))
    }

    #[test]
    fn text_never_becomes_markup() {
        let attack = "</script><img src=x onerror=alert(1)>{{script}}\u{1b}[31m";
        let html = hostile(attack);
        assert!(!html.contains("<img"));
        assert_eq!(html.matches("</script>").count(), 3);
        assert!(
            html.contains(
                "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;{{script}}\u{fffd}[31m"
            )
        );
    }

    #[test]
    fn no_address_on_a_network_is_named() {
        let html = hostile("plain");
        for scheme in ["http:", "https:", "//cdn", "ws:", "url("] {
            assert!(!html.contains(scheme), "{scheme}");
        }
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn giant_texts_stay_within_the_limit() {
        let html = hostile(&"<\"'&".repeat(2_000_000));
        assert!(html.len() <= MAX_BYTES, "{}", html.len());
    }

    #[test]
    fn base64_as_the_standard_has_it() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
