//! A minimal PTX parser that splits one module into several: statements at module scope, with the names that they define and use.
//!
//! It does not interpret instructions, except for the names in them and the note with an entry's launch bounds.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};

/// A module of the compiler, divided into statements.
#[derive(Debug)]
pub(crate) struct Module {
    /// `.version`, `.target` and `.address_size`.
    header: Vec<String>,
    /// Variables and functions that entries may need, by name.
    items: BTreeMap<String, Item>,
    pub(crate) entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Item {
    text: String,
    /// The declaration that must precede any body that calls it; only functions have one.
    prototype: Option<String>,
    uses: BTreeSet<String>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    text: String,
    /// Type and, for arrays, length of each parameter: `.u64`, `.b8[24]`.
    pub(crate) params: Vec<String>,
    uses: BTreeSet<String>,
}

impl Module {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut module = Self { header: Vec::new(), items: BTreeMap::new(), entries: BTreeMap::new() };
        let mut prototypes = BTreeSet::new();
        for statement in statements(&tidy_text(text)) {
            let head = statement.split(['{', '=']).next().unwrap_or_default();
            let has = |word: &str| head.split_whitespace().any(|token| token == word);
            if [".version", ".target", ".address_size"].iter().any(|word| statement.starts_with(word)) {
                module.header.push(statement);
            } else if has(".entry") {
                let name = name_after(head, ".entry")?;
                let text = with_launch_bounds(&statement).with_context(|| format!("in entry {name}"))?;
                let entry = Entry { params: params(head)?, uses: names(&text), text };
                module.entries.insert(name, entry);
            } else if has(".func") {
                let name = name_after(head, ".func")?;
                if statement.ends_with(';') {
                    prototypes.insert(name);
                    continue;
                }
                let prototype = Some(format!("{};", head.replace(".visible ", "").trim_end()));
                let text = statement.replacen(".visible .func", ".func", 1);
                module.items.insert(name, Item { uses: names(&text), text, prototype });
            } else if [".global", ".const", ".shared"].iter().any(|space| has(space)) {
                let name = variable_name(head)?;
                module.items.insert(name, Item { uses: names(&statement), text: statement, prototype: None });
            } else {
                bail!("a statement of a kind that the splitter does not know: {head:?}");
            }
        }
        if module.header.len() != 3 {
            bail!("expected .version, .target and .address_size, found {:?}", module.header);
        }
        let missing: Vec<_> = prototypes.iter().filter(|&name| !module.items.contains_key(name)).collect();
        if !missing.is_empty() {
            bail!("the PTX calls functions that it does not contain: {missing:?}; device code must not need them");
        }
        Ok(module)
    }

    /// A complete module with these entries and all items that they need, and nothing else.
    pub(crate) fn extract(&self, entries: &[&str], first_line: &str) -> Result<String> {
        let mut needed = BTreeSet::new();
        let mut ordered = Vec::new();
        for &name in entries {
            let entry = self.entries.get(name).with_context(|| format!("no entry {name}"))?;
            self.collect(&entry.uses, &mut needed, &mut ordered);
        }
        let (functions, variables): (Vec<&Item>, Vec<&Item>) =
            ordered.iter().map(|name| &self.items[name]).partition(|item| item.prototype.is_some());

        let mut text = format!("{first_line}\n{}\n", self.header.join("\n"));
        let prototypes = functions.iter().filter_map(|item| item.prototype.as_ref());
        let bodies = functions.iter().map(|item| &item.text);
        let entries = entries.iter().map(|&name| &self.entries[name].text);
        for part in variables.iter().map(|item| &item.text).chain(prototypes).chain(bodies).chain(entries) {
            text.push('\n');
            text.push_str(part);
            text.push('\n');
        }
        canonical(&text)
    }

    /// Collects depth first, so that a variable comes after the variables that its initialiser names.
    fn collect(&self, uses: &BTreeSet<String>, needed: &mut BTreeSet<String>, ordered: &mut Vec<String>) {
        for name in uses {
            if let Some(item) = self.items.get(name)
                && needed.insert(name.clone())
            {
                self.collect(&item.uses, needed, ordered);
                ordered.push(name.clone());
            }
        }
    }
}

/// The entry with directives for its launch bounds, and against the unrolling of its loops, before its body. The compiler cannot emit these
/// directives, and inline assembly cannot appear there, so device code contains a note: `.pragma "gradsync.launch_bounds THREADS BLOCKS
/// UNROLL";`.
fn with_launch_bounds(entry: &str) -> Result<String> {
    const NOTE: &str = ".pragma \"gradsync.launch_bounds ";
    let mut notes = entry.lines().filter_map(|line| line.trim().strip_prefix(NOTE)?.strip_suffix("\";"));
    let (Some(note), None) = (notes.next(), notes.next()) else {
        bail!("expected one note of launch bounds");
    };
    let numbers: Vec<u32> =
        note.split_whitespace().map(str::parse).collect::<Result<_, _>>().with_context(|| format!("in {note:?}"))?;
    let [threads, blocks, unroll @ (0 | 1)] = numbers[..] else {
        bail!("expected threads, blocks and 0 or 1, found {note:?}")
    };
    let pragma = if unroll == 1 { "" } else { ".pragma \"nounroll\";\n" };
    let body = entry.find('{').context("no body")?;
    let (head, body) = entry.split_at(body);
    let body: Vec<&str> = body.lines().filter(|line| !line.trim().starts_with(NOTE)).collect();
    Ok(format!("{}\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n{pragma}{}", head.trim_end(), body.join("\n")))
}

/// Removes comments, trailing space and empty lines.
fn tidy_text(text: &str) -> String {
    let mut tidy = String::with_capacity(text.len());
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default().trim_end();
        if !line.trim_start().is_empty() {
            tidy.push_str(line);
            tidy.push('\n');
        }
    }
    tidy
}

/// Splits at module scope: directives end with their line, bodies with their brace, everything else with a semicolon.
fn statements(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut start, mut depth) = (0, 0_usize);
    for (at, c) in text.char_indices() {
        let so_far = text[start..at].trim_start();
        let is_directive =
            so_far.starts_with(".version") || so_far.starts_with(".target") || so_far.starts_with(".address_size");
        let ends = match c {
            '{' => {
                depth += 1;
                false
            }
            '}' => {
                depth = depth.saturating_sub(1);
                // The braces of an initialiser are followed by a semicolon, which ends the statement.
                depth == 0 && !so_far.split('{').next().unwrap_or_default().contains('=')
            }
            ';' => depth == 0,
            '\n' => depth == 0 && is_directive,
            _ => false,
        };
        if ends {
            found.push(text[start..=at].trim().to_owned());
            start = at + c.len_utf8();
        }
    }
    let rest = text[start..].trim();
    if !rest.is_empty() {
        found.push(rest.to_owned());
    }
    found
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$' || c == '%'
}

/// Every word that could be the name of a variable or function.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !is_name_char(c));
    words.filter(|word| word.starts_with(|c: char| !c.is_ascii_digit() && c != '%')).map(str::to_owned).collect()
}

/// The name of a function or entry: after the keyword and, for functions that return something, a parenthesis.
fn name_after(head: &str, keyword: &str) -> Result<String> {
    let mut rest = head.split_once(keyword).map_or("", |(_, rest)| rest).trim_start();
    if rest.starts_with('(') {
        rest = rest.split_once(')').map_or("", |(_, rest)| rest).trim_start();
    }
    let name: String = rest.chars().take_while(|&c| is_name_char(c)).collect();
    if name.is_empty() { bail!("no name after {keyword} in {head:?}") } else { Ok(name) }
}

/// `.global .align 4 .b8 NAME[16]`: the first word that is neither a directive nor a number.
fn variable_name(head: &str) -> Result<String> {
    let word = head
        .split_whitespace()
        .find(|word| !word.starts_with('.') && !word.starts_with(|c: char| c.is_ascii_digit()))
        .with_context(|| format!("no name in {head:?}"))?;
    Ok(word.chars().take_while(|&c| is_name_char(c)).collect())
}

fn params(head: &str) -> Result<Vec<String>> {
    let list = head.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map_or("", |(list, _)| list);
    let mut params = Vec::new();
    for param in list.split(',').map(str::trim).filter(|param| !param.is_empty()) {
        let ty = param
            .split_whitespace()
            .find(|word| word.starts_with(['.']) && word[1..].starts_with(['u', 's', 'b', 'f']))
            .with_context(|| format!("a parameter without a type: {param:?}"))?;
        let length = param.find('[').map_or("", |at| &param[at..]);
        params.push(format!("{ty}{length}"));
    }
    Ok(params)
}

/// Replaces the parts of names that depend on the place and order of compilation: crate disambiguators and hashes in mangled names, the
/// numbers of anonymous constants, and the function's number in labels.
fn canonical(text: &str) -> Result<String> {
    let mut renamed: BTreeMap<String, String> = BTreeMap::new();
    let mut anonymous = 0_usize;
    for word in text.split(|c: char| !is_name_char(c)).filter(|word| word.starts_with(['_', 'a', '$'])) {
        if renamed.contains_key(word) {
            continue;
        }
        let new = if word.starts_with("anon_$_") {
            anonymous += 1;
            format!("anon_{}", anonymous - 1)
        } else if let Some(label) = word.strip_prefix("$L__BB") {
            format!("$L_{}", label.split_once('_').map_or(label, |(_, number)| number))
        } else if word.starts_with("__local_depot") {
            "__local_depot".to_owned()
        } else if word.starts_with("_R") || word.starts_with("_ZN") {
            let new = without_hashes(word);
            // Labels and depots are local to a body, but giving two functions one name would be a miscompilation.
            if let Some((other, _)) = renamed.iter().find(|(_, taken)| **taken == new) {
                bail!("{word} and {other} would both be called {new}");
            }
            new
        } else {
            continue;
        };
        renamed.insert(word.to_owned(), new);
    }

    let mut output = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(is_name_char) {
        let end = rest[at..].find(|c: char| !is_name_char(c)).map_or(rest.len(), |length| at + length);
        let word = &rest[at..end];
        output.push_str(&rest[..at]);
        output.push_str(renamed.get(word).map_or(word, String::as_str));
        rest = &rest[end..];
    }
    output.push_str(rest);
    Ok(output)
}

/// `_RNvNtCsanIojcP8aaR_4core9panicking` without `sanIojcP8aaR_`, `_ZN4core..17h0123456789abcdefE` without its hash, and both without the
/// `llvm` suffix of a symbol that LTO made private. A parameter's `_param_0` stays.
fn without_hashes(name: &str) -> String {
    let mut name = name.to_owned();
    if let Some((stem, suffix)) = name.clone().split_once("_$_llvm_$_") {
        name = format!("{stem}{}", suffix.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    if let Some(at) = name.find("17h") {
        let hash = name.as_bytes().get(at + 3..at + 19);
        if hash.is_some_and(|hash| hash.iter().all(u8::is_ascii_hexdigit)) {
            name.replace_range(at..at + 19, "");
        }
    }
    let mut clean = String::with_capacity(name.len());
    let mut rest = name.as_str();
    while let Some(at) = rest.find("Cs") {
        let (before, after) = rest.split_at(at);
        let digits = after[2..].chars().take_while(char::is_ascii_alphanumeric).count();
        let follow = &after.as_bytes()[2 + digits..];
        let is_disambiguator = (8..=13).contains(&digits)
            && follow.first() == Some(&b'_')
            && follow.get(1).is_some_and(u8::is_ascii_digit);
        clean.push_str(before);
        clean.push('C');
        rest = if is_disambiguator { &after[3 + digits..] } else { &after[1..] };
    }
    clean.push_str(rest);
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"//
// Generated by LLVM NVPTX Back-End
//
.version 7.0
.target sm_80
.address_size 64
.shared .align 16 .b8 tile[4096];
	// .globl	zero
.func _RNvNtCsanIojcP8aaR_4core9panicking5index
(
	.param .b64 _RNvNtCsanIojcP8aaR_4core9panicking5index_param_0
)
.noreturn;
.global .align 1 .b8 anon_$_82511ac4c1b0473ffb09f2e6dea62332_$_0[3] = {1, 2, 3};
.global .align 8 .u64 anon_$_82511ac4c1b0473ffb09f2e6dea62332_$_1[1] = {generic(anon_$_82511ac4c1b0473ffb09f2e6dea62332_$_0)};

.visible .entry zero_f32(
	.param .u64 .ptr .align 1 zero_f32_param_0,
	.param .align 8 .b8 zero_f32_param_1[24]
)
{
	.reg .b64 	%rd<7>;

	// begin inline asm
	.pragma "gradsync.launch_bounds 256 4 0";
	// end inline asm
	@%p1 bra 	$L__BB2_2;
	// begin inline asm
	{ .reg .u32 t; mov.u32 t, tile; }
	// end inline asm
$L__BB2_2:
	mov.b64 	%rd5, anon_$_82511ac4c1b0473ffb09f2e6dea62332_$_1;
	call.uni _RNvNtCsanIojcP8aaR_4core9panicking5index, (param0);
	ret;

}
.visible .entry alone()
{
	.pragma "gradsync.launch_bounds 64 1 1";
	ret;
}
.func _RNvNtCsanIojcP8aaR_4core9panicking5index(
	.param .b64 _RNvNtCsanIojcP8aaR_4core9panicking5index_param_0
)
.noreturn
{
	trap; exit;
}
"#;

    #[test]
    fn extract_is_complete_and_free_of_hashes() {
        let module = Module::parse(TEXT).unwrap();
        assert_eq!(module.entries["zero_f32"].params, [".u64", ".b8[24]"]);
        let text = module.extract(&["zero_f32"], "// first").unwrap();
        let expected = r#"// first
.version 7.0
.target sm_80
.address_size 64

.global .align 1 .b8 anon_0[3] = {1, 2, 3};

.global .align 8 .u64 anon_1[1] = {generic(anon_0)};

.shared .align 16 .b8 tile[4096];

.func _RNvNtC4core9panicking5index(
	.param .b64 _RNvNtC4core9panicking5index_param_0
)
.noreturn;

.func _RNvNtC4core9panicking5index(
	.param .b64 _RNvNtC4core9panicking5index_param_0
)
.noreturn
{
	trap; exit;
}

.visible .entry zero_f32(
	.param .u64 .ptr .align 1 zero_f32_param_0,
	.param .align 8 .b8 zero_f32_param_1[24]
)
.maxntid 256, 1, 1
.minnctapersm 4
.pragma "nounroll";
{
	.reg .b64 	%rd<7>;
	@%p1 bra 	$L_2;
	{ .reg .u32 t; mov.u32 t, tile; }
$L_2:
	mov.b64 	%rd5, anon_1;
	call.uni _RNvNtC4core9panicking5index, (param0);
	ret;
}
"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn extract_takes_nothing_that_it_does_not_need() {
        let text = Module::parse(TEXT).unwrap().extract(&["alone"], "// first").unwrap();
        assert!(!text.contains("tile") && !text.contains(".func") && !text.contains("anon"), "{text}");
    }

    #[test]
    fn parse_refuses_an_entry_without_launch_bounds_by_name() {
        let note = "\t.pragma \"gradsync.launch_bounds 64 1 1\";\n";
        for (text, reason) in [
            (TEXT.replace(note, ""), "expected one note"),
            (TEXT.replace(note, &note.repeat(2)), "expected one note"),
            (TEXT.replace(note, &note.replace("64 1 1", "64 1")), "expected threads, blocks and 0 or 1"),
            (TEXT.replace(note, &note.replace("64 1 1", "64 1 2")), "expected threads, blocks and 0 or 1"),
            (TEXT.replace(note, &note.replace("64 1 1", "64 x 1")), "invalid digit"),
        ] {
            let error = format!("{:#}", Module::parse(&text).unwrap_err());
            assert!(error.contains("in entry alone") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn parse_refuses_an_unresolved_function_by_name() {
        let text = ".version 7.0\n.target sm_80\n.address_size 64\n.extern .func memcpy\n(\n.param .b64 a\n)\n;\n";
        let error = Module::parse(text).unwrap_err().to_string();
        assert!(error.contains("memcpy"), "{error}");
    }

    #[test]
    fn without_hashes_takes_every_mangling() {
        assert_eq!(without_hashes("_RNvNtCsanIojcP8aaR_4core3num_param_0"), "_RNvNtC4core3num_param_0");
        assert_eq!(without_hashes("_ZN4core3num17h0123456789abcdefE_param_1"), "_ZN4core3numE_param_1");
        assert_eq!(without_hashes("_RNvC3Css3foo_$_llvm_$_123"), "_RNvC3Css3foo");
    }
}
