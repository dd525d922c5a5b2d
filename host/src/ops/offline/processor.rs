//! The processors of an offline reduction: the CPU, or a GPU, to which pieces are copied and from which only results are copied back.

#[cfg(feature = "cuda")]
use gradsync_device::math::adasum::products;

#[cfg(feature = "cuda")]
use crate::driver::{DeviceBuffer, DeviceSlice, Queue};
use crate::error::Result;
use crate::kernels::cpu;
#[cfg(feature = "cuda")]
use crate::kernels::{cpu::Coefficients, cuda::SegmentWorkspace};
use crate::plan::chunks::Chunk;
use crate::slice::{Slice, SliceMut};

/// The processor that multiplies and adds vectors.
#[derive(Debug)]
#[non_exhaustive]
pub enum Processor {
    /// The cores of the CPU, on the vectors in host memory.
    Cpu,
    /// The GPU of this queue.
    #[cfg(feature = "cuda")]
    Cuda(Queue),
}

impl Processor {
    /// `cpu` or `cuda`.
    pub fn name(&self) -> &'static str {
        match self {
            Processor::Cpu => "cpu",
            #[cfg(feature = "cuda")]
            Processor::Cuda(_) => "cuda",
        }
    }

    /// Adds the P(P+1)/2 inner products of vectors that consist of these chunks of one layer to `totals`.
    pub(super) fn add_gram(&self, totals: &mut [f64], vectors: &[Slice<'_>], chunks: &[Chunk]) -> Result<()> {
        match self {
            Processor::Cpu => cpu::add_gram(totals, vectors, chunks),
            #[cfg(feature = "cuda")]
            Processor::Cuda(queue) => {
                let gram = on_device(queue, vectors, |layers, views| {
                    layers.gram(views)?;
                    layers.read_totals(products(views.len()))
                })?;
                totals.iter_mut().zip(gram).for_each(|(total, product)| *total += product);
            }
        }
        Ok(())
    }

    /// Computes the weighted sum of the vectors.
    pub(super) fn combine(&self, output: SliceMut<'_>, vectors: &[Slice<'_>], weights: &[f64]) -> Result<()> {
        match self {
            Processor::Cpu => cpu::combine(output, vectors, weights, &[0..vectors[0].len()]),
            #[cfg(feature = "cuda")]
            Processor::Cuda(queue) => on_device(queue, vectors, |layers, views| {
                layers.write_coefficients(&Coefficients { weights: weights.to_vec(), cancelled: vec![false] })?;
                let mut sum = DeviceBuffer::zeroed(queue, output.dtype(), output.len())?;
                layers.combine(sum.as_mut_slice(), views)?;
                sum.as_slice().copy_to_host(output)
            }),
        }
    }
}

/// Copies vectors to the device, and runs `work` on them as one layer.
#[cfg(feature = "cuda")]
fn on_device<T>(
    queue: &Queue,
    vectors: &[Slice<'_>],
    work: impl FnOnce(&mut SegmentWorkspace, &[DeviceSlice<'_>]) -> Result<T>,
) -> Result<T> {
    let len = vectors[0].len();
    let copies = vectors.iter().map(|vector| DeviceBuffer::from_host(queue, *vector)).collect::<Result<Vec<_>>>()?;
    let views: Vec<DeviceSlice<'_>> = copies.iter().map(DeviceBuffer::as_slice).collect();
    work(&mut SegmentWorkspace::new(queue, len, &[0..len], vectors.len())?, &views)
}
