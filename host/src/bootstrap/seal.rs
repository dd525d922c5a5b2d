//! Authentication tags on the frames of an authenticated connection: each frame is followed by a message authentication code, so that the
//! receiver notices if somebody in between alters, injects, repeats, drops or reorders frames. Frames are not encrypted.
//!
//! The tag of a frame is the first 16 bytes of HMAC-SHA256 (RFC 2104, truncated as its section 5 allows) of the frame's number, from 0,
//! as eight bytes, and the frame with its length. Each direction of each connection has its own key. The keys are made in
//! [`handshake`](super::handshake).

use std::fmt;
use std::io::{self, Read};

use hmac::{Hmac, Mac};
use serde::de::DeserializeOwned;
use sha2::Sha256;

use super::frame;

/// The length of a tag: 128 bits, half of the hash.
pub(crate) const TAG: usize = 16;

/// The key of one direction of a connection, and the number of the next frame. A copy is for use in place of the original.
#[derive(Clone)]
pub(crate) struct Seal {
    mac: Hmac<Sha256>,
    number: u64,
}

/// The keys of both directions of a connection, as one side uses them.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) outgoing: Seal,
    pub(crate) incoming: Seal,
}

impl Seal {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Seal { mac: Hmac::new_from_slice(key).expect("HMAC takes keys of any length"), number: 0 }
    }

    fn next(&mut self, frame: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        mac.update(&self.number.to_le_bytes());
        mac.update(frame);
        // No connection lives for 2⁶⁴ frames.
        self.number += 1;
        mac
    }

    /// Returns the tag of the next frame to send.
    pub(crate) fn tag(&mut self, frame: &[u8]) -> [u8; TAG] {
        let tag = self.next(frame).finalize().into_bytes();
        std::array::from_fn(|index| tag[index])
    }

    /// Whether `tag` is the tag of the next received frame. The comparison takes constant time.
    pub(crate) fn fits(&mut self, frame: &[u8], tag: &[u8; TAG]) -> bool {
        self.next(frame).verify_truncated_left(tag).is_ok()
    }

    /// Reads the next frame, with its tag.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the frame is too long, its tag does not fit, or it does not parse; else the errors of the
    /// connection.
    pub(super) fn read<T: DeserializeOwned>(&mut self, connection: &mut impl Read, limit: usize) -> io::Result<T> {
        let frame = frame::read(connection, limit)?;
        let mut tag = [0; TAG];
        connection.read_exact(&mut tag)?;
        if !self.fits(&frame, &tag) {
            let reason = "a frame is not the one that was sent next: it was altered, injected, repeated or reordered";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        frame::decode(&frame[frame::LENGTH..])
    }
}

/// Keys are never printed.
impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::frame::encode;

    const KEY: [u8; 32] = [7; 32];

    fn sealed(seal: &mut Seal, message: &str) -> Vec<u8> {
        let frame = encode(&message, 64).unwrap();
        let tag = seal.tag(&frame);
        [frame, tag.to_vec()].concat()
    }

    /// The messages that a receiver reads from these bytes, up to the first that it refuses.
    fn received(mut bytes: &[u8]) -> Vec<String> {
        let mut seal = Seal::new(&KEY);
        std::iter::from_fn(|| seal.read(&mut bytes, 64).ok()).collect()
    }

    #[test]
    fn frames_come_back_as_they_went_and_in_no_other_way() {
        let mut seal = Seal::new(&KEY);
        let [one, two, three] = ["one", "two", "three"].map(|message| sealed(&mut seal, message));
        assert_eq!(received(&[&one[..], &two, &three].concat()), ["one", "two", "three"]);
        assert_eq!(received(&[&one[..], &one].concat()), ["one"], "a frame that is repeated");
        assert_eq!(received(&[&one[..], &three].concat()), ["one"], "a frame that is left out");
        assert_eq!(received(&[&two[..], &one].concat()), [""; 0], "frames in another order");
        assert_eq!(received(&sealed(&mut Seal::new(&[8; 32]), "one")), [""; 0], "a frame under another key");
        for index in 0..one.len() {
            let mut altered = one.clone();
            altered[index] ^= 1;
            // If the length was altered to a larger one, the reader needs more bytes.
            altered.extend([0; 64]);
            assert_eq!(received(&altered), [""; 0], "byte {index} is altered");
        }
    }

    /// The documented construction, computed from the hash alone (RFC 2104, section 2).
    #[test]
    fn the_tag_is_the_documented_one() {
        use sha2::Digest;
        let frame = encode(&"one", 64).unwrap();
        let padded = |byte: u8| -> Vec<u8> { (0..64).map(|index| KEY.get(index).unwrap_or(&0) ^ byte).collect() };
        let mut seal = Seal::new(&KEY);
        for number in 0..3u64 {
            let inner = Sha256::digest([&padded(0x36)[..], &number.to_le_bytes(), &frame].concat());
            let outer = Sha256::digest([&padded(0x5c)[..], &inner].concat());
            assert_eq!(seal.tag(&frame)[..], outer[..TAG]);
        }
    }
}
