//! [`MemoryFile`]: memory that other processes of one machine can map, once they have its [`Ticket`].
//!
//! It gives out memory, knows which is of that kind, and finds that of others. It never waits for anybody, and does not know who uses what lies
//! in it, or when.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

/// A large page of x86-64 and most others. Memory of so many bytes and more comes from the system in such pages, where it has them: in small
/// ones, touching a workspace for the first time takes longer than reading it, and a transport that copies between processes pins each.
pub(crate) const LARGE_PAGE: usize = 2 << 20;
/// What stands in front of a file's bytes: the number that a ticket names, so that nobody takes another file for the one that was meant.
/// A page, which leaves the bytes behind it aligned for everything.
const HEADER_BYTES: usize = 4096;

/// Zeros in a file without a name, which nobody can resize. Its memory is the system's again when this is dropped, even where others still
/// have it mapped; they find nothing but zeros then, the number of the ticket included.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    map: MmapRaw,
    ticket: Ticket,
    /// What the ticket's descriptor stands for.
    file: File,
}

/// Where other processes of this machine find a file: which process has it, as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    process: u32,
    descriptor: u32,
    number: u64,
}

/// The tickets of the files that this process has, and their bytes, by the address of the first.
type Files = BTreeMap<usize, (Ticket, usize)>;

fn files() -> MutexGuard<'static, Files> {
    static FILES: Mutex<Files> = Mutex::new(Files::new());
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file of another process, which stays mapped even if that process ends.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: MmapRaw,
    number: u64,
}

impl MemoryFile {
    /// So many zeros.
    ///
    /// # Errors
    /// What the system says: too many open files, no address space left, or that it knows no such files.
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Self> {
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|error| io::Error::other(error.to_string()))?;
        let file_bytes = bytes.checked_add(HEADER_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let (file, descriptor) = system::create(file_bytes as u64)?;
        let map = map(&file, file_bytes)?;
        let ticket = Ticket { process: std::process::id(), descriptor, number: u64::from_ne_bytes(number) };
        let file = Self { map, ticket, file };
        file.set_number(ticket.number);
        files().insert(file.bytes().as_ptr().addr(), (ticket, bytes));
        Ok(file)
    }

    /// Writes what others look for in front.
    fn set_number(&self, number: u64) {
        // SAFETY: within the header, aligned; others only read it.
        unsafe { self.map.as_mut_ptr().cast::<u64>().write_volatile(number) };
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = self.behind_header();
        // SAFETY: mapped for as long as this lives; processes that have it mapped too write only what they were lent.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, len) = self.behind_header();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    fn behind_header(&self) -> (*mut u8, usize) {
        (self.map.as_mut_ptr().wrapping_add(HEADER_BYTES), self.map.len() - HEADER_BYTES)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        files().remove(&self.bytes().as_ptr().addr());
        // A child of `fork` has the file in common with its parent, who goes on.
        if self.ticket.process != std::process::id() {
            return;
        }
        self.set_number(0);
        if let Err(error) = system::clear(&self.file, self.map.len() as u64) {
            tracing::debug!(%error, "memory stays for as long as another process has it mapped");
        }
    }
}

#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "processes meet over MPI"))]
impl Ticket {
    /// How many words a ticket is.
    pub(crate) const WORDS: usize = 2;
    /// Stands for none: no process has this number.
    pub(crate) const NONE: Self = Self { process: 0, descriptor: 0, number: 0 };

    /// That of the file of this process which begins with these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        let files = files();
        files.get(&bytes.as_ptr().addr()).filter(|&&(_, len)| bytes.len() <= len).map(|&(ticket, _)| ticket)
    }

    /// Whether this process has its file.
    pub(crate) fn is_own(self) -> bool {
        files().values().any(|&(ticket, _)| ticket == self)
    }

    /// As it travels.
    pub(crate) fn words(self) -> [u64; Self::WORDS] {
        [u64::from(self.process) << 32 | u64::from(self.descriptor), self.number]
    }

    /// What [`words`](Self::words) made words of.
    pub(crate) fn of_words(words: [u64; Self::WORDS]) -> Self {
        Self { process: (words[0] >> 32) as u32, descriptor: words[0] as u32, number: words[1] }
    }

    /// Maps the memory of the process that has given this ticket.
    ///
    /// # Errors
    /// What the system says, as that the process is another user's; and that no file of it is the one that was meant, which has at least so
    /// many bytes: the process may be one of another machine.
    pub(crate) fn map(self, bytes: usize) -> io::Result<Mapped> {
        let other = |what: &str| io::Error::new(io::ErrorKind::NotFound, format!("{what} of {self:?}"));
        let file = system::open(self.process, self.descriptor)?.ok_or_else(|| other("not the kind of file"))?;
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| other("another length than that"))?;
        if bytes.checked_add(HEADER_BYTES).is_none_or(|least| len < least) {
            return Err(other("another length than that"));
        }
        let map = map(&file, len)?;
        let mapped = Mapped { map, number: self.number };
        if mapped.has_owner() { Ok(mapped) } else { Err(other("another number than that")) }
    }
}

#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "processes meet over MPI"))]
impl Mapped {
    /// Whether the memory is still what it was: its owner has not dropped it.
    pub(crate) fn has_owner(&self) -> bool {
        // SAFETY: within the header, aligned; its owner has written it before it gave the ticket away.
        unsafe { self.map.as_ptr().cast::<u64>().read_volatile() == self.number }
    }

    /// Where the bytes begin, in this process.
    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(HEADER_BYTES)
    }
}

/// Maps a file, in large pages if it fills one and the system has such for files of this kind.
fn map(file: &File, bytes: usize) -> io::Result<MmapRaw> {
    let map = MmapOptions::new().len(bytes).map_raw(file)?;
    #[cfg(target_os = "linux")]
    if bytes >= LARGE_PAGE {
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no large pages");
        }
    }
    Ok(map)
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::os::fd::AsRawFd;

    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};

    const NAME: &str = "gradsync";

    /// A file of so many zeros, and its number in this process.
    pub(super) fn create(bytes: u64) -> io::Result<(File, u32)> {
        let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(bytes)?;
        // Who maps a file that somebody cuts off dies by a signal.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let descriptor = file.as_raw_fd() as u32;
        Ok((file, descriptor))
    }

    /// Gives the memory of a file's first bytes back.
    pub(super) fn clear(file: &File, bytes: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, bytes)?)
    }

    /// A file of another process, if it is of this kind: to open anything else could have effects of its own.
    pub(super) fn open(process: u32, descriptor: u32) -> io::Result<Option<File>> {
        let path = format!("/proc/{process}/fd/{descriptor}");
        let target = std::fs::read_link(&path)?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return Ok(None);
        }
        OpenOptions::new().read(true).write(true).open(path).map(Some)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;

    pub(super) fn create(_: u64) -> io::Result<(File, u32)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn clear(_: &File, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn open(_: u32, _: u32) -> io::Result<Option<File>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux", feature = "mpi"))]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_other_reads() {
        for bytes in [0, 1, 4096, 3 << 20] {
            let mut file = MemoryFile::zeroed(bytes).unwrap();
            assert_eq!(file.bytes().len(), bytes);
            assert!(file.bytes().iter().all(|&byte| byte == 0));
            let ticket = Ticket::of(file.bytes()).expect("a file");
            assert_eq!(ticket, Ticket::of_words(ticket.words()));
            assert!(ticket.is_own());
            let other = ticket.map(bytes).unwrap();
            file.bytes_mut().fill(7);
            // SAFETY: nobody writes now.
            assert!(unsafe { std::slice::from_raw_parts(other.start(), bytes) }.iter().all(|&byte| byte == 7));
            assert!(other.has_owner());
            drop(file);
            assert!(!other.has_owner() && !ticket.is_own());
            // SAFETY: as above; the address is mapped still.
            assert!(unsafe { std::slice::from_raw_parts(other.start(), bytes) }.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_ticket_of_something_else_finds_nothing() {
        let file = MemoryFile::zeroed(100).unwrap();
        let ticket = Ticket::of(file.bytes()).expect("a file");
        let stranger = std::fs::File::open("/proc/self/status").unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&stranger) as u32;
        for (wrong, bytes, what) in [
            (ticket, 101, "another length"),
            (Ticket { number: ticket.number ^ 1, ..ticket }, 100, "another number"),
            (Ticket { descriptor, ..ticket }, 100, "not the kind"),
        ] {
            let error = wrong.map(bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
            assert!(error.to_string().contains(what), "{error}");
        }
        assert!(Ticket { process: u32::MAX, ..ticket }.map(100).is_err());
        drop(file);
        assert!(ticket.map(100).is_err());
    }

    #[test]
    fn memory_of_other_kinds_has_no_ticket() {
        let file = MemoryFile::zeroed(100).unwrap();
        let behind = vec![0; 101];
        assert_eq!(Ticket::of(&behind), None);
        assert_eq!(Ticket::of(&file.bytes()[1..]), None, "it does not begin there");
        assert!(Ticket::of(&file.bytes()[..99]).is_some());
        let ticket = Ticket::of(file.bytes());
        drop(file);
        let next = MemoryFile::zeroed(100).unwrap();
        assert_ne!(Ticket::of(next.bytes()), ticket, "wherever the next one lies");
    }

    #[test]
    fn more_than_there_is_room_for_is_refused() {
        assert!(MemoryFile::zeroed(usize::MAX).is_err());
        assert!(MemoryFile::zeroed(1 << 62).is_err());
    }
}
