//! Reading the memory of another process of this machine, with one copy: Linux's `process_vm_readv`. The system permits it among the
//! processes of one user, unless the machine forbids processes to inspect each other (Yama's `ptrace_scope`, or a container's system call
//! filter).

use std::io;

/// Copies up to `bytes` bytes at `address` of a process. Returns the number of copied bytes.
///
/// # Errors
/// The system's error: for example, the process has ended, or has no memory at the address.
///
/// # Safety
/// `to` points to `bytes` bytes, which nothing else uses.
#[cfg(target_os = "linux")]
pub(in crate::comm) unsafe fn read(process: u32, address: u64, to: *mut u8, bytes: usize) -> io::Result<usize> {
    let local = libc::iovec { iov_base: to.cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: bytes };
    // SAFETY: writes at most so many bytes to this process's memory, which is the caller's promise; the other process's is only read.
    let copied = unsafe { libc::process_vm_readv(process as libc::pid_t, &local, 1, &remote, 1, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// The call for systems without `process_vm_readv`.
///
/// # Errors
/// Always [`io::ErrorKind::Unsupported`].
///
/// # Safety
/// As on Linux.
#[cfg(not(target_os = "linux"))]
pub(in crate::comm) unsafe fn read(_: u32, _: u64, _: *mut u8, _: usize) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// A random number at a known address, by which other processes test whether they can read this process's memory.
#[derive(Debug)]
pub(in crate::comm) struct Probe(Box<u64>);

impl Probe {
    /// The number of words that describe a probe.
    pub(in crate::comm) const WORDS: usize = 3;

    /// # Errors
    /// The system returned no random bytes.
    pub(in crate::comm) fn new() -> io::Result<Self> {
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self(Box::new(u64::from_ne_bytes(number))))
    }

    /// The number of this process, and the probe's address and value.
    pub(in crate::comm) fn words(&self) -> [u64; Self::WORDS] {
        [std::process::id().into(), (&raw const *self.0).expose_provenance() as u64, *self.0]
    }

    /// Whether this process can read the number of another process's probe.
    pub(in crate::comm) fn is_readable([process, address, number]: [u64; Self::WORDS]) -> bool {
        let mut found = 0u64;
        // SAFETY: room for a number.
        let outcome = unsafe { read(process as u32, address, (&raw mut found).cast(), size_of::<u64>()) };
        outcome.is_ok_and(|bytes| bytes == size_of::<u64>()) && found == number
    }
}

/// The processes of the ranks of a group, each of which can read the memory of all.
#[derive(Debug)]
pub(super) struct Processes(Vec<u32>);

impl Processes {
    /// The processes with these probes, by rank; `None` if this process, which has rank `own`, cannot read the memory of another.
    pub(super) fn with_probes(probes: &[u64], own: usize) -> Option<Self> {
        let probes: Vec<[u64; Probe::WORDS]> =
            probes.chunks_exact(Probe::WORDS).map(|words| words.try_into().expect("as many as it has")).collect();
        let is_readable = |(rank, &probe): (usize, &_)| rank == own || Probe::is_readable(probe);
        let all = probes.iter().enumerate().all(is_readable);
        all.then(|| Self(probes.iter().map(|&[process, ..]| process as u32).collect()))
    }

    /// Copies `bytes` bytes at an address of a rank. Any thread may call this.
    ///
    /// # Errors
    /// The system's error: the process has ended, or its memory at the address cannot be read.
    ///
    /// # Safety
    /// `to` points to `bytes` bytes, which nothing else uses.
    pub(super) unsafe fn read(&self, rank: usize, address: u64, to: *mut u8, bytes: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            // SAFETY: the caller's promise.
            match unsafe { read(self.0[rank], address + done as u64, to.add(done), bytes - done) }? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                copied => done += copied,
            }
        }
        Ok(())
    }
}
