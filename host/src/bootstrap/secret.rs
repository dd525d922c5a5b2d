//! [`Secret`]: what the ranks of a group know and strangers do not.
//!
//! It never travels over a connection, and is never printed.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::error::BootstrapError;
use crate::error::Result;

/// The least length that is accepted.
const LEAST: usize = 8;
/// Where [`Secret::from_env`] looks.
const VARIABLE: &str = "GRADSYNC_SECRET";

/// A word that all ranks of a group know, by which they tell each other from strangers.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// A secret of at least 8 bytes; random ones, best.
    ///
    /// # Errors
    /// [`BootstrapError::SecretTooShort`].
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < LEAST {
            return Err(BootstrapError::SecretTooShort { bytes: bytes.len(), least: LEAST }.into());
        }
        Ok(Secret(bytes.into()))
    }

    /// The secret in the variable `GRADSYNC_SECRET`.
    ///
    /// # Errors
    /// [`BootstrapError::MissingVariable`] if it is not set, [`BootstrapError::SecretTooShort`] for fewer than 8 bytes.
    pub fn from_env() -> Result<Self> {
        match std::env::var_os(VARIABLE) {
            Some(value) => Secret::new(value.into_encoded_bytes()),
            None => {
                let reason = "it keeps strangers out of the group; give every rank the same random string, e.g. of \
                              `openssl rand -hex 16`";
                Err(BootstrapError::MissingVariable { variable: VARIABLE.into(), reason: reason.into() }.into())
            }
        }
    }

    /// A fresh random secret.
    pub(super) fn random() -> Result<Self, BootstrapError> {
        Ok(Secret(random()?.into()))
    }

    /// The bytes, for the ranks of the group and nobody else.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The secret with these bytes, which [`bytes`](Self::bytes) gave.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        Secret(bytes.into())
    }

    /// A hash that only who knows the secret can make, or check.
    pub(super) fn mac(&self) -> Hmac<Sha256> {
        Hmac::new_from_slice(&self.0).expect("HMAC takes keys of any length")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Random bytes that nobody can foresee.
pub(super) fn random() -> Result<[u8; 32], BootstrapError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| BootstrapError::NoRandomness { reason: error.to_string() })?;
    Ok(bytes)
}
