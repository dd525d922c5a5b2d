//! Signals that end the program while it writes: it removes its unfinished files first, and reports that.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, mem, ptr, thread};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use super::part;
use crate::text::shown;

/// The signals from outside that end the program and can be caught: from a user, a closed terminal, a batch system, or a limit on CPU time.
const ENDING: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Catches those signals from now on; a write beyond the limit on a file's size becomes an error, like a write to a full disk.
pub(super) fn watch() -> io::Result<()> {
    static IS_WATCHING: Mutex<bool> = Mutex::new(false);
    let mut is_watching = IS_WATCHING.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_watching {
        return Ok(());
    }
    // The flag is unused: with any handler the system lets the write fail.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    // An ignored signal stays ignored: `nohup` and shells that start a program in the background rely on it. A signal that a library
    // handles is left to the library.
    let caught: Vec<i32> = ENDING.into_iter().filter(|&signal| ends_by_default(signal)).collect();
    let is_ending = Arc::new(AtomicBool::new(false));
    for &signal in &caught {
        signal_hook::flag::register_conditional_default(signal, is_ending.clone())?;
    }
    let mut signals = Signals::new(caught)?;
    let wait = move || signals.forever().take(1).for_each(|signal| end(signal, &is_ending));
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    *is_watching = true;
    Ok(())
}

/// Whether a signal has its default action, and that ends the process.
pub fn ends_by_default(signal: i32) -> bool {
    // SAFETY: a `sigaction` of zeros is valid, and without a new action the call only fills it in.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_DFL
    }
}

/// Ends the process by `signal`, so that its parent sees that signal.
fn end(signal: i32, is_ending: &AtomicBool) {
    // The lock is held until the end, so that no file is renamed any more.
    let unfinished = part::unfinished();
    let name = low_level::signal_name(signal).unwrap_or("a signal");
    let remove = |part::Unfinished { part, output }: &part::Unfinished| {
        let outcome = match fs::remove_file(part) {
            Ok(()) => "its unfinished file is removed".to_owned(),
            Err(error) => format!("its unfinished file {} stays: {error}", shown(part)),
        };
        format!("{}: not written, ended by {name}; {outcome}", shown(output))
    };
    let removed: Vec<String> = unfinished.iter().map(remove).collect();
    // The reader of the messages may be slow: another signal ends the process without waiting for it.
    is_ending.store(true, Ordering::SeqCst);
    removed.iter().for_each(crate::messages::complain);
    let _ = low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}
