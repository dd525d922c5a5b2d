//! [`Secret`]: the shared secret by which the ranks of a group authenticate each other.
//!
//! It is never sent over a connection of this crate, and printed only on request.

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::primitives::hmac;
use crate::error::BootstrapError;
use crate::error::{Error, Result};

/// The prefix of every secret's text, by which a secret can be recognised in a log or a repository.
const PREFIX: &str = "gradsync-secret-";
/// The number of random bytes.
const LEN: usize = 32;
/// The number of bytes of the checksum.
const CHECK: usize = 4;
/// The variable that [`Secret::from_env`] reads.
const VARIABLE: &str = "GRADSYNC_SECRET";

/// The shared secret of a group, by which its ranks authenticate each other: 256 random bits.
///
/// Its text is `gradsync-secret-`, the bits as 64 hexadecimal digits, and the first 8 digits of the SHA-256 of the preceding text as a
/// checksum. Only such text is accepted ([`FromStr`]), because a secret that a person chose can be guessed by an attacker to whom a rank
/// proves it. The program prints a fresh secret (`gradsync secret`), and [`Secret::generate`] makes one.
///
/// ```
/// use gradsync::bootstrap::Secret;
///
/// let text = Secret::generate()?.reveal(); // for the environment of the ranks that a launcher starts
/// let secret: Secret = text.parse()?;
/// assert_eq!(secret.reveal(), text);
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// assert!("correct horse battery staple".parse::<Secret>().is_err());
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone)]
pub struct Secret([u8; LEN]);

impl Secret {
    /// Makes a fresh secret from the system's random bytes.
    ///
    /// # Errors
    /// [`BootstrapError::NoRandomness`].
    pub fn generate() -> Result<Self> {
        Ok(Secret::random()?)
    }

    /// Returns the secret as text, for the environment of other ranks. Any process with this text can join.
    pub fn reveal(&self) -> String {
        let text = format!("{PREFIX}{}", hex(&self.0));
        let check = check(&text);
        text + &check
    }

    /// Reads the secret in the variable `GRADSYNC_SECRET`.
    ///
    /// # Errors
    /// [`BootstrapError::MissingVariable`] if the variable is not set, [`BootstrapError::WeakSecret`] if its value is not a generated
    /// secret.
    pub fn from_env() -> Result<Self> {
        match std::env::var_os(VARIABLE).map(OsString::into_string) {
            Some(Ok(text)) => text.parse(),
            Some(Err(_)) => Err(weak("it is not UTF-8".into()).into()),
            None => {
                let reason = "it keeps strangers out of the group; give every rank the same secret, which `gradsync secret` makes";
                Err(BootstrapError::MissingVariable { variable: VARIABLE.into(), reason: reason.into() }.into())
            }
        }
    }

    /// Derives the secret of another group from this secret and `nonce` (HMAC-SHA256, RFC 2104). It cannot be computed without this
    /// secret: a launcher gives the ranks of each start a fresh nonce and sends no secret.
    #[must_use]
    pub fn derived(&self, nonce: &[u8; 32]) -> Self {
        Secret(hmac(&self.0, &[&b"gradsync secret of a start"[..], nonce].concat()))
    }

    pub(super) fn random() -> Result<Self, BootstrapError> {
        random().map(Secret)
    }

    /// The bytes of the secret; only for the ranks of the group.
    pub(super) fn bytes(&self) -> &[u8; LEN] {
        &self.0
    }

    /// Makes the secret with these bytes, which [`bytes`](Self::bytes) has returned.
    pub(super) fn from_bytes(bytes: [u8; LEN]) -> Self {
        Secret(bytes)
    }
}

impl FromStr for Secret {
    type Err = Error;

    /// Parses the text of a secret. White space around it is ignored. Errors reveal only the length of the text.
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim_ascii();
        let Some(digits) = text.strip_prefix(PREFIX) else {
            return Err(weak(format!("it has {} characters and does not begin with `{PREFIX}`", text.len())).into());
        };
        let wanted = 2 * (LEN + CHECK);
        if digits.len() != wanted || !digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
            let reason = format!(
                "`{PREFIX}` must be followed by {wanted} digits from 0 to 9 and a to f, and {} characters follow it",
                digits.chars().count()
            );
            return Err(weak(reason).into());
        }
        let (body, sum) = text.split_at(text.len() - 2 * CHECK);
        if check(body) != sum {
            return Err(weak("its check does not fit: it was altered, or made up".into()).into());
        }
        let digits = &body[PREFIX.len()..];
        let byte = |index: usize| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).expect("two digits");
        Ok(Secret(std::array::from_fn(byte)))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn weak(reason: String) -> BootstrapError {
    BootstrapError::WeakSecret { reason }
}

fn check(text: &str) -> String {
    hex(&Sha256::digest(text)[..CHECK])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns unpredictable random bytes.
pub(super) fn random() -> Result<[u8; LEN], BootstrapError> {
    let mut bytes = [0; LEN];
    getrandom::fill(&mut bytes).map_err(|error| BootstrapError::NoRandomness { reason: error.to_string() })?;
    Ok(bytes)
}
