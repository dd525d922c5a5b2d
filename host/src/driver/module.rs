//! The PTX in this crate as functions of a device: which file fits it, where an entry point stands in it, and launches.
//!
//! An entry point is loaded on its own when it is first needed: the driver compiles a few hundred lines of PTX then, in some ten
//! milliseconds, instead of all kernels at once. It keeps the result in its cache on disk.

use std::ffi::{CString, c_void};

use cust::module::{Module, ModuleJitOption};
use cust::sys;
use gradsync_device::abi::{self, Entry, Param};

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
            "dots" "empty" "gram" "gram_cross" "peer_barrier" "peer_coefficients" "peer_combine" "peer_gram" "peer_reduce" "scale"
            "squared_norms" "sum_partials" "sweep" "tree_combine" "tree_dots" "zero" "zero_segments")
    };
}
static SM_75: &Families = library!("sm_75");
static SM_80: &Families = library!("sm_80");

/// The PTX that a device runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    families: &'static Families,
}

impl Library {
    pub(super) fn for_capability(major: i32, minor: i32) -> Option<Self> {
        match (major, minor) {
            (8.., _) => Some(Self { families: SM_80 }),
            (7, 5..) => Some(Self { families: SM_75 }),
            _ => None,
        }
    }

    /// The text of a module that holds one entry point: what stands before the first entry of its file, and its own body.
    fn source(&self, entry: &Entry) -> Option<String> {
        let (_, text) = self.families.iter().find(|(family, _)| *family == entry.family)?;
        const ENTRY: &str = ".visible .entry ";
        let header = &text[..text.find(ENTRY)?];
        let begin = text.find(&format!("{ENTRY}{}(", entry.name))?;
        let end = text[begin + ENTRY.len()..].find(ENTRY).map_or(text.len(), |next| begin + ENTRY.len() + next);
        Some(format!("{header}{}", &text[begin..end]))
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
        Ok(Kernel { entry, function, _module: module })
    }
}

/// A kernel parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    Pointer(u64),
    U64(u64),
    F64(f64),
}

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Argument::U64(value)
    }
}

impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Argument::F64(value)
    }
}

impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Argument::U64(value as u64)
    }
}

/// A loaded entry point.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) entry: &'static Entry,
    function: sys::CUfunction,
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
        let failed = |code: u32, text: String| CudaError { call: format!("launch of {}", self.entry.name), code, text };
        let invalid = cust::error::CudaError::InvalidValue as u32;
        let kinds = arguments.iter().map(|argument| match argument {
            Argument::Pointer(_) => Param::Pointer,
            Argument::U64(_) => Param::U64,
            Argument::F64(_) => Param::F64,
        });
        if !kinds.eq(self.entry.params.iter().copied()) {
            let text = format!("arguments {arguments:?} do not match the parameters {:?}", self.entry.params);
            return Err(failed(invalid, text));
        }
        let blocks = u32::try_from(blocks)
            .ok()
            .filter(|&blocks| blocks <= i32::MAX as u32)
            .ok_or_else(|| failed(invalid, format!("{blocks} blocks exceed the largest grid, 2^31 - 1")))?;
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Pointer(value) | Argument::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::F64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            })
            .collect();
        // SAFETY: the argument list has the entry point's types in its order; the rest is the caller's promise.
        let status = unsafe {
            sys::cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                self.entry.bounds.threads,
                1,
                1,
                0,
                stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if status == sys::cudaError_enum::CUDA_SUCCESS {
            return Ok(());
        }
        Err(failed(status as u32, format!("{status:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_point_can_be_cut_out_of_its_file() {
        for library in [SM_75, SM_80].map(|families| Library { families }) {
            for entry in abi::entries() {
                let source = library.source(entry).unwrap_or_else(|| panic!("no source of {}", entry.name));
                assert!(source.contains(".version") && source.contains(".target"), "no header: {}", entry.name);
                assert_eq!(source.matches(".visible .entry").count(), 1, "{}", entry.name);
                assert!(source.trim_end().ends_with('}'), "{}", entry.name);
            }
        }
    }

    #[test]
    fn capabilities_choose_their_library() {
        assert!(Library::for_capability(7, 0).is_none());
        assert!(std::ptr::eq(Library::for_capability(7, 5).unwrap().families, SM_75));
        assert!(std::ptr::eq(Library::for_capability(8, 0).unwrap().families, SM_80));
        assert!(std::ptr::eq(Library::for_capability(12, 0).unwrap().families, SM_80));
    }
}
