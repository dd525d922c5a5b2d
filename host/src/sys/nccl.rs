//! This crate's own declarations of NCCL's C interface, loaded at run time: `libnccl.so.2`, or the library that `GRADSYNC_LIBNCCL` names.
//!
//! Each function is looked up on its own. Those of NCCL 2.18 are required; a newer one may be missing, and a request for it is
//! [`NcclError::Unsupported`]. Result codes are integers, never a Rust enum: a library newer than this file may return codes that it does
//! not know. The names and types are from NVIDIA's `nccl.h` ([user guide](https://docs.nvidia.com/deeplearning/nccl/)); a test compares
//! them. This module has no state and no notion of ranks.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use libloading::Library;

use crate::loading::{self, NotFound};

/// The environment variable that names the library, by path or by name.
pub const VARIABLE: &str = "GRADSYNC_LIBNCCL";
/// The names tried if the variable is not set. Runtime packages have only the first.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclResult_t`: the result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ResultCode(pub c_int);

impl ResultCode {
    /// `ncclSuccess`
    pub const SUCCESS: Self = Self(0);
    /// `ncclInvalidArgument`
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// `ncclInvalidUsage`
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclInProgress`: a non-blocking communicator continues the call by itself.
    pub const IN_PROGRESS: Self = Self(7);
}

/// `ncclComm_t`: an opaque communicator.
pub type Comm = *mut c_void;
/// `cudaStream_t`, which is the driver's `CUstream`.
pub type Stream = *mut c_void;

/// `ncclUniqueId`: the identifier by which the ranks of a new communicator find each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [c_char; 128]);

/// `ncclDataType_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct DataTypeCode(pub c_int);

impl DataTypeCode {
    /// `ncclUint8`
    pub const BYTES: Self = Self(1);
}

/// `ncclRedOp_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct RedOp(pub c_int);

impl RedOp {
    /// `ncclSum`
    pub const SUM: Self = Self(0);
    /// `ncclMax`
    pub const MAX: Self = Self(2);
    /// `ncclMin`
    pub const MIN: Self = Self(3);
    /// `ncclAvg`
    pub const AVG: Self = Self(4);
}

/// `ncclScalarResidence_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ScalarResidence(pub c_int);

impl ScalarResidence {
    /// `ncclScalarHostImmediate`: the scalar is read before the call returns.
    pub const HOST_IMMEDIATE: Self = Self(1);
}

/// `NCCL_CONFIG_UNDEF_INT`: leave the choice to NCCL.
pub const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` with the fields of version 2.18. Later versions only append fields, and tell the caller's version by `size` and
/// `version`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)] // the names are NCCL's
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
}

impl Default for Config {
    /// `NCCL_CONFIG_INITIALIZER` of version 2.18.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: Version::LOWEST.0 as u32,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// A version in NCCL's encoding: `major × 10000 + minor × 100 + patch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub c_int);

impl Version {
    /// The oldest version that this crate supports: the first with splitting and with every function required here.
    pub const LOWEST: Self = Self::new(2, 18);

    /// Version `major.minor.1`, the first release of a series.
    pub const fn new(major: c_int, minor: c_int) -> Self {
        Self(major * 10000 + minor * 100 + 1)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Up to 2.8, the factor of the major version was 1000.
        let major = if self.0 < 10000 { 1000 } else { 10000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

/// NCCL is missing, too old, or refused a call.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No library of these names could be opened.
    #[error("NCCL was not found; tried {}; the variable GRADSYNC_LIBNCCL names another", list(.tried))]
    NotFound {
        /// Each name that was tried, and the loader's reason.
        tried: Vec<(String, String)>,
    },
    /// The library lacks a function that every supported version has.
    #[error("NCCL: {library} has no function {symbol}")]
    MissingSymbol {
        /// The library that was opened.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library is older than this crate supports.
    #[error("NCCL: {library} is version {found}, and {} or later is needed", Version::LOWEST)]
    TooOld {
        /// The library that was opened.
        library: String,
        /// Its version.
        found: Version,
    },
    /// The loaded version lacks this call; a later version has it.
    #[error("NCCL: {call} needs version {needs}, and this is {found}")]
    Unsupported {
        /// The call.
        call: &'static str,
        /// The first version with the call.
        needs: Version,
        /// The version loaded.
        found: Version,
    },
    /// A call failed.
    #[error("NCCL: {call} failed on rank {rank} of {world_size} with code {code}: {text}{}", detail(.last_error))]
    Failed {
        /// The call.
        call: &'static str,
        /// `ncclResult_t`.
        code: c_int,
        /// NCCL's description of the code.
        text: String,
        /// NCCL's description of the last error of this communicator; may be empty.
        last_error: String,
        /// The rank that called.
        rank: usize,
        /// The number of ranks of its communicator.
        world_size: usize,
    },
}

debug_as_text!(NcclError);

fn list(tried: &[(String, String)]) -> String {
    tried.iter().map(|(name, reason)| format!("{name} ({reason})")).collect::<Vec<_>>().join(", ")
}

fn detail(last_error: &str) -> String {
    if last_error.is_empty() { String::new() } else { format!(" ({last_error})") }
}

/// The declaration of a function, for the test that compares it with `nccl.h`.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// The name of the function.
    pub name: &'static str,
    /// The types of its parameters, in Rust.
    pub parameters: &'static [&'static str],
    /// The type of its result, in Rust.
    pub result: &'static str,
}

macro_rules! api {
    (
        required { $($name:ident($($type:ty),* $(,)?) -> $result:ty;)* }
        optional { $($late:ident($($late_type:ty),* $(,)?) -> $late_result:ty, since $major:literal $minor:literal;)* }
    ) => {
        /// The functions of the library, under their own names.
        #[allow(non_snake_case, missing_docs)] // the names are NCCL's
        #[derive(Debug)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($type),*) -> $result,)*
            $($late: Option<unsafe extern "C" fn($($late_type),*) -> $late_result>,)*
        }

        /// Every function declared here.
        pub const DECLARATIONS: &[Declaration] = &[
            $(Declaration {
                name: stringify!($name), parameters: &[$(stringify!($type)),*], result: stringify!($result),
            },)*
            $(Declaration {
                name: stringify!($late), parameters: &[$(stringify!($late_type)),*], result: stringify!($late_result),
            },)*
        ];

        impl Functions {
            fn find(library: &Library, shown: &str) -> Result<Self, NcclError> {
                Ok(Self {
                    $($name: {
                        let missing = |_| NcclError::MissingSymbol { library: shown.into(), symbol: stringify!($name) };
                        // SAFETY: the type is the type of the function of this name in `nccl.h`.
                        *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }.map_err(missing)?
                    },)*
                    $($late: {
                        // SAFETY: as above.
                        unsafe { library.get(concat!(stringify!($late), "\0").as_bytes()) }.ok().map(|function| *function)
                    },)*
                })
            }
        }

        #[allow(non_snake_case)] // the names are NCCL's
        impl Nccl {
            $(
                /// The function of this name, if the loaded version has it.
                ///
                /// # Errors
                /// [`NcclError::Unsupported`] naming the required version.
                pub fn $late(&self) -> Result<unsafe extern "C" fn($($late_type),*) -> $late_result, NcclError> {
                    self.functions.$late.ok_or(NcclError::Unsupported {
                        call: stringify!($late), needs: Version::new($major, $minor), found: self.version,
                    })
                }
            )*
        }
    };
}

api! {
    required {
        ncclGetVersion(*mut c_int) -> ResultCode;
        ncclGetUniqueId(*mut UniqueId) -> ResultCode;
        ncclGetErrorString(ResultCode) -> *const c_char;
        ncclGetLastError(Comm) -> *const c_char;
        ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> ResultCode;
        ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut Config) -> ResultCode;
        ncclCommGetAsyncError(Comm, *mut ResultCode) -> ResultCode;
        ncclCommFinalize(Comm) -> ResultCode;
        ncclCommDestroy(Comm) -> ResultCode;
        ncclCommAbort(Comm) -> ResultCode;
        ncclRedOpCreatePreMulSum(*mut RedOp, *mut c_void, DataTypeCode, ScalarResidence, Comm) -> ResultCode;
        ncclRedOpDestroy(RedOp, Comm) -> ResultCode;
        ncclGroupStart() -> ResultCode;
        ncclGroupEnd() -> ResultCode;
        ncclAllReduce(*const c_void, *mut c_void, usize, DataTypeCode, RedOp, Comm, Stream) -> ResultCode;
        ncclBroadcast(*const c_void, *mut c_void, usize, DataTypeCode, c_int, Comm, Stream) -> ResultCode;
        ncclReduceScatter(*const c_void, *mut c_void, usize, DataTypeCode, RedOp, Comm, Stream) -> ResultCode;
        ncclAllGather(*const c_void, *mut c_void, usize, DataTypeCode, Comm, Stream) -> ResultCode;
        ncclSend(*const c_void, usize, DataTypeCode, c_int, Comm, Stream) -> ResultCode;
        ncclRecv(*mut c_void, usize, DataTypeCode, c_int, Comm, Stream) -> ResultCode;
    }
    optional {
        ncclCommRegister(Comm, *mut c_void, usize, *mut *mut c_void) -> ResultCode, since 2 19;
        ncclCommDeregister(Comm, *mut c_void) -> ResultCode, since 2 19;
        ncclCommShrink(Comm, *mut c_int, c_int, *mut Comm, *mut Config, c_int) -> ResultCode, since 2 27;
    }
}

/// The loaded library.
#[derive(Debug)]
pub struct Nccl {
    /// Its functions.
    pub functions: Functions,
    version: Version,
    library: String,
}

impl Nccl {
    /// The library of this process, opened at the first call; later calls return the same result.
    ///
    /// # Errors
    /// [`NcclError::NotFound`], [`NcclError::MissingSymbol`] or [`NcclError::TooOld`].
    pub fn get() -> Result<&'static Self, NcclError> {
        static LOADED: OnceLock<Result<Nccl, NcclError>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    /// Opens the library anew, without the cached result of [`get`](Self::get).
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    pub fn open() -> Result<Self, NcclError> {
        let (library, shown) =
            loading::open(VARIABLE, &NAMES).map_err(|NotFound(tried)| NcclError::NotFound { tried })?;
        // NCCL has threads of its own, so it stays loaded after this object is dropped.
        let library: &'static Library = Box::leak(Box::new(library));
        // The version is checked first: a library that is too old lacks functions, and the error should name the cause.
        let missing = |_| NcclError::MissingSymbol { library: shown.clone(), symbol: "ncclGetVersion" };
        // SAFETY: the type is the type of the function of this name in `nccl.h`.
        let get_version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> ResultCode>(b"ncclGetVersion\0") };
        let mut version = Version(0);
        // SAFETY: writes one integer.
        unsafe { (get_version.map_err(missing)?)(&mut version.0) };
        if version < Version::LOWEST {
            return Err(NcclError::TooOld { library: shown, found: version });
        }
        let functions = Functions::find(library, &shown)?;
        tracing::debug!(%version, library = shown, "NCCL loaded");
        Ok(Self { functions, version, library: shown })
    }

    /// The library's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The name by which it was opened.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// NCCL's description of a code.
    pub fn error_string(&self, code: ResultCode) -> String {
        // SAFETY: the function returns a static string for every integer.
        unsafe { text((self.functions.ncclGetErrorString)(code)) }
    }

    /// NCCL's description of the last error, of a communicator or of this thread's calls without one.
    ///
    /// # Safety
    /// `comm` is null or a live communicator.
    pub unsafe fn last_error(&self, comm: Comm) -> String {
        // SAFETY: the caller's promise; NCCL keeps the string until the next error.
        unsafe { text((self.functions.ncclGetLastError)(comm)) }
    }
}

/// # Safety
/// `string` is null or a C string.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().into()
}
