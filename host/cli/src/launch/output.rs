//! The output of ranks: whole lines with the number of the rank, copies in files, and the last lines of each rank for the report of a
//! failure.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{iter, thread};

use gradsync_cli::text::shown;

use super::Launch;
use crate::regular;

/// Longer lines are shown in pieces of this number of bytes.
const LONGEST: usize = 64 << 10;
/// The number of lines of a rank that are shown again when it fails.
const LAST: usize = 10;

/// One of the two streams of a rank.
#[derive(Clone, Copy, Debug)]
enum Stream {
    Out,
    Err,
}

/// The reader of one rank's output.
#[derive(Debug)]
pub(super) struct Output {
    last: Arc<Mutex<VecDeque<Vec<u8>>>>,
    /// Disconnected when both streams have ended.
    ended: Receiver<()>,
}

/// The destinations of the lines of one stream.
struct Sink {
    stream: Stream,
    /// The prefix of each line; without it, lines are not shown.
    prefix: Option<String>,
    /// The log file, with its path.
    file: Option<(File, PathBuf)>,
    last: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

/// The destinations of all ranks' lines.
#[derive(Clone, Debug)]
pub(super) struct OutputTargets {
    folder: Option<PathBuf>,
    /// The format of shown lines, if lines are shown.
    shown: Option<Shown>,
}

/// The format of shown lines.
#[derive(Clone, Copy, Debug)]
enum Shown {
    Plain,
    /// With the number of the rank, padded to this number of digits.
    Numbered(usize),
}

impl OutputTargets {
    /// Creates the folder of the files, if the user wants one: after a restart, one for each start.
    pub(super) fn new(launch: &Launch, generation: u32, world_size: usize) -> Result<Self, String> {
        let folder = launch.log_dir.as_deref().map(|folder| match generation {
            0 => folder.to_owned(),
            number => folder.join(format!("restart-{number}")),
        });
        if let Some(folder) = &folder {
            regular::make_folder(folder).map_err(|error| format!("--log-dir {}: {error}", shown(folder)))?;
        }
        let shown = match (launch.quiet, launch.is_plain) {
            (true, _) => None,
            (false, true) => Some(Shown::Plain),
            (false, false) => Some(Shown::Numbered((world_size - 1).to_string().len())),
        };
        Ok(OutputTargets { folder, shown })
    }

    fn sink(&self, rank: usize, stream: Stream, last: &Arc<Mutex<VecDeque<Vec<u8>>>>) -> Result<Sink, String> {
        let prefix = self.shown.map(|shown| match shown {
            Shown::Plain => String::new(),
            Shown::Numbered(width) => format!("[{rank:width$}] "),
        });
        let name = match stream {
            Stream::Out => format!("rank-{rank}.out"),
            Stream::Err => format!("rank-{rank}.err"),
        };
        // The folder may be one to which others can write: what is no regular file is refused before anything is lost.
        let create = |path: PathBuf| {
            let file = regular::open(&path, OpenOptions::new().write(true).create(true));
            let empty = file.and_then(|file| file.set_len(0).map(|()| file));
            empty.map_err(|error| format!("--log-dir: {}: {error}", shown(&path))).map(|file| (file, path))
        };
        let file = self.folder.as_ref().map(|folder| create(folder.join(name))).transpose()?;
        Ok(Sink { stream, prefix, file, last: last.clone() })
    }
}

/// The destinations of a rank's output, created before it starts.
pub(super) struct RankOutput {
    sinks: [Sink; 2],
    last: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl RankOutput {
    pub(super) fn new(targets: &OutputTargets, rank: usize) -> Result<Self, String> {
        let last = Arc::default();
        Ok(RankOutput {
            sinks: [targets.sink(rank, Stream::Out, &last)?, targets.sink(rank, Stream::Err, &last)?],
            last,
        })
    }

    /// Forwards both streams until they end.
    pub(super) fn start(self, out: impl Read + Send + 'static, err: impl Read + Send + 'static) -> io::Result<Output> {
        let (sender, ended) = channel();
        let [to_out, to_err] = self.sinks;
        pass_on(out, to_out, sender.clone())?;
        pass_on(err, to_err, sender)?;
        Ok(Output { last: self.last, ended })
    }
}

fn pass_on(mut stream: impl Read + Send + 'static, mut sink: Sink, ended: Sender<()>) -> io::Result<()> {
    let body = move || {
        let (mut buffer, mut line) = (vec![0; LONGEST], Vec::new());
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => split(&mut line, &buffer[..count], |line| sink.write(line)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !line.is_empty() {
            sink.write(&line);
        }
        drop(ended);
    };
    thread::Builder::new().name("output".into()).spawn(body).map(drop)
}

/// Adds bytes to an unfinished line, and passes each completed line to `give`, without its end. A single carriage return ends a line too,
/// so that a progress bar is shown.
fn split(line: &mut Vec<u8>, bytes: &[u8], mut give: impl FnMut(&[u8])) {
    for &byte in bytes {
        let has_return = line.last() == Some(&b'\r');
        if byte == b'\n' {
            line.truncate(line.len() - usize::from(has_return));
        } else if has_return {
            give(&line[..line.len() - 1]);
            line.clear();
        }
        if byte == b'\n' || line.len() == LONGEST {
            give(line);
            line.clear();
        }
        if byte != b'\n' {
            line.push(byte);
        }
    }
}

impl Sink {
    /// Writes each line by one call, so that lines of ranks do not mix. A reader that has closed the pipe is no failure of the job.
    fn write(&mut self, line: &[u8]) {
        let whole = |prefix: &str| [prefix.as_bytes(), line, b"\n"].concat();
        if let Some((file, path)) = &mut self.file
            && let Err(error) = file.write_all(&whole(""))
        {
            gradsync_cli::messages::say("warning", format_args!("the log file {} ends here: {error}", shown(path)));
            self.file = None;
        }
        if let Some(prefix) = &self.prefix {
            let text = whole(prefix);
            let _ = match self.stream {
                Stream::Out => io::stdout().lock().write_all(&text),
                Stream::Err => io::stderr().lock().write_all(&text),
            };
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == LAST {
            last.pop_front();
        }
        last.push_back(line.to_vec());
    }
}

impl Output {
    /// Waits for the end of both streams, at most for `time`.
    pub(super) fn wait(&self, time: Duration) {
        let end = Instant::now() + time;
        // The channel carries no messages: an error is the end of the streams or of the time.
        let _ = iter::repeat_with(|| self.ended.recv_timeout(end.saturating_duration_since(Instant::now())))
            .find(Result::is_err);
    }

    /// The last lines of the rank, of both streams.
    pub(super) fn last_lines(&self) -> Vec<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> (Vec<String>, Vec<u8>) {
        let (mut rest, mut lines) = (Vec::new(), Vec::new());
        for piece in pieces {
            split(&mut rest, piece, |line| lines.push(String::from_utf8_lossy(line).into_owned()));
        }
        (lines, rest)
    }

    #[test]
    fn split_ends_lines_wherever_reads_end() {
        let (found, rest) = lines(&[b"one\ntw", b"o\r", b"\nthree 1%\rthree 2%\r\n\n", b"four"]);
        assert_eq!(found, ["one", "two", "three 1%", "three 2%", ""]);
        assert_eq!(rest, b"four");
    }

    #[test]
    fn split_gives_a_line_without_an_end_in_pieces() {
        let (found, rest) = lines(&[&vec![b'x'; LONGEST], b"y\nz"]);
        assert_eq!((found.len(), found[0].len(), found[1].as_str(), rest.as_slice()), (2, LONGEST, "y", &b"z"[..]));
    }
}
