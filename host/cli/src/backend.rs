//! The processor of `gradsync reduce`: the CPU, or a GPU to which pieces of the files are copied.

use clap::ValueEnum;
use gradsync::ops::offline::Processor;

/// The choice on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// A GPU if there is one, otherwise the CPU.
    Auto,
    /// The CPU, all cores.
    Cpu,
    /// The first CUDA device; an error if there is none.
    Cuda,
}

impl BackendChoice {
    /// Opens the processor of this choice. Where `Auto` finds no GPU, the reason is only logged.
    pub(crate) fn open(self) -> Result<Processor, String> {
        match self {
            BackendChoice::Cpu => Ok(Processor::Cpu),
            BackendChoice::Cuda => open_cuda(),
            BackendChoice::Auto => Ok(open_cuda().unwrap_or_else(|reason| {
                tracing::info!(reason, "no GPU: using the CPU");
                Processor::Cpu
            })),
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda() -> Result<Processor, String> {
    Err("this program was built without the feature `cuda`".into())
}

#[cfg(feature = "cuda")]
fn open_cuda() -> Result<Processor, String> {
    gradsync::driver::Queue::new(0).map(Processor::Cuda).map_err(|error| error.to_string())
}
