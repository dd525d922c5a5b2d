//! Where `gradsync reduce` computes: the CPU, or a GPU that pieces of the files are copied to.
//!
//! Both offer the passes that a reduction needs over one piece of every rank's tensor. They know no files.

#[cfg(feature = "cuda")]
mod cuda;

use clap::ValueEnum;
use gradsync::kernels::cpu;
use gradsync::{GradientBuffer, Result, Slice};

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

/// The passes of a reduction over one piece: the same elements of every rank's vector, as one segment.
pub(crate) trait Backend {
    fn name(&self) -> &'static str;
    /// The P(P+1)/2 inner products.
    fn gram(&mut self, vectors: &[Slice<'_>]) -> Result<Vec<f64>>;
    /// The weighted sum, in the dtype of `output`'s one tensor, into its first elements.
    fn combine(&mut self, output: &mut GradientBuffer, vectors: &[Slice<'_>], weights: &[f64]) -> Result<()>;
}

/// Everything in place, on slices of the mapped files.
struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn gram(&mut self, vectors: &[Slice<'_>]) -> Result<Vec<f64>> {
        cpu::gram(vectors, &[0..vectors[0].len()])
    }

    fn combine(&mut self, output: &mut GradientBuffer, vectors: &[Slice<'_>], weights: &[f64]) -> Result<()> {
        let len = vectors[0].len();
        let output = output.as_mut_slice().range_mut(0..len);
        cpu::combine(output, vectors, weights, &[0..len])
    }
}

/// The backend for a choice; `Auto` says on stderr why it does without a GPU only when logging asks for it.
pub(crate) fn open(choice: BackendChoice) -> std::result::Result<Box<dyn Backend>, String> {
    match choice {
        BackendChoice::Cpu => Ok(Box::new(Cpu)),
        BackendChoice::Cuda => open_cuda(),
        BackendChoice::Auto => Ok(open_cuda().unwrap_or_else(|reason| {
            tracing::info!(reason, "no GPU: using the CPU");
            Box::new(Cpu)
        })),
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda() -> std::result::Result<Box<dyn Backend>, String> {
    Err("this program was built without the feature `cuda`".into())
}

#[cfg(feature = "cuda")]
fn open_cuda() -> std::result::Result<Box<dyn Backend>, String> {
    match cuda::Cuda::open() {
        Ok(backend) => Ok(Box::new(backend)),
        Err(error) => Err(error.to_string()),
    }
}
