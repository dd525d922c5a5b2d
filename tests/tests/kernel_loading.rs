//! The images that the driver gets to load a kernel, and the handling of its answers, tested with drivers made here that run nothing: no
//! GPU is needed.
//!
//! Each case is a process of its own, running this program again. The variable that the forwarders of `host/libcuda.rs` read names its
//! driver. The GPU tier tests whether kernels run.

use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use gradsync::driver::Queue;
use gradsync::internal::driver::KernelSource;
use gradsync_tests::programs::{printed_by, shared_library};

const DRIVER: &str = "GRADSYNC_LIBCUDA";
const FORCE_PTX: &str = "GRADSYNC_FORCE_PTX";
/// The requested kernels: two with assembled code in the crate, and one without.
const KERNELS: [&str; 3] = ["peer_adasum_f32_p4", "two_shot_bf16_p8", "empty"];
const NO_BINARY_FOR_GPU: u32 = 209;
const INVALID_PTX: u32 = 218;

/// Loads the kernels on device 0 of this process's driver, if there is one, and prints the outcome. The other tests run this one in child
/// processes.
#[test]
fn report() {
    let queue = match Queue::new(0) {
        Ok(queue) => queue,
        Err(error) => return println!("\nno queue: {error}"),
    };
    for name in KERNELS {
        match queue.load(name) {
            Ok(()) => println!("\n{name} loaded"),
            Err(error) => println!("\n{name} refused: {error}"),
        }
    }
    for kernel in gradsync::internal::driver::loaded_kernels(&queue) {
        println!("{} from {:?}", kernel.name, kernel.source);
    }
}

/// Prints the outcome of queues on the shared default stream, made from each of its two handles; other tests run it like [`report`].
#[test]
fn report_default_streams() {
    for handle in [0, 1] {
        // SAFETY: The shared default stream lives as long as the context.
        match unsafe { Queue::from_raw_stream(0, ptr::without_provenance_mut(handle)) } {
            Ok(queue) => {
                let refused = queue.capture(|| unreachable!("nothing is recorded")).expect_err("no recording");
                println!("\nstream {handle} is {:?}: {refused}", queue.stream());
            }
            Err(error) => println!("\nno queue: {error}"),
        }
    }
}

/// A simulated device and driver, with the status codes that the driver returns for a context, for code and for PTX.
#[derive(Clone, Copy)]
struct Driver {
    major: u32,
    minor: u32,
    context: u32,
    code: u32,
    ptx: u32,
}

impl Driver {
    const fn of(major: u32, minor: u32) -> Self {
        Driver { major, minor, context: 0, code: 0, ptx: 0 }
    }

    /// Compiles the driver. It prints each image that it is given: the architecture of code, or the numbers of entry points and of waits of
    /// PTX.
    fn build(self, folder: &Path) -> PathBuf {
        const SOURCE: &str = r#"
            #include <stdio.h>
            #include <string.h>
            int cuInit(unsigned flags) { return flags; }
            int cuGetErrorName(int error, const char **to) { *to = 0; return error == 218 ? (*to = "CUDA_ERROR_INVALID_PTX", 0) : 1; }
            int cuGetErrorString(int error, const char **to) { *to = 0; return error == 218 ? (*to = "a PTX error", 0) : 1; }
            int cuDriverGetVersion(int *to) { *to = 12090; return 0; }
            static int launch(void) { return 999; }
            int cuGetProcAddress(const char *name, void **to) { *to = strcmp(name, "cuLaunchKernelEx") ? 0 : (void *)launch; return 0; }
            int cuDeviceGetCount(int *to) { *to = 1; return 0; }
            int cuDeviceGet(int *to, int ordinal) { *to = ordinal; return 0; }
            int cuDeviceGetAttribute(int *to, int attribute) { *to = attribute == 75 ? MAJOR : attribute == 76 ? MINOR : 0; return 0; }
            int cuDevicePrimaryCtxRetain(void **to) { *to = to; return CONTEXT; }
            int cuDevicePrimaryCtxRelease_v2(void) { return 0; }
            int cuCtxSetCurrent(void) { return 0; }
            int cuStreamCreateWithPriority(void **to) { *to = to; return 0; }
            int cuStreamDestroy_v2(void) { return 0; }
            static int count(const char *text, const char *what) {
                int found = 0;
                while ((text = strstr(text, what))) { found++; text += strlen(what); }
                return found;
            }
            int cuModuleLoadDataEx(void **to, const char *image) {
                *to = to;
                if (!memcmp(image, "\177ELF", 4)) {
                    unsigned flags;
                    memcpy(&flags, image + 48, 4);
                    printf("given code %u\n", image[8] < 8 ? flags & 255 : flags >> 8 & 255);
                    fflush(stdout);
                    return CODE;
                }
                printf("given PTX with %d entries, %d waits\n", count(image, ".entry"), count(image, "griddepcontrol.wait;"));
                fflush(stdout);
                return PTX;
            }
            int cuModuleGetFunction(void **to) { *to = to; return 0; }
            int cuModuleUnload(void) { return 0; }
        "#;
        let Driver { major, minor, context, code, ptx } = self;
        let path = folder.join(format!("driver-{major}-{minor}-{context}-{code}-{ptx}.so"));
        let source = path.with_extension("c");
        fs::write(&source, SOURCE).expect("a writable folder");
        let constants = [("MAJOR", major), ("MINOR", minor), ("CONTEXT", context), ("CODE", code), ("PTX", ptx)];
        let constants = constants.map(|(name, value)| format!("-D{name}={value}"));
        shared_library(&path, &source, &constants);
        path
    }

    /// The lines that [`report`] and the driver print in a process with this driver.
    fn report(self, force_ptx: Option<&str>) -> Vec<String> {
        self.printed("report", force_ptx)
    }

    fn printed(self, test: &str, force_ptx: Option<&str>) -> Vec<String> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let printed = printed_by(test, |command| {
            command.env(DRIVER, self.build(folder.path()));
            command.env_remove(FORCE_PTX).envs(force_ptx.map(|value| (FORCE_PTX, value)));
        });
        let of_us = |line: &&str| {
            line.starts_with("given")
                || line.starts_with("no queue")
                || line.starts_with("stream ")
                || KERNELS.iter().any(|name| line.starts_with(name))
        };
        printed.lines().filter(of_us).map(str::to_owned).collect()
    }
}

/// The lines of a report in which every kernel is loaded: the images that the driver gets for each kernel in turn, and the accepted source.
fn loaded(given: [&[&str]; 3], sources: [KernelSource; 3]) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, given) in KERNELS.iter().zip(given) {
        lines.extend(given.iter().map(|image| format!("given {image}")));
        lines.push(format!("{name} loaded"));
    }
    let mut named: Vec<_> = KERNELS.iter().zip(sources).collect();
    named.sort_by_key(|(name, _)| **name);
    lines.extend(named.iter().map(|(name, source)| format!("{name} from {source:?}")));
    lines
}

const WAITING: &str = "PTX with 1 entries, 1 waits";
const PLAIN: &str = "PTX with 1 entries, 0 waits";

#[test]
fn load_takes_the_code_of_the_devices_architecture() {
    use KernelSource::{Cubin, Ptx};
    for (driver, code, ptx) in [
        (Driver::of(8, 0), "code 80", PLAIN),
        (Driver::of(8, 9), "code 80", PLAIN),
        (Driver::of(9, 0), "code 90", WAITING),
        (Driver::of(10, 3), "code 100", WAITING),
    ] {
        assert_eq!(driver.report(None), loaded([&[code], &[code], &[ptx]], [Cubin, Cubin, Ptx]), "{code}");
    }
}

#[test]
fn load_takes_ptx_for_a_device_without_code() {
    for (driver, ptx) in [(Driver::of(7, 5), PLAIN), (Driver::of(12, 0), WAITING)] {
        assert_eq!(driver.report(None), loaded([&[ptx]; 3], [KernelSource::Ptx; 3]), "{ptx}");
    }
}

#[test]
fn load_tries_ptx_after_refused_code() {
    let driver = Driver { code: NO_BINARY_FOR_GPU, ..Driver::of(9, 0) };
    let both: &[&str] = &["code 90", WAITING];
    assert_eq!(driver.report(None), loaded([both, both, &[WAITING]], [KernelSource::Ptx; 3]));
}

#[test]
fn load_takes_ptx_where_the_environment_asks_for_it() {
    let driver = Driver::of(9, 0);
    assert_eq!(driver.report(Some("1")), loaded([&[WAITING]; 3], [KernelSource::Ptx; 3]));
    assert_eq!(driver.report(Some("0")), driver.report(None));
}

#[test]
fn load_refused_twice_is_an_error_with_the_last_answer() {
    let driver = Driver { code: NO_BINARY_FOR_GPU, ptx: INVALID_PTX, ..Driver::of(9, 0) };
    let report = driver.report(None);
    for name in KERNELS {
        let line = report
            .iter()
            .find(|line| line.starts_with(&format!("{name} refused")))
            .unwrap_or_else(|| panic!("{report:?}"));
        let expected =
            format!("cuModuleLoadDataEx of {name} failed with code {INVALID_PTX}: CUDA_ERROR_INVALID_PTX: a PTX error");
        assert!(line.contains(&expected), "{line}");
    }
    assert!(!report.iter().any(|line| line.contains(" from ")), "{report:?}");
}

/// A status code that is not in the header with which this program was made.
const UNKNOWN: u32 = 99999;
/// `CUDA_ERROR_DEVICE_UNAVAILABLE`, which `cust` does not know: another process uses the device exclusively.
const DEVICE_UNAVAILABLE: u32 = 46;

#[test]
fn load_reports_unknown_result_codes() {
    let driver = Driver { code: UNKNOWN, ptx: UNKNOWN, ..Driver::of(9, 0) };
    let report = driver.report(None);
    for name in KERNELS {
        let expected = format!(
            "{name} refused: CUDA: cuModuleLoadDataEx of {name} failed with code {UNKNOWN}: the driver has no name for this code"
        );
        assert!(report.contains(&expected), "{report:?}");
    }
    for context in [DEVICE_UNAVAILABLE, UNKNOWN] {
        let report = Driver { context, ..Driver::of(9, 0) }.report(None);
        let expected = format!(
            "no queue: CUDA: cuDevicePrimaryCtxRetain failed with code {context}: the driver has no name for this code"
        );
        assert_eq!(report, [expected]);
    }
}

#[test]
fn queue_names_a_device_that_is_too_old() {
    let report = Driver::of(7, 0).report(None);
    assert!(matches!(&report[..], [line] if line.starts_with("no queue") && line.contains("7.0")), "{report:?}");
}

#[test]
fn from_raw_stream_refuses_the_default_stream_of_each_thread() {
    // SAFETY: The per-thread default stream exists wherever there is a context.
    let error = unsafe { Queue::from_raw_stream(0, ptr::without_provenance_mut(2)) }.expect_err("no queue");
    assert_eq!(error.code, 400, "{error}");
    for part in ["stream 0x2", "per-thread default stream", "Device::new_cuda_with_stream"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn from_raw_stream_takes_the_legacy_default_stream_unrecorded() {
    let report = Driver::of(9, 0).printed("report_default_streams", None);
    let refusal =
        "0x1: CUDA: cuStreamBeginCapture of stream 0x1 failed with code 900: the default stream cannot be recorded";
    assert_eq!(report.len(), 2, "{report:?}");
    for (handle, line) in report.iter().enumerate() {
        assert!(line.starts_with(&format!("stream {handle} is {refusal}")), "{report:?}");
    }
}
