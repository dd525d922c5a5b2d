//! The PTX in this crate as functions of a device: which file fits it, where an entry point stands in it, and what is added for launches
//! that overlap.
//!
//! An entry point is loaded on its own, when it is first needed or a little before: the driver compiles a few hundred lines of PTX then, in some
//! ten milliseconds, instead of all kernels at once; of the kernels over peers' memory one to three thousand, in up to a quarter of a second. It
//! keeps the result in its cache on disk.

use std::ffi::CString;

use cust::module::{Module, ModuleJitOption};
use cust::sys;
use gradsync_device::abi::{self, Entry};

use super::launch::{self, Argument, EarlyLaunch};
use super::{CudaError, Named};

/// The PTX for one architecture and all later ones, by family of entry points.
type Families = [(&'static str, &'static str)];

macro_rules! families {
    ($arch:literal: $($family:literal)*) => {
        &[$(($family, include_str!(concat!("../../ptx/", $arch, "/", $family, ".ptx")))),*]
    };
}
macro_rules! library {
    ($arch:literal) => {
        families!($arch:
            "accumulate" "accumulate_segments" "all_finite" "cast" "cast_segments" "coefficients" "combine" "combine_pair"
            "dots" "empty" "gram" "gram_cross" "peer_adasum" "peer_barrier" "peer_reduce" "peer_tree" "scale"
            "squared_norms" "sweep" "tree_combine" "tree_dots" "zero" "zero_segments")
    };
}
static SM_75: &Families = library!("sm_75");
static SM_80: &Families = library!("sm_80");

/// The PTX that a device runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    families: &'static Families,
    /// How kernels are launched that wait for the launch before them by themselves.
    early: Option<EarlyLaunch>,
}

impl Library {
    /// The kernels for a compute capability, launched early if the driver and the device (from 9.0 on) can do that.
    pub(super) fn for_capability(major: i32, minor: i32, early: impl FnOnce() -> Option<EarlyLaunch>) -> Option<Self> {
        match (major, minor) {
            (9.., _) => Some(Self { families: SM_80, early: early() }),
            (8, _) => Some(Self { families: SM_80, early: None }),
            (7, 5..) => Some(Self { families: SM_75, early: None }),
            _ => None,
        }
    }

    /// The text of a module that holds one entry point: what stands before the first entry of its file, and its own body. Where launches
    /// are early, every thread waits before anything else: the launch before may still write what it reads, and read what it writes.
    fn source(&self, entry: &Entry) -> Option<String> {
        let (_, text) = self.families.iter().find(|(family, _)| *family == entry.family)?;
        const ENTRY: &str = ".visible .entry ";
        let header = &text[..text.find(ENTRY)?];
        let begin = text.find(&format!("{ENTRY}{}(", entry.name))?;
        let end = text[begin + ENTRY.len()..].find(ENTRY).map_or(text.len(), |next| begin + ENTRY.len() + next);
        let body = &text[begin..end];
        if self.early.is_none() {
            return Some(format!("{header}{body}"));
        }
        let header = header.replace(".version 7.0\n.target sm_80\n", ".version 7.8\n.target sm_90\n");
        let (head, code) = body.split_once("\n{\n")?;
        Some(format!("{header}{head}\n{{\n\tgriddepcontrol.wait;\n{code}"))
    }

    /// Compiles an entry point for the current context's device.
    pub(super) fn load(&self, name: &str) -> Result<Kernel, CudaError> {
        let missing = || CudaError {
            call: format!("kernel {name}"),
            code: cust::error::CudaError::NotFound as u32,
            text: "there is no such entry point".into(),
        };
        let entry = abi::entries().find(|entry| entry.name == name).ok_or_else(missing)?;
        let source = CString::new(self.source(entry).ok_or_else(missing)?).map_err(|_| missing())?;
        let call = format!("cuModuleLoadDataEx of {name}");
        let module = Module::from_ptx_cstr(&source, &[ModuleJitOption::DetermineTargetFromContext]).named(&call)?;
        let function = module.get_function(name).named(&format!("cuModuleGetFunction of {name}"))?.to_raw();
        Ok(Kernel { entry, function, early: self.early, _module: module })
    }
}

/// A loaded entry point.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) entry: &'static Entry,
    function: sys::CUfunction,
    early: Option<EarlyLaunch>,
    /// Owns `function`.
    _module: Module,
}

impl Kernel {
    /// # Safety
    /// See `Queue::launch`; the kernel's context must be current.
    pub(super) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        blocks: u64,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        // SAFETY: this entry point's function, which waits where its launches are early; the rest is the caller's promise.
        unsafe { launch::launch((self.entry, self.function), stream, blocks, arguments, self.early) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_point_can_be_cut_out_of_its_file() {
        for library in [SM_75, SM_80].map(|families| Library { families, early: None }) {
            for entry in abi::entries() {
                let source = library.source(entry).unwrap_or_else(|| panic!("no source of {}", entry.name));
                assert!(source.contains(".version") && source.contains(".target"), "no header: {}", entry.name);
                assert_eq!(source.matches(".visible .entry").count(), 1, "{}", entry.name);
                assert!(source.trim_end().ends_with('}'), "{}", entry.name);
                assert!(!source.contains("griddepcontrol"), "{}", entry.name);
            }
        }
    }

    #[test]
    fn kernels_that_are_launched_early_wait_first() {
        let plain = Library { families: SM_80, early: None };
        let early = Library { families: SM_80, early: Some(EarlyLaunch::never_called()) };
        for entry in abi::entries() {
            let (plain, early) = (plain.source(entry).unwrap(), early.source(entry).unwrap());
            assert!(early.contains("\n.version 7.8\n.target sm_90\n"), "{}", entry.name);
            let body = early.split_once(".visible .entry").unwrap().1.split_once('{').unwrap().1;
            assert!(body.starts_with("\n\tgriddepcontrol.wait;\n"), "{}", entry.name);
            // Nothing else is changed.
            let undone = early
                .replacen("\tgriddepcontrol.wait;\n", "", 1)
                .replacen("7.8", "7.0", 1)
                .replacen("sm_90", "sm_80", 1);
            assert_eq!(undone, plain, "{}", entry.name);
        }
    }

    #[test]
    fn capabilities_choose_their_library() {
        let early = || Some(EarlyLaunch::never_called());
        let library = |major, minor| Library::for_capability(major, minor, early);
        assert!(library(7, 0).is_none());
        for (major, minor, families, is_early) in [
            (7, 5, SM_75, false),
            (8, 0, SM_80, false),
            (8, 9, SM_80, false),
            (9, 0, SM_80, true),
            (12, 0, SM_80, true),
        ] {
            let found = library(major, minor).unwrap();
            assert!(std::ptr::eq(found.families, families), "{major}.{minor}");
            assert_eq!(found.early.is_some(), is_early, "{major}.{minor}");
        }
        assert!(Library::for_capability(9, 0, || None).unwrap().early.is_none());
    }
}
