//! The connection of a profiler to this program's ranges: the client side of NVTX 3, after NVIDIA's `nvtxTypes.h` and `nvtxInit.h`.
//!
//! A profiler sets `NVTX_INJECTION64_PATH` to a library of its own. The library is loaded at the first range, and its
//! `InitializeInjectionNvtx2` gets a function that returns the tables of this program's NVTX functions, in which it stores its own.
//! NVIDIA's crate of bindings does the same, but needs libclang to build. This crate only pushes and pops ranges.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

use crate::loading::reason;

const VARIABLE: &str =
    if cfg!(target_pointer_width = "64") { "NVTX_INJECTION64_PATH" } else { "NVTX_INJECTION32_PATH" };

/// `NVTX_VERSION`
const VERSION: u16 = 3;
/// `NVTX_COLOR_ARGB`
const COLOR_ARGB: i32 = 1;
/// `NVTX_MESSAGE_TYPE_ASCII`
const MESSAGE_ASCII: i32 = 1;
/// `NVTX_ETID_CALLBACKS`
const CALLBACKS_TABLE: u32 = 1;
/// `NVTX_ETID_VERSIONINFO`
const VERSION_TABLE: u32 = 3;

/// `NVTX_CB_MODULE_CORE`, and the indices of two functions in its table.
const CORE: usize = 1;
const RANGE_PUSH_EX: usize = 8;
const RANGE_POP: usize = 11;

/// The number of functions of each module, including the unused index 0. There is no module 0; the others are core, CUDA, OpenCL, CUDA
/// runtime, core 2 and synchronisation.
const SIZES: [usize; MODULES] = [0, 16, 9, 15, 7, 16, 7];
const MODULES: usize = 7;
const LONGEST: usize = 16;

/// `nvtxEventAttributes_t`
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

type PushEx = unsafe extern "C" fn(*const EventAttributes) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;
type GetExportTable = extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    get_module_function_table: unsafe extern "C" fn(u32, *mut *const Slot, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

/// The address where a tool stores a function; null at index 0 and behind the last.
type Slot = *const AtomicPtr<c_void>;

/// The functions that the tool has stored.
static FUNCTIONS: [[AtomicPtr<c_void>; LONGEST]; MODULES] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; LONGEST] }; MODULES];

/// The tables that a tool reads: addresses of the slots.
struct Tables([[Slot; LONGEST + 1]; MODULES]);

// SAFETY: the slots are addresses of an atomic static, and never change.
unsafe impl Sync for Tables {}

static TABLES: Tables = Tables({
    let mut tables = [[ptr::null(); LONGEST + 1]; MODULES];
    let mut module = 1;
    while module < MODULES {
        let mut index = 1;
        while index < SIZES[module] {
            tables[module][index] = &FUNCTIONS[module][index] as Slot;
            index += 1;
        }
        module += 1;
    }
    tables
});

static CALLBACKS: Callbacks =
    Callbacks { struct_size: size_of::<Callbacks>(), get_module_function_table: module_function_table };

static VERSION_INFO: VersionInfo = VersionInfo {
    struct_size: size_of::<VersionInfo>(),
    version: VERSION as u32,
    reserved: 0,
    set_injection_version: ignore_version,
};

extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS_TABLE => ptr::from_ref(&CALLBACKS).cast(),
        VERSION_TABLE => ptr::from_ref(&VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// # Safety
/// Either address is null or may be written to.
unsafe extern "C" fn module_function_table(module: u32, table: *mut *const Slot, size: *mut c_uint) -> c_int {
    let module = module as usize;
    if !(CORE..MODULES).contains(&module) {
        return 0;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if !table.is_null() {
            *table = TABLES.0[module].as_ptr();
        }
        if !size.is_null() {
            *size = SIZES[module] as c_uint;
        }
    }
    1
}

extern "C" fn ignore_version(_: u32) {}

/// A profiler that shows ranges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tool {
    push: PushEx,
    pop: Pop,
}

impl Tool {
    pub(super) fn push(self, name: &CStr, color: u32) {
        let attributes = EventAttributes {
            version: VERSION,
            size: size_of::<EventAttributes>() as u16,
            category: 0,
            color_type: COLOR_ARGB,
            color,
            payload_type: 0,
            reserved: 0,
            payload: 0,
            message_type: MESSAGE_ASCII,
            message: name.as_ptr(),
        };
        // SAFETY: the tool's function, with attributes in the layout of NVTX 3; it copies the name.
        unsafe { (self.push)(&attributes) };
    }

    pub(super) fn pop(self) {
        // SAFETY: the tool's function.
        unsafe { (self.pop)() };
    }
}

/// The profiler that observes this process; searched for once.
#[inline]
pub(super) fn tool() -> Option<Tool> {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    *TOOL.get_or_init(find)
}

fn find() -> Option<Tool> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
    // SAFETY: opening runs the library's initialisers; the user who set the variable vouches for them.
    let library = match unsafe { Library::new(&path) } {
        Ok(library) => library,
        Err(error) => {
            let error = reason(&error);
            tracing::warn!(?path, %error, "{VARIABLE} names no library that loads; there are no NVTX ranges");
            return None;
        }
    };
    let stored = {
        // SAFETY: the function has this type in every library that NVTX loads.
        let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") };
        // SAFETY: `export_table` has the type that the function expects, and lives as long as the process.
        initialize.is_ok_and(|initialize| unsafe { initialize(export_table) } != 0)
    };
    // The library may have started threads, and holds addresses of this program.
    std::mem::forget(library);
    if !stored {
        tracing::warn!(?path, "the library of {VARIABLE} did not start; there are no NVTX ranges");
        return None;
    }
    let function = |index: usize| {
        let function = FUNCTIONS[CORE][index].load(Ordering::Acquire);
        (!function.is_null()).then_some(function)
    };
    let (push, pop) = (function(RANGE_PUSH_EX)?, function(RANGE_POP)?);
    // SAFETY: a tool stores functions of NVTX's types at these indices.
    Some(unsafe {
        Tool {
            push: std::mem::transmute::<*mut c_void, PushEx>(push),
            pop: std::mem::transmute::<*mut c_void, Pop>(pop),
        }
    })
}
