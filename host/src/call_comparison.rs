//! The agreement of ranks before an operation begins: each rank publishes its call, or the reason why it has none.
//!
//! An error in one rank's call becomes an error on every rank, so that no rank waits for a rank that has refused. Therefore no step that
//! may fail on one rank alone returns before the agreement of a call: its outcome is part of the agreement.
//!
//! Ranks compare a [`ComparedCall`], which is a list of lines. Its digest and the texts of an error are computed from the same lines, so an error
//! can name every possible difference. Ranks exchange only digests as long as these are equal; otherwise they find the first different
//! line by bisection, and exchange only its text.
//!
//! Kernels and shared memory rely on layouts that were compared here, so the digest is a cryptographic one. It is computed once per call:
//! a table of tensors keeps its own, and each thread remembers the digests of its last calls.

use std::cell::RefCell;
use std::fmt::Display;
use std::hash::{Hash, Hasher};

use sha2::{Digest as _, Sha256};

use crate::buffer::TensorTable;
use crate::call::{Digest, LineBytes, Value, Visit, scope};
use crate::comm::Ranks;
use crate::error::{Disagreement, Error, Operation, Result};

/// The bytes of one word.
const WORD: usize = size_of::<u64>();
/// The longest text that ranks exchange.
const LONGEST_TEXT: usize = 2048;
/// The number of words of a digest.
const DIGEST_WORDS: usize = size_of::<Digest>() / WORD;
/// The number of calls whose digests a thread remembers.
const REMEMBERED_CALLS: usize = 32;

/// The digests of a thread's last calls, the most recently used first.
#[derive(Default)]
struct Digests {
    /// The lines of each call, in which the digest of each table stands for its lines; and their digest.
    known: Vec<(Vec<u8>, Digest)>,
    /// Room for the lines of the next call.
    room: Vec<u8>,
}

thread_local! {
    static DIGESTS: RefCell<Digests> = RefCell::default();
}

impl Digests {
    fn of(&mut self, lines: LineBytes) -> Digest {
        let index = self.known.iter().position(|(known, _)| *known == lines.0).unwrap_or_else(|| {
            self.known.truncate(REMEMBERED_CALLS - 1);
            self.known.push((lines.0.clone(), lines.digest()));
            self.known.len() - 1
        });
        self.known[..=index].rotate_right(1);
        self.room = lines.0;
        self.known[0].1
    }
}

/// The operation of a rank and all its arguments that must be equal on all ranks.
#[derive(Clone, Copy)]
pub(crate) struct ComparedCall<'a> {
    /// The operation that is called.
    pub(crate) operation: Operation,
    /// The arguments by label, without the arguments that are part of `operation`.
    pub(crate) lines: &'a [(&'a str, Value<'a>)],
    /// A label and an ordered list of names.
    pub(crate) names: (&'a str, &'a [&'a str]),
    /// The tables of tensors, each with its name in errors if there are several.
    pub(crate) tables: &'a [(&'static str, &'a TensorTable)],
}

impl<'a> ComparedCall<'a> {
    /// A call of only the operation with its arguments.
    pub(crate) fn of(operation: Operation) -> Self {
        Self { operation, lines: &[], names: ("", &[]), tables: &[] }
    }

    /// The digest of all lines, in which the stored digest of each table stands for its lines.
    pub(crate) fn digest(&self) -> Digest {
        let mut lines = LineBytes(DIGESTS.with_borrow_mut(|digests| std::mem::take(&mut digests.room)));
        lines.0.clear();
        self.visit_head(&mut |_, value| value.hash(&mut lines));
        self.tables.iter().for_each(|(_, table)| lines.write(table.digest()));
        DIGESTS.with_borrow_mut(|digests| digests.of(lines))
    }

    fn visit(&self, line: &mut Visit<'_>) {
        self.visit_head(line);
        for (name, table) in self.tables {
            table.visit(&mut |label, value| match name.is_empty() {
                true => line(label, value),
                false => line(format_args!("{label} of the {name}"), value),
            });
        }
    }

    fn visit_head(&self, line: &mut Visit<'_>) {
        let called = scope::called(self.operation);
        line(format_args!("{}", Disagreement::OPERATION), Value::Operation(called));
        line(format_args!("step"), Value::Operation(self.operation));
        self.lines.iter().for_each(|(label, value)| line(format_args!("{label}"), *value));
        let (label, names) = self.names;
        if !label.is_empty() {
            names.iter().enumerate().for_each(|(index, name)| line(format_args!("{label} {index}"), Value::Name(name)));
            line(format_args!("{label} {}", names.len()), Value::Words("none"));
        }
    }

    /// The hashes of all prefixes of the list of lines: the first word of the SHA-256 of each.
    fn beginnings(&self) -> Vec<u64> {
        let (mut hasher, mut line, mut beginnings) = (Sha256::new(), LineBytes::default(), Vec::new());
        self.visit(&mut |_, value| {
            line.0.clear();
            value.hash(&mut line);
            hasher.update(&line.0);
            beginnings.push(words_of(&hasher.clone().finalize().into())[0]);
        });
        beginnings
    }

    /// The label and the value of a line; empty past the last line.
    fn line(&self, wanted: usize) -> [String; 2] {
        let (mut index, mut found) = (0, [String::new(), String::new()]);
        self.visit(&mut |label, value| {
            if index == wanted {
                found = [label.to_string(), value.to_string()];
            }
            index += 1;
        });
        found
    }
}

/// A digest as words, which ranks exchange.
fn words_of(digest: &Digest) -> [u64; DIGEST_WORDS] {
    let mut words = [0; DIGEST_WORDS];
    for (word, bytes) in words.iter_mut().zip(digest.chunks_exact(WORD)) {
        *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    }
    words
}

/// Gathers every rank's words, in rank order, for a comparison of calls.
pub(crate) fn gather<R: Ranks + ?Sized>(ranks: &R, words: &[u64]) -> Result<Vec<u64>> {
    let _comparing = scope::comparing();
    ranks.gather_words(words)
}

/// Returns `prepared` if every rank could prepare its own part and all ranks have the same call. Without an error, this costs one
/// exchange of five words; texts are sent only for an error.
///
/// # Errors
/// On a rank that could not prepare, its own error, and on the others [`Error::InvalidArgument`] that quotes the first such rank. If
/// calls differ, the same [`Error::Disagreement`] on every rank. The errors of the ranks' communicator.
pub(crate) fn agree<R, T, E>(ranks: &R, call: &ComparedCall<'_>, prepared: Result<T, E>) -> Result<T, E>
where
    R: Ranks + ?Sized,
    E: Display + From<Error>,
{
    let scope = scope::within(call.operation);
    let tensors: usize = call.tables.iter().map(|(_, table)| table.tensor_count()).sum();
    let _scope = if tensors > 0 { scope.with_tensors(tensors) } else { scope };
    let gather = &|words: &[u64]| gather(ranks, words);
    let refusal = prepared.as_ref().err().map(ToString::to_string);
    let mut words = [0; DIGEST_WORDS + 1];
    words[..DIGEST_WORDS].copy_from_slice(&words_of(&call.digest()));
    words[DIGEST_WORDS] = u64::from(refusal.is_some());
    let all = match gather(&words) {
        Ok(all) => all,
        // This rank's own error is closer to the cause than the failed exchange.
        Err(error) => return prepared.and(Err(error.into())),
    };
    let of_ranks: Vec<&[u64]> = all.chunks_exact(words.len()).collect();
    // Every rank has the same words, so every rank takes the same branch.
    if let Some(refusing) = of_ranks.iter().position(|words| words[DIGEST_WORDS] != 0) {
        let refusals = gather_texts(gather, &refusal.unwrap_or_default());
        prepared?;
        let called = scope::called(call.operation);
        let step = match called {
            Operation::ReducerStep { number } => format!("in step {number} "),
            _ => String::new(),
        };
        let reason = format!("{step}rank {refusing} refuses: {}", refusals?[refusing]);
        return Err(Error::InvalidArgument { operation: called.name(), reason }.into());
    }
    let Some(odd) = of_ranks.iter().position(|words| *words != of_ranks[0]) else { return prepared };
    Err(Error::from(Box::new(first_difference(gather, call, (0, odd))?)).into())
}

/// Finds the first line in which the calls of two ranks differ; the caller knows that they differ. All ranks have to call it.
fn first_difference(
    gather: &dyn Fn(&[u64]) -> Result<Vec<u64>>,
    call: &ComparedCall<'_>,
    (left_rank, right_rank): (usize, usize),
) -> Result<Disagreement> {
    let own = call.beginnings();
    let lens = gather(&[own.len() as u64])?;
    let (mut from, mut to) = (0, (lens[left_rank].max(lens[right_rank]) as usize).saturating_sub(1));
    // The first difference is in a line from `from` to `to`.
    while from < to {
        let middle = from + (to - from) / 2;
        let beginnings = gather(&[own.get(middle).copied().unwrap_or_default()])?;
        if beginnings[left_rank] == beginnings[right_rank] {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    let [label, value] = call.line(from);
    let called = scope::called(call.operation).to_string();
    let of = |rank: usize, text: &str| Ok::<_, Error>(gather_texts(gather, text)?.swap_remove(rank));
    let values = gather_texts(gather, &value)?;
    Ok(Disagreement {
        operation: of(left_rank, &called)?,
        left_rank,
        right_rank,
        label: of(left_rank, &label)?,
        left: values[left_rank].clone(),
        right: values[right_rank].clone(),
    })
}

/// Compares the tensors of the ranks' buffers and `lines`. Returns an error on every rank if they differ, if a buffer is divided among
/// another number of ranks than there are, or if `checked` is an error on one rank. The host waits for the other ranks.
///
/// Comparing counts is not enough: tensors of two ranks may lie in different orders in arenas of the same length.
pub(crate) fn same_call<R: Ranks + ?Sized>(
    operation: Operation,
    ranks: &R,
    table: &TensorTable,
    lines: &[(&str, Value<'_>)],
    checked: Result<()>,
) -> Result<()> {
    let checked = checked.and_then(|()| table.check_world_size(operation.name(), ranks.world_size()));
    agree(ranks, &ComparedCall { lines, tables: &[("", table)], ..ComparedCall::of(operation) }, checked)
}

/// Compares the ranks' calls and returns `prepared` if every rank could prepare its own part; returns an error on every rank if one rank
/// could not, for example for lack of memory. The host waits for the other ranks.
///
/// # Errors
/// The errors of `agree`.
pub fn all_prepared<R, T, E>(operation: Operation, ranks: &R, prepared: Result<T, E>) -> Result<T, E>
where
    R: Ranks + ?Sized,
    E: Display + From<Error>,
{
    if ranks.world_size() == 1 { prepared } else { agree(ranks, &ComparedCall::of(operation), prepared) }
}

/// Like [`agree`], but without an exchange if the group remembers the same call from an earlier one. Then a rank that could not prepare its own
/// part ends the communicator, as if it had called a collective with these operands.
pub(crate) fn agree_once<R: Ranks + ?Sized, T>(ranks: &R, call: &ComparedCall<'_>, prepared: Result<T>) -> Result<T> {
    if ranks.world_size() == 1 {
        return prepared;
    }
    let Some(ledger) = ranks.ledger() else { return agree(ranks, call, prepared) };
    let digest = call.digest();
    if let Some(number) = ledger.agreements().number_of(&digest) {
        let prepared = prepared.map_err(|error| ledger.refuse(scope::called(call.operation), error))?;
        ledger.recall(number)?;
        return Ok(prepared);
    }
    let prepared = agree(ranks, call, prepared)?;
    ledger.agreements().add(digest);
    Ok(prepared)
}

/// Gathers every rank's text, in rank order; long texts are shortened.
fn gather_texts(gather: &dyn Fn(&[u64]) -> Result<Vec<u64>>, text: &str) -> Result<Vec<String>> {
    let text = shortened(text);
    let lens = gather(&[text.len() as u64])?;
    let lens: Vec<usize> = lens.iter().map(|&len| (len as usize).min(2 * LONGEST_TEXT)).collect();
    let longest = lens.iter().max().map_or(0, |len| len.div_ceil(WORD));
    let mut words = vec![0; longest];
    for (word, bytes) in words.iter_mut().zip(text.as_bytes().chunks(WORD)) {
        let mut padded = [0; WORD];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    let all = gather(&words)?;
    let text_of = |(rank, len): (usize, &usize)| {
        let words = &all[rank * longest..(rank + 1) * longest];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).take(*len).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(lens.iter().enumerate().map(text_of).collect())
}

/// Shortens a text to the limit of an exchange.
fn shortened(text: &str) -> String {
    if text.len() <= LONGEST_TEXT {
        return text.to_owned();
    }
    let end = (0..=LONGEST_TEXT).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::table::tests::colliding;
    use crate::comm::local;
    use crate::dtype::DType;

    #[test]
    fn same_call_tells_tables_that_collide_in_a_fast_hash_apart() {
        let outcomes = local::run(2, |comm| {
            let [tensors, _] = if comm.rank() == 0 {
                colliding()
            } else {
                let [one, other] = colliding();
                [other, one]
            };
            let table = TensorTable::new(DType::F32, 2, tensors)?;
            Ok::<_, Error>(
                same_call(Operation::ZeroPartition, &comm, &table, &[], Ok(())).map_err(|error| error.to_string()),
            )
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.expect_err("the tensors differ");
            assert!(error.contains("shape [128]") && error.contains("shape [1007616]"), "{error}");
        }
    }

    #[test]
    fn digests_remember_the_digest_of_the_same_lines() {
        let digest = |count: usize| {
            let lines = [("count", Value::Number(count))];
            ComparedCall { lines: &lines, ..ComparedCall::of(Operation::Barrier) }.digest()
        };
        let first: Vec<Digest> = (0..2 * REMEMBERED_CALLS).map(digest).collect();
        assert!(first.iter().enumerate().all(|(index, one)| !first[..index].contains(one)));
        assert!((0..2 * REMEMBERED_CALLS).rev().map(digest).eq(first.iter().rev().copied()));
        let elsewhere = std::thread::spawn(move || (0..3).map(digest).collect::<Vec<_>>()).join().unwrap();
        assert_eq!(elsewhere, first[..3]);
    }

    #[test]
    fn agreements_are_numbered_in_order() {
        let agreements = crate::comm::Agreements::default();
        let calls = [7, 3, 9].map(|byte| [byte; size_of::<Digest>()]);
        calls.iter().for_each(|&call| agreements.add(call));
        assert_eq!(calls.each_ref().map(|call| agreements.number_of(call)), [Some(1), Some(2), Some(3)]);
        assert_eq!(agreements.number_of(&[0; size_of::<Digest>()]), None);
    }
}
