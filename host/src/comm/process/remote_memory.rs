//! Reading the memory of another process of this machine, with one copy: Linux's `process_vm_readv`. The system permits it among the processes of one
//! user, unless the machine forbids processes to look at each other (Yama's `ptrace_scope`, or a container's rules for system calls).

use std::io;

/// Copies `bytes` bytes at `address` of a process, or fewer; returns how many.
///
/// # Errors
/// The system's: for example that there is no such process any more, or that it has no memory there.
///
/// # Safety
/// `to` has room for so many bytes, which nothing else uses.
#[cfg(target_os = "linux")]
pub(super) unsafe fn read(process: u32, address: u64, to: *mut u8, bytes: usize) -> io::Result<usize> {
    let local = libc::iovec { iov_base: to.cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: bytes };
    // SAFETY: writes at most so many bytes to this process's memory, which is the caller's promise; the other process's is only read.
    let copied = unsafe { libc::process_vm_readv(process as libc::pid_t, &local, 1, &remote, 1, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// No other system has it.
///
/// # Errors
/// Always.
///
/// # Safety
/// As on Linux.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn read(_: u32, _: u64, _: *mut u8, _: usize) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// A number at an address that other processes can be told, to try whether they read it.
#[derive(Debug)]
pub(super) struct Probe(Box<u64>);

impl Probe {
    /// # Errors
    /// The system has no random bytes.
    pub(super) fn new() -> io::Result<Self> {
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self(Box::new(u64::from_ne_bytes(number))))
    }

    /// This process, and the probe's address and number.
    pub(super) fn words(&self) -> [u64; 3] {
        [std::process::id().into(), (&raw const *self.0).expose_provenance() as u64, *self.0]
    }

    /// Whether this process reads the number that another has told.
    pub(super) fn is_readable([process, address, number]: [u64; 3]) -> bool {
        let mut found = 0u64;
        // SAFETY: room for a number.
        let outcome = unsafe { read(process as u32, address, (&raw mut found).cast(), size_of::<u64>()) };
        outcome.is_ok_and(|bytes| bytes == size_of::<u64>()) && found == number
    }
}
