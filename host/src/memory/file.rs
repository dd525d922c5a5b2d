//! [`MemoryFile`]: memory that other processes of one machine can map, once they have its [`FileHandle`].
//!
//! It allocates such memory, recognises it by its address, and maps the memory of other processes. It never waits; its callers synchronise
//! the accesses.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

/// The size of a large page on x86-64 and most other architectures. Allocations of this size and more use large pages where the system has
/// them: with small pages, touching a workspace for the first time takes longer than reading it, and a transport that copies between
/// processes pins each page.
pub(crate) const LARGE_PAGE: usize = 2 << 20;
/// The size of a file's header, which is a random number. Handles repeat the number, so that a reused descriptor is recognised as another
/// file. The header is one page, so the bytes behind it are aligned for all types.
const HEADER_BYTES: usize = 4096;

/// Zeros in an anonymous file, which cannot be resized, and which only this process's user can open. Dropping it returns its memory to the
/// system, even where other processes still have it mapped; they then read only zeros, also as the number of the handle.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    map: MmapRaw,
    /// The process that created the file. A child of `fork` inherits the mapping, and must not free it.
    process: u32,
}

/// The address of a file for other processes of this machine: the owner's process number and its descriptor there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHandle {
    process: u32,
    descriptor: u32,
    number: u64,
}

/// A file of this process that other processes can find.
#[derive(Debug)]
struct Open {
    handle: FileHandle,
    /// The number of bytes behind the header.
    bytes: usize,
    /// The file of the handle's descriptor.
    file: File,
}

/// The files of this process, by the address of their bytes.
type Files = BTreeMap<usize, Open>;

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
    /// Allocates a file of `bytes` zeros with all pages reserved. Otherwise SIGBUS would end a process that touches a page which the system
    /// cannot provide.
    ///
    /// # Errors
    /// The system's error: too many open files, no memory or address space left, a limit on the length of files, or no support for such
    /// files.
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Self> {
        let (map, open) = Open::create(bytes)?;
        let file = Self { map, process: std::process::id() };
        files().insert(file.bytes().as_ptr().addr(), open);
        Ok(file)
    }

    /// Leaves the memory to the processes that have it mapped, until the last one unmaps it. No other process can map it afterwards.
    pub(crate) fn leave(self) {
        files().remove(&self.bytes().as_ptr().addr());
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = self.behind_header();
        // SAFETY: mapped for as long as this lives; other processes that have it mapped write only within their windows, during an exposure
        // epoch.
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
        let open = files().remove(&self.bytes().as_ptr().addr());
        // A child of `fork` shares the file with its parent, which still uses it.
        if let Some(open) = open.filter(|_| self.process == std::process::id()) {
            open.clear();
        }
    }
}

impl Open {
    fn create(bytes: usize) -> io::Result<(MmapRaw, Self)> {
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|error| io::Error::other(error.to_string()))?;
        let file_bytes = bytes.checked_add(HEADER_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let (file, descriptor) = system::create(file_bytes as u64)?;
        let map = map(&file, file_bytes)?;
        system::reserve(&file, &map)?;
        let handle = FileHandle { process: system::own_number(), descriptor, number: u64::from_ne_bytes(number) };
        // SAFETY: the address is within the header, aligned, and only this function uses it.
        unsafe { map.as_mut_ptr().cast::<u64>().write_volatile(handle.number) };
        Ok((map, Self { handle, bytes, file }))
    }

    /// Returns the memory to the system; other processes that have it mapped read zeros.
    fn clear(&self) {
        if let Err(error) = system::clear(&self.file, (self.bytes + HEADER_BYTES) as u64) {
            tracing::debug!(%error, "memory stays for as long as another process has it mapped");
        }
    }
}

/// Moves the bytes of a whole file to another one, at the same address. Processes that have the old file mapped keep it, and can no longer
/// access this memory. Their concurrent writes may be lost in part.
///
/// # Errors
/// The system's error, or an error if these are not all bytes of a file; then nothing has changed.
///
/// # Safety
/// No other code of this process uses the bytes meanwhile.
pub(crate) unsafe fn revoke(bytes: *mut [u8]) -> io::Result<()> {
    let mut files = files();
    let address = bytes.cast::<u8>().addr();
    let is_whole = files.get(&address).is_some_and(|open| open.bytes == bytes.len());
    if !is_whole {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "only a part of a buffer"));
    }
    // A process without a free descriptor gets memory that other processes cannot map.
    let (map, open) = match Open::create(bytes.len()) {
        Ok((map, open)) => (map, Some(open)),
        Err(error) => {
            tracing::info!(%error, "a buffer is shared no more");
            (MmapOptions::new().len(bytes.len() + HEADER_BYTES).map_anon()?.into(), None)
        }
    };
    // SAFETY: the old mapping has the same length and does not overlap the new one.
    unsafe {
        let to = map.as_mut_ptr().add(HEADER_BYTES);
        std::ptr::copy_nonoverlapping(bytes.cast::<u8>().cast_const(), to, bytes.len());
        system::replace(&map, bytes.cast::<u8>().sub(HEADER_BYTES))?;
    }
    // It has replaced the old mapping, whose owner unmaps the address.
    let _ = ManuallyDrop::new(map);
    let old = match open {
        Some(open) => files.insert(address, open),
        None => files.remove(&address),
    };
    old.iter().for_each(Open::clear);
    Ok(())
}

impl FileHandle {
    /// The number of words of a handle.
    pub(crate) const WORDS: usize = 2;
    /// The handle of no file: no process has the number 0.
    pub(crate) const NONE: Self = Self { process: 0, descriptor: 0, number: 0 };

    /// The handle of the file of this process that begins with these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        let files = files();
        files.get(&bytes.as_ptr().addr()).filter(|open| bytes.len() <= open.bytes).map(|open| open.handle)
    }

    /// Whether the file belongs to this process.
    pub(crate) fn is_own(self) -> bool {
        files().values().any(|open| open.handle == self)
    }

    /// The handle as words for an exchange between ranks.
    pub(crate) fn words(self) -> [u64; Self::WORDS] {
        [u64::from(self.process) << 32 | u64::from(self.descriptor), self.number]
    }

    /// The inverse of [`words`](Self::words).
    pub(crate) fn of_words(words: [u64; Self::WORDS]) -> Self {
        Self { process: (words[0] >> 32) as u32, descriptor: words[0] as u32, number: words[1] }
    }

    /// Maps the memory of the process that created this handle.
    ///
    /// # Errors
    /// The system's error, for example because the process belongs to another user; an error if the process has no such file of at least
    /// `bytes` bytes: it may be a process of another machine.
    pub(crate) fn map(self, bytes: usize) -> io::Result<Mapped> {
        let other = |reason: &str| io::Error::new(io::ErrorKind::NotFound, format!("{reason} of {self:?}"));
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

impl Mapped {
    /// Whether the owner still holds the memory.
    pub(crate) fn has_owner(&self) -> bool {
        // SAFETY: the address is within the header and aligned; the owner wrote the number before it sent the handle.
        unsafe { self.map.as_ptr().cast::<u64>().read_volatile() == self.number }
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.map.len() - HEADER_BYTES
    }

    /// The address of the bytes in this process.
    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(HEADER_BYTES)
    }
}

/// Maps a file, in large pages if it fills one and the system supports them for files of this kind.
fn map(file: &File, bytes: usize) -> io::Result<MmapRaw> {
    let map = MmapOptions::new().len(bytes).map_raw(file)?;
    #[cfg(target_os = "linux")]
    if bytes >= LARGE_PAGE
        && let Err(error) = map.advise(memmap2::Advice::HugePage)
    {
        tracing::debug!(%error, "no large pages");
    }
    Ok(map)
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    use memmap2::MmapRaw;
    use rustix::fs::{
        FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals, fcntl_get_seals,
        fstat, memfd_create,
    };
    use rustix::mm::{MremapFlags, mremap_fixed};
    use rustix::process::{Resource, geteuid, getrlimit};

    const NAME: &str = "gradsync";

    /// The number of this process in the PID namespace of `/proc`, by which other processes find it there. It differs from the own number in
    /// a PID namespace without a `/proc` of its own.
    pub(super) fn own_number() -> u32 {
        let link = std::fs::read_link("/proc/self").ok();
        link.and_then(|link| link.to_str()?.parse().ok()).unwrap_or_else(std::process::id)
    }

    /// Creates a file of `bytes` zeros; returns it with its descriptor in this process.
    pub(super) fn create(bytes: u64) -> io::Result<(File, u32)> {
        // A signal would end a process that writes a longer file than this limit.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes) {
            return Err(rustix::io::Errno::FBIG.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require that files are not executable, and old systems do not know the flag.
        let made = memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(NAME, flags))?;
        let file = File::from(made);
        fchmod(&file, Mode::RUSR | Mode::WUSR)?;
        file.set_len(bytes)?;
        // Truncation of a mapped file would end the processes that map it by a signal.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let descriptor = file.as_raw_fd() as u32;
        Ok((file, descriptor))
    }

    /// Makes the system provide all memory of a file now, or refuse it.
    pub(super) fn reserve(file: &File, map: &MmapRaw) -> io::Result<()> {
        let bytes = map.len() as u64;
        if available().is_some_and(|available| available < bytes) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // Through the mapping, which may have large pages; old systems support only the other call.
        match map.advise(memmap2::Advice::PopulateWrite) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                Ok(fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes)?)
            }
            outcome => outcome,
        }
    }

    /// The memory that the system reports as available. A larger request could make the kernel's out-of-memory killer end processes.
    fn available() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        Some((kib("MemAvailable:")? + kib("SwapFree:")?) << 10)
    }

    /// Returns the memory of a file's first bytes to the system; they are zeros afterwards. Writing zeros would end a process whose limit
    /// of file lengths has been lowered since.
    pub(super) fn clear(file: &File, bytes: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, bytes)?)
    }

    /// Moves a mapping to the address of another one of the same length, which it replaces.
    ///
    /// # Safety
    /// No other code uses either mapping.
    pub(super) unsafe fn replace(map: &MmapRaw, at: *mut u8) -> io::Result<()> {
        let (from, bytes) = (map.as_mut_ptr().cast(), map.len());
        // SAFETY: the caller's promise.
        unsafe { mremap_fixed(from, bytes, bytes, MremapFlags::MAYMOVE, at.cast()) }?;
        Ok(())
    }

    /// Opens a file of another process, if it is of this kind and belongs to this user. Opening any other file could have side effects, and
    /// the process number may denote an unrelated process, as when the handle comes from another machine.
    pub(super) fn open(process: u32, descriptor: u32) -> io::Result<Option<File>> {
        let path = format!("/proc/{process}/fd/{descriptor}");
        let target = std::fs::read_link(&path)?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return Ok(None);
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let is_own = fstat(&file)?.st_uid == geteuid().as_raw();
        let is_sealed = || fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        Ok((is_own && is_sealed()).then_some(file))
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;

    use memmap2::MmapRaw;

    pub(super) fn own_number() -> u32 {
        std::process::id()
    }

    pub(super) fn create(_: u64) -> io::Result<(File, u32)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn clear(_: &File, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn reserve(_: &File, _: &MmapRaw) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) unsafe fn replace(_: &MmapRaw, _: *mut u8) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn open(_: u32, _: u32) -> io::Result<Option<File>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_file_shows_one_process_the_writes_of_another() {
        for bytes in [0, 1, 4096, 3 << 20] {
            let mut file = MemoryFile::zeroed(bytes).unwrap();
            assert_eq!(file.bytes().len(), bytes);
            assert!(file.bytes().iter().all(|&byte| byte == 0));
            let handle = FileHandle::of(file.bytes()).expect("a file");
            assert_eq!(handle, FileHandle::of_words(handle.words()));
            assert!(handle.is_own());
            let other = handle.map(bytes).unwrap();
            file.bytes_mut().fill(7);
            // SAFETY: no process writes now.
            assert!(unsafe { std::slice::from_raw_parts(other.start(), bytes) }.iter().all(|&byte| byte == 7));
            assert!(other.has_owner());
            drop(file);
            assert!(!other.has_owner() && !handle.is_own());
            // SAFETY: as above; the address is still mapped.
            assert!(unsafe { std::slice::from_raw_parts(other.start(), bytes) }.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn map_finds_nothing_by_a_handle_of_something_else() {
        let file = MemoryFile::zeroed(100).unwrap();
        let handle = FileHandle::of(file.bytes()).expect("a file");
        let stranger = std::fs::File::open("/proc/self/status").unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&stranger) as u32;
        for (wrong, bytes, reason) in [
            (handle, 101, "another length"),
            (FileHandle { number: handle.number ^ 1, ..handle }, 100, "another number"),
            (FileHandle { descriptor, ..handle }, 100, "not the kind"),
        ] {
            let error = wrong.map(bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
            assert!(error.to_string().contains(reason), "{error}");
        }
        assert!(FileHandle { process: u32::MAX, ..handle }.map(100).is_err());
        drop(file);
        assert!(handle.map(100).is_err());
    }

    #[test]
    fn file_handle_is_of_shared_memory_alone() {
        let file = MemoryFile::zeroed(100).unwrap();
        let behind = vec![0; 101];
        assert_eq!(FileHandle::of(&behind), None);
        assert_eq!(FileHandle::of(&file.bytes()[1..]), None, "it does not begin there");
        assert!(FileHandle::of(&file.bytes()[..99]).is_some());
        let handle = FileHandle::of(file.bytes());
        drop(file);
        let next = MemoryFile::zeroed(100).unwrap();
        assert_ne!(FileHandle::of(next.bytes()), handle, "wherever the next one lies");
    }

    #[test]
    fn zeroed_refuses_more_than_there_is_room_for() {
        assert!(MemoryFile::zeroed(usize::MAX).is_err());
        assert!(MemoryFile::zeroed(1 << 62).is_err());
        // There is enough address space, but not enough memory: touching it would make the system end processes.
        assert!(MemoryFile::zeroed(1 << 45).is_err());
    }

    /// The resident pages of a mapping, in KiB.
    fn resident_kib(start: *const u8) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{:x}-", start.addr())));
        let line = lines.find_map(|line| line.strip_prefix("Rss:")).expect("a mapping");
        line.trim().trim_end_matches("kB").trim().parse().unwrap()
    }

    #[test]
    fn zeroed_reserves_all_memory_at_once() {
        let file = MemoryFile::zeroed(1 << 20).unwrap();
        assert!(resident_kib(file.bytes().as_ptr().wrapping_sub(HEADER_BYTES)) >= 1 << 10);
    }

    #[test]
    fn revoke_moves_the_memory_and_leaves_others_the_old_one() {
        let mut file = MemoryFile::zeroed(3 << 20).unwrap();
        file.bytes_mut().fill(7);
        let handle = FileHandle::of(file.bytes()).expect("a file");
        let other = handle.map(3 << 20).unwrap();
        // SAFETY: no other code uses the bytes.
        unsafe { revoke(file.bytes_mut()) }.unwrap();
        assert!(file.bytes().iter().all(|&byte| byte == 7));
        assert!(!other.has_owner() && !handle.is_own() && handle.map(3 << 20).is_err());
        // SAFETY: still mapped, and no other code uses the bytes.
        unsafe { other.start().write_bytes(9, 3 << 20) };
        assert!(file.bytes().iter().all(|&byte| byte == 7));
        let next = FileHandle::of(file.bytes()).expect("another file").map(3 << 20).unwrap();
        file.bytes_mut()[5] = 8;
        // SAFETY: no process writes now.
        assert_eq!(unsafe { next.start().add(5).read() }, 8);
        // SAFETY: a part of a file's memory, which no other code uses.
        assert!(unsafe { revoke(&raw mut file.bytes_mut()[1..]) }.is_err());
        drop(file);
        assert!(!next.has_owner());
    }

    #[test]
    fn map_refuses_what_a_stranger_could_change() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::{FileExt, PermissionsExt};
        let file = MemoryFile::zeroed(100).unwrap();
        let handle = FileHandle::of(file.bytes()).expect("a file");
        let mode = system::open(handle.process, handle.descriptor).unwrap().unwrap().metadata().unwrap();
        assert_eq!(mode.permissions().mode() & 0o7777, 0o600);
        // A file that differs only in its seals.
        let stranger = rustix::fs::memfd_create("gradsync", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let stranger = std::fs::File::from(stranger);
        stranger.set_len(100 + HEADER_BYTES as u64).unwrap();
        stranger.write_all_at(&handle.number.to_ne_bytes(), 0).unwrap();
        let error = FileHandle { descriptor: stranger.as_raw_fd() as u32, ..handle }.map(100).unwrap_err();
        assert!(error.to_string().contains("not the kind"), "{error}");
    }
}
