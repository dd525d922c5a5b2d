//! Signals that end the program while it writes: its unfinished files go first, and it says so.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, mem, ptr, thread};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use super::part;
use crate::text::shown;

/// What would end the program, other than its own faults and what nobody can catch: a user, a terminal that is gone, a batch system, a limit on
/// the time of the processor.
const ENDING: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Catches those signals from now on; a write beyond the limit on a file's size becomes an error, as one to a full disk is.
pub(super) fn watch() -> io::Result<()> {
    static IS_WATCHING: Mutex<bool> = Mutex::new(false);
    let mut is_watching = IS_WATCHING.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_watching {
        return Ok(());
    }
    // The flag is nothing to anybody: with any handler at all the system lets the write fail.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    // What is ignored stays ignored: `nohup` and shells that start a program in the background count on it. What a library waits
    // for is its own.
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

/// Whether a signal would do what it does by default.
pub fn ends_by_default(signal: i32) -> bool {
    // SAFETY: a `sigaction` of zeros is valid, and without a new action the call only fills it in.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_DFL
    }
}

/// Ends the process by `signal`, as its parent shall see it.
fn end(signal: i32, is_ending: &AtomicBool) {
    // Held until the end: no file gets its name any more.
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
    // Nobody may read the messages: another signal does not wait for that.
    is_ending.store(true, Ordering::SeqCst);
    removed.iter().for_each(crate::messages::complain);
    let _ = low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}
