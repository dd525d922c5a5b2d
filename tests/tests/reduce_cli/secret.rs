//! `gradsync secret` prints a secret, and a different one each time.

use std::process::Command;

use gradsync::bootstrap::Secret;

use crate::program::{Finished, binary};

#[test]
fn it_prints_a_fresh_secret() {
    let print = || Finished::of(Command::new(binary()).arg("secret")).succeeded("secret").stdout;
    let (one, other) = (print(), print());
    assert_ne!(one, other);
    for line in [one, other] {
        let secret: Secret = line.parse().unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(secret.reveal() + "\n", line);
    }
}
