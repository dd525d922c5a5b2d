//! The negotiation before a payload of unknown shapes: the sender describes it by a header, and the receiver accepts or refuses.
//!
//! It exchanges small messages in host memory over a [`Messages`] channel, and reserves memory only for headers that it has checked.
//!
//! # The protocol
//!
//! | message | direction | bytes |
//! |---|---|---|
//! | the first part of the [header](crate::plan::bundle), or all of it, and zeros | to the receiver | [`HEAD_BYTES`] |
//! | the answer | to the sender | [`ANSWER_BYTES`] |
//! | the rest of the header, if it is longer | to the receiver | as its prefix says |
//! | the answer to that | to the sender | [`ANSWER_BYTES`] |
//! | the payload, unless the answer is a refusal | to the receiver | as the header says |
//!
//! A sender that describes a bundle has already allocated all memory for sending it. A sender whose allocation fails sends, instead of the
//! header, four bytes `GSTW`, the reason in UTF-8, and zeros: the receiver answers as to any other header that it refuses, and the transfer
//! ends.
//!
//! An answer is a zero, or a one and the reason in UTF-8, and zeros. A refusal ends the transfer on both ranks, and leaves no message that
//! a later transfer could mistake for its own. A message that is no header is not answered: its sender expects no answer.
//!
//! # Ranks that make different choices
//!
//! If a sender that describes meets a receiver that does not, or the reverse, the first message of one is [`HEAD_BYTES`] long, and no
//! message of the other is, since a payload of exactly that length is sent [in two parts](PART_BYTES). Transports refuse transfers of
//! unequal lengths on both ranks, so bytes of one kind are never mistaken for the other, for any contents.

use crate::error::{CommError, Error, Operation, Result};
use crate::plan::bundle::{Header, HeaderError, Limits, PREFIX_BYTES, Prefix, decode};

/// The size of the first message about a described bundle, enough for about 30 tensors of 3 dimensions. Payloads hardly ever have this
/// length.
pub(crate) const HEAD_BYTES: usize = 1016;

/// The size of a receiver's answer in bytes.
pub(crate) const ANSWER_BYTES: usize = 256;

/// The size in bytes of the first part of a payload that has the length of a head.
pub(crate) const PART_BYTES: usize = 256;

/// The first bytes of a message that withdraws the bundle.
const WITHDRAWN: [u8; 4] = *b"GSTW";

/// The size of the reason in that message in bytes.
const WITHDRAWAL_BYTES: usize = 256;

/// A channel for small messages between ranks; all messages of a call are exchanged at once.
pub trait Messages {
    /// Reserves workspace for an exchange that sends `sends` bytes and receives `receives`, where each message counts with its [padded
    /// length](padded_len). Earlier reservations stay valid. An exchange within the reservation does not fail for lack of memory.
    fn reserve_workspace(&self, sends: usize, receives: usize) -> Result<()> {
        _ = (sends, receives);
        Ok(())
    }

    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()>;
}

/// The bytes that [`Messages::reserve_workspace`] counts for a message of `bytes` bytes: whole words.
pub(crate) fn padded_len(bytes: usize) -> usize {
    bytes.next_multiple_of(size_of::<u64>())
}

/// A bundle that this rank describes to a peer.
pub(crate) struct Offer {
    pub(crate) peer: usize,
    /// The whole header, or a [`withdrawal`].
    pub(crate) header: Vec<u8>,
}

/// A bundle that a peer describes to this rank.
pub(crate) struct Want {
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) limits: Limits,
}

/// The outcome of each offer and of each want, in their order.
pub(crate) struct Outcome<P> {
    pub(crate) offers: Vec<Result<()>>,
    pub(crate) wants: Vec<Result<P>>,
}

/// The state of a want.
enum State<P> {
    /// The first part of a header, and the header's whole length.
    Begun(Vec<u8>, usize),
    Settled(Result<P>),
}

/// Exchanges headers and answers with all peers. `reserve` allocates memory for a received header; its error is sent to the sender as a
/// refusal.
///
/// # Errors
/// The errors of the transport, and [`Error::InvalidArgument`] for a message that is no header. A refused bundle is in the outcome.
pub(crate) fn negotiate<P>(
    messages: &dyn Messages,
    offers: &[Offer],
    wants: &[Want],
    mut reserve: impl FnMut(Header) -> Result<P>,
) -> Result<Outcome<P>> {
    let mut accepted: Vec<Result<()>> = offers.iter().map(|_| Ok(())).collect();
    if offers.is_empty() && wants.is_empty() {
        return Ok(Outcome { offers: accepted, wants: Vec::new() });
    }
    let rests = offers.iter().map(|offer| padded_len(offer.header.len().saturating_sub(HEAD_BYTES))).sum::<usize>();
    let heads_and_answers =
        |heads: usize, answers: usize| (heads * padded_len(HEAD_BYTES)).max(answers * padded_len(ANSWER_BYTES));
    let workspace = heads_and_answers(offers.len(), wants.len()).max(rests);
    messages.reserve_workspace(workspace, heads_and_answers(wants.len(), offers.len()))?;
    let heads: Vec<[u8; HEAD_BYTES]> = offers.iter().map(|offer| padded(&offer.header)).collect();
    let sends: Vec<(usize, &[u8])> = offers.iter().zip(&heads).map(|(offer, head)| (offer.peer, &head[..])).collect();
    let mut arrived: Vec<Vec<u8>> = wants.iter().map(|_| vec![0; HEAD_BYTES]).collect();
    messages.exchange(&sends, &mut places(wants.iter().map(|want| want.peer), &mut arrived))?;

    let begin = |(want, head): (&Want, Vec<u8>)| begin(want, head, &mut reserve);
    let mut states: Vec<State<P>> = wants.iter().zip(arrived).map(begin).collect::<Result<_>>()?;
    reserve_for_rests(messages, &mut states);
    let all_offers: Vec<usize> = (0..offers.len()).collect();
    let all_wants: Vec<usize> = (0..wants.len()).collect();
    answer(messages, (offers, &mut accepted, &all_offers), (wants, &mut states, &all_wants))?;

    let is_long = |index: &usize| offers[*index].header.len() > HEAD_BYTES && accepted[*index].is_ok();
    let long_offers: Vec<usize> = all_offers.into_iter().filter(is_long).collect();
    let is_begun = |index: &usize| matches!(states[*index], State::Begun(..));
    let long_wants: Vec<usize> = all_wants.into_iter().filter(is_begun).collect();
    if !(long_offers.is_empty() && long_wants.is_empty()) {
        let rest = |&index: &usize| (offers[index].peer, &offers[index].header[HEAD_BYTES..]);
        let sends: Vec<(usize, &[u8])> = long_offers.iter().map(rest).collect();
        let mut arrived = Vec::new();
        for &index in &long_wants {
            if let State::Begun(_, len) = &states[index] {
                // The length is at most the limit on headers.
                arrived.push(vec![0; len - HEAD_BYTES]);
            }
        }
        let peers = long_wants.iter().map(|&index| wants[index].peer);
        messages.exchange(&sends, &mut places(peers, &mut arrived))?;
        for (&index, rest) in long_wants.iter().zip(arrived) {
            if let State::Begun(header, _) = &mut states[index] {
                header.extend(rest);
                let settled = settle(&wants[index], header, &mut reserve);
                states[index] = State::Settled(settled);
            }
        }
        answer(messages, (offers, &mut accepted, &long_offers), (wants, &mut states, &long_wants))?;
    }
    let settled = |state| match state {
        State::Settled(outcome) => outcome,
        State::Begun(..) => unreachable!("a header that was begun has been read to its end"),
    };
    Ok(Outcome { offers: accepted, wants: states.into_iter().map(settled).collect() })
}

/// Reserves workspace for the rests of headers whose first part is valid, and refuses those for which memory does not suffice.
fn reserve_for_rests<P>(messages: &dyn Messages, states: &mut [State<P>]) {
    let mut reserved = 0;
    for state in states {
        let State::Begun(_, len) = state else { continue };
        let rest = padded_len(*len - HEAD_BYTES);
        match messages.reserve_workspace(0, reserved + rest) {
            Ok(()) => reserved += rest,
            Err(error) => *state = State::Settled(Err(error)),
        }
    }
}

/// Checks the first part of a header, and the whole header if it is complete. Returns an error only if the message is no header.
fn begin<P>(want: &Want, head: Vec<u8>, reserve: &mut impl FnMut(Header) -> Result<P>) -> Result<State<P>> {
    if let Some(reason) = head.strip_prefix(&WITHDRAWN) {
        let reason = String::from_utf8_lossy(&reason[..WITHDRAWAL_BYTES]);
        let text = format!("the sender withdraws it: {}", reason.trim_end_matches('\0'));
        return Ok(State::Settled(Err(refusal(want, text))));
    }
    let prefix: &[u8; PREFIX_BYTES] = head.first_chunk().expect("a head is longer than a prefix");
    let prefix = match Prefix::decode(prefix, &want.limits) {
        Ok(prefix) => prefix,
        Err(error @ (HeaderError::Magic { .. } | HeaderError::Version { .. })) => return Err(refusal(want, error)),
        Err(error) => return Ok(State::Settled(Err(refusal(want, error)))),
    };
    let len = prefix.header_bytes as usize;
    if prefix.sequence != want.tag {
        let text = format!("it has tag {}, and tag {} is expected", prefix.sequence, want.tag);
        return Ok(State::Settled(Err(refusal(want, text))));
    }
    if len > HEAD_BYTES {
        return Ok(State::Begun(head, len));
    }
    Ok(State::Settled(settle(want, &head[..len], reserve)))
}

/// Checks a whole header, and allocates memory for the tensors that it describes.
fn settle<P>(want: &Want, header: &[u8], reserve: &mut impl FnMut(Header) -> Result<P>) -> Result<P> {
    let header = decode(header, &want.limits).map_err(|error| refusal(want, error))?;
    if header.tensors.is_empty() {
        return Err(refusal(want, "it has no tensors"));
    }
    reserve(header)
}

/// Sends the answers for the headers of `wants`, and receives the answers for `offers`.
fn answer<P>(
    messages: &dyn Messages,
    (offers, accepted, offered): (&[Offer], &mut [Result<()>], &[usize]),
    (wants, states, wanted): (&[Want], &mut [State<P>], &[usize]),
) -> Result<()> {
    let mut own = Vec::new();
    for &index in wanted {
        let text = match &states[index] {
            State::Settled(Err(error)) => Some(error.to_string()),
            _ => None,
        };
        own.push((wants[index].peer, encode_answer(text.as_deref())));
    }
    let sends: Vec<(usize, &[u8])> = own.iter().map(|(peer, answer)| (*peer, &answer[..])).collect();
    let mut theirs: Vec<Vec<u8>> = offered.iter().map(|_| vec![0; ANSWER_BYTES]).collect();
    let told = messages.exchange(&sends, &mut places(offered.iter().map(|&index| offers[index].peer), &mut theirs));
    if let Err(error) = told {
        // This rank's own reason for a refusal says more than a refusal by the peer's transport.
        let refused = wanted.iter().find(|&&index| matches!(states[index], State::Settled(Err(_))));
        return Err(match refused.map(|&index| std::mem::replace(&mut states[index], State::Begun(Vec::new(), 0))) {
            Some(State::Settled(Err(refusal))) => refusal,
            _ => error,
        });
    }
    for (&index, answer) in offered.iter().zip(theirs) {
        let peer = offers[index].peer;
        if let Some(reason) = decode_answer(&answer) {
            let operation = "send";
            let reason = format!("rank {peer} refuses the bundle: {reason}");
            accepted[index] = Err(Error::InvalidArgument { operation, reason });
        }
    }
    Ok(())
}

fn encode_answer(refusal: Option<&str>) -> [u8; ANSWER_BYTES] {
    let mut answer = [0; ANSWER_BYTES];
    if let Some(text) = refusal {
        let text = beginning(text, ANSWER_BYTES - 1);
        answer[0] = 1;
        answer[1..=text.len()].copy_from_slice(text);
    }
    answer
}

/// The longest prefix of whole characters with at most `bytes` bytes.
fn beginning(text: &str, bytes: usize) -> &[u8] {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

/// The message that replaces a header: the bundle is withdrawn, with the reason.
pub(crate) fn withdrawal(error: &Error) -> Vec<u8> {
    [&WITHDRAWN[..], beginning(&error.to_string(), WITHDRAWAL_BYTES)].concat()
}

/// The reason of a refusal, if the answer is one.
fn decode_answer(answer: &[u8]) -> Option<String> {
    match answer {
        [0, ..] => None,
        [1, text @ ..] => Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()),
        other => Some(format!(
            "its answer begins with {:?}, which is no answer of this version: all ranks need one version of gradsync",
            other.first()
        )),
    }
}

fn padded(header: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    let len = header.len().min(HEAD_BYTES);
    head[..len].copy_from_slice(&header[..len]);
    head
}

fn places(peers: impl Iterator<Item = usize>, buffers: &mut [Vec<u8>]) -> Vec<(usize, &mut [u8])> {
    peers.zip(buffers).map(|(peer, buffer)| (peer, &mut buffer[..])).collect()
}

fn refusal(want: &Want, reason: impl std::fmt::Display) -> Error {
    Error::InvalidArgument { operation: "recv", reason: format!("the bundle of rank {}: {reason}", want.peer) }
}

/// Refuses a false signal, then a peer that is this rank itself or no rank, in ONNX Runtime's order.
pub(crate) fn check_call(
    name: &'static str,
    operation: Operation,
    signal: bool,
    peer: usize,
    (rank, world_size): (usize, usize),
) -> Result<()> {
    if !signal {
        return Err(Error::InvalidArgument {
            operation: name,
            reason: "the input signal is false, and nothing is transferred unless it is true".into(),
        });
    }
    if peer < world_size && peer != rank {
        return Ok(());
    }
    Err(CommError::InvalidPeer { operation, peer, rank, world_size }.into())
}

/// Returns the first refusal, once all other bundles have been transferred.
pub(crate) fn first_error(refused: Vec<Error>) -> Result<()> {
    refused.into_iter().next().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_and_are_cut_at_characters() {
        assert_eq!(decode_answer(&encode_answer(None)), None);
        for text in ["", "it has tag 3", &"ä".repeat(200), &"x".repeat(255), &format!("x{}", "ä".repeat(200))] {
            let answer = decode_answer(&encode_answer(Some(text))).expect("a refusal");
            assert!(text.starts_with(&answer), "{answer:?} is no beginning of {text:?}");
            assert!(answer.len() == text.len() || answer.len() >= ANSWER_BYTES - 2, "{answer:?}");
        }
        assert!(decode_answer(&[7; ANSWER_BYTES]).is_some_and(|reason| reason.contains('7')));
        assert!(decode_answer(&[1; ANSWER_BYTES]).is_some());
    }
}
