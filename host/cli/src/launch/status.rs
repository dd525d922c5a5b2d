//! The end of a rank, as text and as an exit status.

use std::fmt;

use rustix::process::WaitIdStatus;

/// The offset of the exit status of a process that a signal ended, as in shells: 128 plus the signal's number.
const SIGNAL: i32 = 128;

/// The exit code of a program whose main thread has panicked.
pub(super) const PANIC: u8 = 101;

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Code(i32),
    Signal { number: i32, has_core: bool },
}

impl From<WaitIdStatus> for Status {
    fn from(status: WaitIdStatus) -> Self {
        match status.terminating_signal() {
            Some(number) => Status::Signal { number, has_core: status.dumped() },
            None => Status::Code(status.exit_status().unwrap_or(1)),
        }
    }
}

impl Status {
    pub(super) fn is_success(self) -> bool {
        self == Status::Code(0)
    }

    /// The exit status that the launcher returns for it.
    pub(super) fn code(self) -> u8 {
        let code = match self {
            Status::Code(code) => code,
            Status::Signal { number, .. } => SIGNAL + number,
        };
        // A failure is never reported as success.
        u8::try_from(code & 0xff).ok().filter(|code| *code != 0 || self.is_success()).unwrap_or(1)
    }
}

/// The name of a signal.
pub(super) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Status::Code(code) => write!(f, "ended with exit code {code}"),
            Status::Signal { number, has_core } => {
                write!(f, "was ended by {}", name(number))?;
                if number == libc::SIGKILL {
                    f.write_str(", perhaps because memory ran out")?;
                }
                if has_core { f.write_str(" (core dumped)") } else { Ok(()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_passes_a_failure_on_and_never_as_success() {
        let killed = Status::Signal { number: libc::SIGTERM, has_core: false };
        assert_eq!([Status::Code(0), Status::Code(3), killed].map(Status::code), [0, 3, 143]);
        assert_eq!(Status::Code(256).code(), 1);
        assert_eq!(killed.to_string(), "was ended by SIGTERM");
    }
}
