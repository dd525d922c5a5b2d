//! The negotiation before a payload of unknown shapes: the sender describes it by a header, and the receiver accepts or refuses.
//!
//! It exchanges small messages of the host, and allocates memory for a payload only when it has checked the whole header.
//!
//! # The protocol
//!
//! Messages are of type `u64`, 8 bytes each as they are in memory.
//!
//! | message | direction | words |
//! |---|---|---|
//! | the first part of the [header](crate::plan::bundle), or all of it, and zeros | to the receiver | [`HEAD_WORDS`] |
//! | the answer | to the sender | [`ANSWER_WORDS`] |
//! | the rest of the header, if it is longer | to the receiver | as its prefix says |
//! | the answer to that | to the sender | [`ANSWER_WORDS`] |
//!
//! The payload, in bytes of type `u8`, follows unless the answer is a refusal.
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
//! If a sender that describes meets a receiver that does not, or the reverse, the first message of one is of type `u64`, and the message of
//! the other is of type `u8`. Transports refuse transfers of different types on both ranks, so bytes of one kind are never mistaken for the
//! other.

use super::memory::BundleMemory;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::plan::bundle::{Header, HeaderError, Limits, PREFIX_BYTES, Prefix, decode};

/// The size of the first message about a described bundle, enough for about 30 tensors of 3 dimensions.
const HEAD_WORDS: usize = 127;

/// The size of a receiver's answer.
const ANSWER_WORDS: usize = 32;

const WORD: usize = size_of::<u64>();

/// The first bytes of a message that withdraws the bundle.
const WITHDRAWN: [u8; 4] = *b"GSTW";

/// The size of the reason in that message in bytes.
const WITHDRAWAL_BYTES: usize = 256;

/// A bundle that this rank describes to a peer.
pub(super) struct Offer {
    peer: usize,
    /// The whole header, or the message that withdraws the bundle; in whole words, of the length of a head or more.
    message: Vec<u64>,
    /// The receiver's answer.
    pub(super) outcome: Result<()>,
}

impl Offer {
    /// Offers a bundle by a header.
    pub(super) fn new(peer: usize, header: &[u8]) -> Self {
        let words = header.len().div_ceil(WORD).max(HEAD_WORDS);
        Self { peer, message: words_of(header, words), outcome: Ok(()) }
    }

    /// Withdraws a bundle, with the reason.
    pub(super) fn withdrawn(peer: usize, reason: &Error) -> Self {
        Self::new(peer, &[&WITHDRAWN[..], beginning(&reason.to_string(), WITHDRAWAL_BYTES)].concat())
    }
}

/// A bundle that a peer describes to this rank, for which `P` is the memory.
pub(super) struct Want<P> {
    peer: usize,
    tag: u64,
    limits: Limits,
    /// The header as far as it has arrived.
    header: Vec<u64>,
    /// The words of the header that are still to come.
    rest: usize,
    /// The memory, or the refusal; none as long as the header is not complete.
    outcome: Option<Result<P>>,
}

impl<P> Want<P> {
    pub(super) fn new(peer: usize, tag: u64, limits: Limits) -> Self {
        Self { peer, tag, limits, header: Vec::new(), rest: 0, outcome: None }
    }

    /// The memory for a bundle that was negotiated, or the refusal.
    pub(super) fn into_outcome(self) -> Result<P> {
        self.outcome.expect("a negotiation reads every header to its end")
    }

    pub(super) fn memory_mut(&mut self) -> Option<&mut P> {
        self.outcome.as_mut()?.as_mut().ok()
    }

    fn refuse(&mut self, reason: impl std::fmt::Display) {
        self.outcome = Some(Err(self.refusal(reason)));
    }

    fn refusal(&self, reason: impl std::fmt::Display) -> Error {
        Error::InvalidArgument { operation: "recv", reason: format!("the bundle of rank {}: {reason}", self.peer) }
    }

    /// Checks the first part of a header. Returns an error only if the message is no header.
    fn begin(&mut self, head: Vec<u64>) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(&head);
        if let Some(reason) = bytes.strip_prefix(&WITHDRAWN) {
            let reason = String::from_utf8_lossy(&reason[..WITHDRAWAL_BYTES]);
            self.refuse(format!("the sender withdraws it: {}", reason.trim_end_matches('\0')));
            return Ok(());
        }
        let prefix: &[u8; PREFIX_BYTES] = bytes.first_chunk().expect("a head is longer than a prefix");
        match Prefix::decode(prefix, &self.limits) {
            Ok(Prefix { sequence, .. }) if sequence != self.tag => {
                self.refuse(format!("it has tag {sequence}, and tag {} is expected", self.tag));
            }
            Ok(Prefix { header_bytes, .. }) => {
                self.rest = (header_bytes as usize).div_ceil(WORD).saturating_sub(HEAD_WORDS);
                self.header = head;
            }
            Err(error @ (HeaderError::Magic { .. } | HeaderError::Version { .. })) => return Err(self.refusal(error)),
            Err(error) => self.refuse(error),
        }
        Ok(())
    }

    /// Checks a header that has arrived as a whole, and allocates memory for the tensors that it describes.
    fn settle(&mut self, allocate: &mut impl FnMut(Header) -> Result<P>) {
        let bytes: &[u8] = bytemuck::cast_slice(&self.header);
        let prefix = bytes.first_chunk().expect("a head is longer than a prefix");
        // The prefix was checked when it arrived.
        let header = Prefix::decode(prefix, &self.limits)
            .and_then(|prefix| decode(&bytes[..prefix.header_bytes as usize], &self.limits));
        self.outcome = Some(match header {
            Ok(header) if header.tensors.is_empty() => Err(self.refusal("it has no tensors")),
            Ok(header) => allocate(header),
            Err(error) => Err(self.refusal(error)),
        });
    }
}

/// Exchanges headers and answers with all peers, and leaves the outcome in each offer and want. `allocate` allocates memory for a received
/// header; its error is sent to the sender as a refusal.
///
/// # Errors
/// The errors of the transport, and [`Error::InvalidArgument`] for a message that is no header.
pub(super) fn negotiate<M: BundleMemory, P>(
    (comm, queue): (&dyn Communicator<M>, &M::Queue),
    mut offers: Vec<&mut Offer>,
    mut wants: Vec<&mut Want<P>>,
    mut allocate: impl FnMut(Header) -> Result<P>,
) -> Result<()> {
    let mut channel = Channel::<M> { comm, queue, workspace: M::Workspace::default() };
    let rests: usize = offers.iter().map(|offer| offer.message.len() - HEAD_WORDS).sum();
    channel.reserve(rests.max((offers.len() + wants.len()) * HEAD_WORDS))?;
    let heads = offers.iter().map(|offer| (offer.peer, offer.message[..HEAD_WORDS].to_vec()));
    let heads = channel.exchange(heads.collect(), wants.iter().map(|want| (want.peer, HEAD_WORDS)))?;
    for (want, head) in wants.iter_mut().zip(heads) {
        want.begin(head)?;
    }
    let mut words = rests;
    for want in wants.iter_mut().filter(|want| want.outcome.is_none()) {
        if want.rest == 0 {
            want.settle(&mut allocate);
            continue;
        }
        // A rest for which there is no memory is refused, and not sent.
        match channel.reserve(words + want.rest) {
            Ok(()) => words += want.rest,
            Err(error) => want.outcome = Some(Err(error)),
        }
    }
    channel.answer(&mut offers, &mut wants)?;

    offers.retain(|offer| offer.message.len() > HEAD_WORDS && offer.outcome.is_ok());
    wants.retain(|want| want.outcome.is_none());
    let rests = offers.iter().map(|offer| (offer.peer, offer.message[HEAD_WORDS..].to_vec()));
    let rests = channel.exchange(rests.collect(), wants.iter().map(|want| (want.peer, want.rest)))?;
    for (want, rest) in wants.iter_mut().zip(rests) {
        want.header.extend(rest);
        want.settle(&mut allocate);
    }
    channel.answer(&mut offers, &mut wants)
}

/// A channel for small messages of the host.
struct Channel<'c, M: BundleMemory> {
    comm: &'c dyn Communicator<M>,
    queue: &'c M::Queue,
    workspace: M::Workspace,
}

impl<M: BundleMemory> Channel<'_, M> {
    fn reserve(&mut self, words: usize) -> Result<()> {
        M::reserve(self.queue, &mut self.workspace, words)
    }

    /// Sends messages to peers, and returns messages of given lengths from peers.
    fn exchange(
        &mut self,
        sends: Vec<(usize, Vec<u64>)>,
        receives: impl Iterator<Item = (usize, usize)>,
    ) -> Result<Vec<Vec<u64>>> {
        let mut received: Vec<(usize, Vec<u64>)> = receives.map(|(peer, words)| (peer, vec![0; words])).collect();
        if !(sends.is_empty() && received.is_empty()) {
            M::exchange_words(self.comm, &mut self.workspace, &sends, &mut received)?;
        }
        Ok(received.into_iter().map(|(_, words)| words).collect())
    }

    /// Sends the answers for the headers of `wants`, and receives the answers for `offers`.
    fn answer<P>(&mut self, offers: &mut [&mut Offer], wants: &mut [&mut Want<P>]) -> Result<()> {
        let refusal = |want: &Want<P>| Some(want.outcome.as_ref()?.as_ref().err()?.to_string());
        let answers = wants.iter().map(|want| (want.peer, encode_answer(refusal(want).as_deref())));
        let answers = self.exchange(answers.collect(), offers.iter().map(|offer| (offer.peer, ANSWER_WORDS)));
        let answers = answers.map_err(|error| {
            // This rank's own reason for a refusal says more than a refusal by the peer's transport.
            let outcomes = wants.iter_mut().filter_map(|want| want.outcome.take_if(|outcome| outcome.is_err()));
            outcomes.filter_map(Result::err).next().unwrap_or(error)
        })?;
        for (offer, answer) in offers.iter_mut().zip(answers) {
            if let Some(reason) = decode_answer(bytemuck::cast_slice(&answer)) {
                let reason = format!("rank {} refuses the bundle: {reason}", offer.peer);
                offer.outcome = Err(Error::InvalidArgument { operation: "send", reason });
            }
        }
        Ok(())
    }
}

fn encode_answer(refusal: Option<&str>) -> Vec<u64> {
    let mut answer = Vec::new();
    if let Some(text) = refusal {
        answer.push(1);
        answer.extend(beginning(text, ANSWER_WORDS * WORD - 1));
    }
    words_of(&answer, ANSWER_WORDS)
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

/// The bytes, and zeros up to `words` words.
fn words_of(bytes: &[u8], words: usize) -> Vec<u64> {
    let mut padded = vec![0; words];
    bytemuck::cast_slice_mut(&mut padded)[..bytes.len()].copy_from_slice(bytes);
    padded
}

/// The longest prefix of whole characters with at most `bytes` bytes.
fn beginning(text: &str, bytes: usize) -> &[u8] {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_answer_survives_and_cuts_at_characters() {
        let decode = |answer: &[u64]| decode_answer(bytemuck::cast_slice(answer));
        assert_eq!(decode(&encode_answer(None)), None);
        for text in ["", "it has tag 3", &"ä".repeat(200), &"x".repeat(255), &format!("x{}", "ä".repeat(200))] {
            let answer = decode(&encode_answer(Some(text))).expect("a refusal");
            assert!(text.starts_with(&answer), "{answer:?} is no beginning of {text:?}");
            assert!(answer.len() == text.len() || answer.len() >= ANSWER_WORDS * WORD - 2, "{answer:?}");
        }
        assert!(decode_answer(&[7; 256]).is_some_and(|reason| reason.contains('7')));
        assert!(decode_answer(&[1; 256]).is_some());
    }
}
