//! The messages of a program: results to stdout, everything else to stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal as _, Write};

use tracing::level_filters::LevelFilter;

use crate::output::Destination;
use crate::text;

/// Starts logging to stderr, in colours on a terminal, at the level in the variable `GRADSYNC_LOG` (error, warn, info, debug, trace); the
/// default is warnings.
pub fn start_log() {
    let level = std::env::var("GRADSYNC_LOG").ok().and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::WARN);
    let has_colours = io::stderr().is_terminal();
    tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(has_colours).with_max_level(level).init();
}

/// The stream of a command's results.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// The standard output.
    Stdout,
    /// The standard error, where stdout is an output of the command.
    Stderr,
}

impl Listener {
    /// The standard output, unless one of these outputs uses it.
    pub fn beside<'a>(outputs: impl IntoIterator<Item = &'a Destination>) -> Self {
        if outputs.into_iter().any(Destination::is_stdout) { Self::Stderr } else { Self::Stdout }
    }

    /// Writes lines, which may contain foreign text, without control characters.
    pub fn print(self, lines: &str) -> io::Result<()> {
        self.print_by(|writer| writer.write_all(text::printable(lines).as_bytes()))
    }

    /// Lets `work` write text that is safe for a terminal. A reader that has closed the pipe is no failure.
    pub fn print_by(self, work: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let writer: Box<dyn Write> = match self {
            Listener::Stdout => Box::new(io::stdout().lock()),
            Listener::Stderr => Box::new(io::stderr().lock()),
        };
        let mut writer = io::BufWriter::new(writer);
        match work(&mut writer).and_then(|()| writer.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

/// Reports why a command failed.
pub fn complain(reason: impl Display) {
    say("error", reason);
}

/// Writes one line to stderr by one call, since the ranks of a job share a terminal. Write errors are ignored.
pub fn say(kind: &str, message: impl Display) {
    let line = format!("gradsync: {kind}: {message}\n");
    let _ = io::stderr().write_all(text::printable(&line).as_bytes());
}
