//! The primitives of Noise, for `snow`: X25519 by `curve25519-dalek`, AES-256-GCM by `aes-gcm`, SHA-256 by `sha2`, and the system's random
//! numbers. The ciphers that `snow` has of its own are older versions, which use fewer of the processor's instructions: they take three to
//! six times as long, and would slow down data between machines.

use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes256Gcm, Nonce, Tag};
use curve25519_dalek::MontgomeryPoint;
use sha2::{Digest, Sha256};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};

/// The length of a key.
pub(super) const KEY: usize = 32;
/// The length of a message's authentication tag.
pub(super) const TAG: usize = 16;

pub(super) struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(System))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        (*choice == DHChoice::Curve25519).then(|| Box::<X25519>::default() as _)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        (*choice == HashChoice::SHA256).then(|| Box::<Sha>::default() as _)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        (*choice == CipherChoice::AESGCM).then(|| Box::<AesGcm>::default() as _)
    }
}

/// HMAC-SHA256 (RFC 2104).
pub(super) fn hmac(key: &[u8; KEY], data: &[u8]) -> [u8; KEY] {
    let mut code = [0; KEY];
    Sha::default().hmac(key, data, &mut code);
    code
}

struct System;

impl Random for System {
    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), snow::Error> {
        getrandom::fill(bytes).map_err(|_| snow::Error::Rng)
    }
}

#[derive(Default)]
struct X25519 {
    private: [u8; KEY],
    public: [u8; KEY],
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        KEY
    }

    fn priv_len(&self) -> usize {
        KEY
    }

    fn set(&mut self, private: &[u8]) {
        self.private.copy_from_slice(private);
        self.public = MontgomeryPoint::mul_base_clamped(self.private).to_bytes();
    }

    fn generate(&mut self, random: &mut dyn Random) -> Result<(), snow::Error> {
        let mut private = [0; KEY];
        random.try_fill_bytes(&mut private)?;
        self.set(&private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &self.private
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        // Noise passes buffers with room for the longest keys of all its curves.
        let theirs = public.first_chunk().ok_or(snow::Error::Dh)?;
        out[..KEY].copy_from_slice(MontgomeryPoint(*theirs).mul_clamped(self.private).as_bytes());
        Ok(())
    }
}

#[derive(Default)]
struct Sha(Sha256);

impl Hash for Sha {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn input(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(&self.0.finalize_reset());
    }
}

#[derive(Default)]
struct AesGcm(Option<Aes256Gcm>);

impl AesGcm {
    fn keyed(&self) -> &Aes256Gcm {
        self.0.as_ref().expect("Noise sets a key before it uses the cipher")
    }
}

/// The nonce of a message: four zeros, and its number, big-endian (the Noise Protocol Framework, 12.4).
fn nonce(number: u64) -> Nonce<aes_gcm::aead::consts::U12> {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    nonce.into()
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0 = Some(Aes256Gcm::new(&(*key).into()));
    }

    fn encrypt(&self, number: u64, associated: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let (content, tag) = out[..plaintext.len() + TAG].split_at_mut(plaintext.len());
        let buffer = InOutBuf::new(plaintext, content).expect("equal lengths");
        let outcome = self.keyed().encrypt_inout_detached(&nonce(number), associated, buffer);
        tag.copy_from_slice(&outcome.expect("a message of Noise is shorter than the limit of GCM"));
        plaintext.len() + TAG
    }

    fn decrypt(&self, number: u64, associated: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<usize, snow::Error> {
        let (content, tag) = ciphertext.split_last_chunk::<TAG>().ok_or(snow::Error::Decrypt)?;
        let buffer = InOutBuf::new(content, &mut out[..content.len()]).expect("equal lengths");
        let outcome = self.keyed().decrypt_inout_detached(&nonce(number), associated, buffer, &Tag::from(*tag));
        outcome.map(|()| content.len()).map_err(|_| snow::Error::Decrypt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<const LEN: usize>(digits: &str) -> [u8; LEN] {
        assert_eq!(digits.len(), 2 * LEN);
        std::array::from_fn(|index| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap())
    }

    /// RFC 7748, 6.1.
    #[test]
    fn x25519_gives_the_published_keys() {
        let mut bob = X25519::default();
        bob.set(&bytes::<KEY>("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"));
        assert_eq!(bob.pubkey(), bytes::<KEY>("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"));
        let alice = bytes::<KEY>("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a");
        let mut shared = [0; KEY];
        bob.dh(&alice, &mut shared).unwrap();
        assert_eq!(shared, bytes("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"));
    }

    /// RFC 4231, 4.3, whose key is shorter, and filled up with zeros here as HMAC does.
    #[test]
    fn hmac_gives_the_published_codes() {
        let mut key = [0; KEY];
        key[..4].copy_from_slice(b"Jefe");
        let code = bytes("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        assert_eq!(hmac(&key, b"what do ya want for nothing?"), code);
    }

    #[test]
    fn aes_gcm_gives_the_published_ciphertexts() {
        // Test case 14 of the specification of GCM: a zero key, a zero nonce, one block of zeros.
        let mut cipher = AesGcm::default();
        cipher.set(&[0; 32]);
        let mut out = [0; 32];
        assert_eq!(cipher.encrypt(0, &[], &[0; 16], &mut out), 32);
        assert_eq!(out, bytes("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"));
        let mut plaintext = [1; 16];
        assert_eq!(cipher.decrypt(0, &[], &out, &mut plaintext), Ok(16));
        assert_eq!(plaintext, [0; 16]);
        for (number, associated, length) in [(1, &b""[..], 32), (0, b"x", 32), (0, b"", 31), (0, b"", 15)] {
            assert_eq!(cipher.decrypt(number, associated, &out[..length], &mut plaintext), Err(snow::Error::Decrypt));
        }
    }
}
