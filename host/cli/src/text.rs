//! Makes foreign texts, such as names in files, paths and errors of libraries, safe for a terminal: control characters, which could move
//! its cursor or set its title, become escapes as Rust writes them. Other characters of any language stay.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::io;

use serde_json::ser::{CompactFormatter, Formatter};

/// A name as one line of text, for any contents.
pub fn shown(name: &(impl AsRef<OsStr> + ?Sized)) -> impl fmt::Display {
    let name = name.as_ref();
    match name.to_str() {
        // Combining characters and apostrophes are not escaped.
        Some(text) => text.escape_debug().to_string().replace("\\'", "'"),
        // The form of `{:?}` without the quotes, which escapes bytes that are no UTF-8 as well.
        None => {
            let quoted = format!("{name:?}");
            quoted[1..quoted.len() - 1].to_owned()
        }
    }
}

/// Several lines without control characters but tabs, which are harmless.
pub fn printable(lines: &str) -> Cow<'_, str> {
    replaced(
        lines,
        |character| is_hidden(character) && !matches!(character, '\n' | '\t'),
        |character| character.escape_default().to_string(),
    )
}

/// One line of text as it was written, but without control characters other than tabs.
pub fn one_line(text: &str) -> Cow<'_, str> {
    replaced(
        text,
        |character| is_hidden(character) && character != '\t',
        |character| character.escape_default().to_string(),
    )
}

/// A line of text as lines of at most `width` characters, broken at spaces; all but the first are indented. Longer words stay whole.
pub fn wrapped(line: &str, width: usize) -> String {
    let (mut lines, mut room) = (String::new(), width);
    for word in line.split(' ') {
        let len = word.chars().count();
        if lines.is_empty() {
            room = room.saturating_sub(len);
        } else if len < room {
            lines.push(' ');
            room -= len + 1;
        } else {
            lines.push_str("\n  ");
            room = width.saturating_sub(len + 2);
        }
        lines.push_str(word);
    }
    lines
}

/// A JSON document without control characters. Control characters that JSON permits can only be in strings, where they become JSON escapes.
pub fn printable_json(json: &str) -> Cow<'_, str> {
    replaced(
        json,
        |character| is_hidden(character) && !character.is_ascii_whitespace(),
        |character| character.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    )
}

/// Whether a character is a control character, or changes the direction of text.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn replaced(text: &str, is_wanted: impl Fn(char) -> bool, by: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&is_wanted) {
        return text.into();
    }
    let one = |character: char| if is_wanted(character) { by(character) } else { character.to_string() };
    text.chars().map(one).collect()
}

/// JSON on one line without control characters.
pub struct PrintableJson;

impl Formatter for PrintableJson {
    fn write_string_fragment<W: io::Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        CompactFormatter.write_string_fragment(writer, &printable_json(fragment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapped_keeps_the_width_but_for_long_words() {
        assert_eq!(wrapped("one two", 7), "one two");
        assert_eq!(wrapped("one two", 6), "one\n  two");
        assert_eq!(wrapped("läuft: 勾配 a-long-word of the text", 10), "läuft: 勾配\n  a-long-word\n  of the\n  text");
        assert_eq!(wrapped("", 5), "");
    }

    #[test]
    fn shown_escapes_control_characters_alone() {
        assert_eq!(shown("it's läuft ∂ 勾配 e\u{301}").to_string(), "it's läuft ∂ 勾配 e\u{301}");
        assert_eq!(shown("\x1b]0;title\x07\n\u{9b}").to_string(), "\\u{1b}]0;title\\u{7}\\n\\u{9b}");
        assert_eq!(printable("two\nlines\x1b[1m\u{202e}"), "two\nlines\\u{1b}[1m\\u{202e}");
        assert_eq!(printable("勾配\t\"1\" \\"), "勾配\t\"1\" \\");
        assert_eq!(one_line("two\r\nlines\t\"1\" \\"), "two\\r\\nlines\t\"1\" \\");
        let json = printable_json("{\n  \"a\u{9b}b\u{7f}\": 1\n}");
        assert_eq!(json, "{\n  \"a\\u009bb\\u007f\": 1\n}");
        assert!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["a\u{9b}b\u{7f}"] == 1);
    }
}
