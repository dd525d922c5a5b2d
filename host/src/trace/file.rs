//! The file of a rank's trace.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use super::RankTrace;

/// The name of the file with a rank's last calls, in a job of `gradsync launch` or, without a job, of any other launcher.
pub fn file_name(rank: usize, job: Option<&str>) -> String {
    match job {
        Some(job) => format!("rank-{rank}.{job}.json"),
        None => format!("rank-{rank}.json"),
    }
}

/// Writes a file under another name, and renames it.
pub(super) fn save(directory: &Path, trace: &RankTrace) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let text = serde_json::to_vec(trace)?;
    permits(text.len())?;
    let name = file_name(trace.rank, trace.job.as_deref());
    let unfinished = directory.join(format!(".{name}.{}.part", std::process::id()));
    // A killed process with the same id may have left such a file.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&unfinished).and_then(|mut file| file.write_all(&text));
    let renamed = written.and_then(|()| fs::rename(&unfinished, directory.join(name)));
    if renamed.is_err() {
        // The first error is reported.
        let _ = fs::remove_file(&unfinished);
    }
    renamed
}

/// Refuses a file beyond the limit of this process (`ulimit -f`): the system would end the process by SIGXFSZ while it writes.
#[cfg(unix)]
fn permits(len: usize) -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit.filter(|&limit| len as u64 > limit) {
        Some(limit) => {
            let reason = format!("{len} bytes are more than this process may write to a file ({limit}, `ulimit -f`)");
            Err(io::Error::new(io::ErrorKind::FileTooLarge, reason))
        }
        None => Ok(()),
    }
}

#[cfg(not(unix))]
fn permits(_: usize) -> io::Result<()> {
    Ok(())
}
