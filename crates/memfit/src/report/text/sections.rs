//! Parts that reports have in common: a section under its heading, and indented sentences.

use crate::printer::Palette;

/// A heading and its table or text, set apart by an empty line; nothing when there is no body.
pub(super) fn section(text: &mut String, heading: &str, body: &str, palette: Palette) {
    if body.is_empty() {
        return;
    }
    text.push('\n');
    text.push_str(&palette.strong(heading));
    text.push('\n');
    text.push_str(body);
}

/// One indented line for each sentence.
pub(super) fn indented(sentences: &[String]) -> String {
    let mut text = String::new();
    for sentence in sentences {
        text.extend(["  ", sentence, "\n"]);
    }
    text
}
