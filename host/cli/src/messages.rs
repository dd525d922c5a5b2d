//! What a program says: results to stdout, everything else to stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use tracing::level_filters::LevelFilter;

use crate::output::Destination;
use crate::text;

/// Logs to stderr, at the level that the variable `GRADSYNC_LOG` names (error, warn, info, debug, trace); warnings, if it names none.
pub fn start_log() {
    let level = std::env::var("GRADSYNC_LOG").ok().and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::WARN);
    tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).init();
}

/// Where a command tells its results.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// The standard output.
    Stdout,
    /// The standard error, where stdout has been given to a file that the command makes.
    Stderr,
}

impl Listener {
    /// The standard output, unless one of these outputs has taken it.
    pub fn beside<'a>(outputs: impl IntoIterator<Item = &'a Destination>) -> Self {
        if outputs.into_iter().any(Destination::is_stdout) { Self::Stderr } else { Self::Stdout }
    }

    /// Writes lines, of which foreign texts are part.
    pub fn print(self, lines: &str) -> io::Result<()> {
        self.print_by(|writer| writer.write_all(text::printable(lines).as_bytes()))
    }

    /// Has `work` write what is fit for a terminal. A reader that has seen enough and closed the pipe is no failure.
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

/// Says why a command failed.
pub fn complain(reason: impl Display) {
    say("error", reason);
}

/// Writes one line to stderr at once: the ranks of a job share a terminal. Errors of writing are ignored.
pub fn say(kind: &str, what: impl Display) {
    let line = format!("gradsync: {kind}: {what}\n");
    let _ = io::stderr().write_all(text::printable(&line).as_bytes());
}
