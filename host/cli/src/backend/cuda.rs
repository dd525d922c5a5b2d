//! The GPU's side of `gradsync reduce`: each piece is copied to the device, worked on there, and only results come back.

use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::kernels::cpu::Coefficients;
use gradsync::kernels::cuda::SegmentWorkspace;
use gradsync::{GradientBuffer, Result, Slice};
use gradsync_device::math::adasum::products;

use super::Backend;

pub(super) struct Cuda {
    queue: Queue,
}

impl Cuda {
    pub(super) fn open() -> Result<Self> {
        Ok(Self { queue: Queue::new(0)? })
    }

    /// Copies the vectors to the device and hands them on, with one layer over their length.
    fn with_device<T>(
        &self,
        vectors: &[Slice<'_>],
        work: impl FnOnce(&mut SegmentWorkspace, &[DeviceSlice<'_>]) -> Result<T>,
    ) -> Result<T> {
        let len = vectors[0].len();
        let copies =
            vectors.iter().map(|vector| DeviceBuffer::from_host(&self.queue, *vector)).collect::<Result<Vec<_>>>()?;
        let views: Vec<DeviceSlice<'_>> = copies.iter().map(DeviceBuffer::as_slice).collect();
        work(&mut SegmentWorkspace::new(&self.queue, len, &[0..len], vectors.len())?, &views)
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn gram(&mut self, vectors: &[Slice<'_>]) -> Result<Vec<f64>> {
        self.with_device(vectors, |layers, views| {
            layers.gram(views)?;
            layers.read_totals(products(views.len()))
        })
    }

    fn combine(&mut self, output: &mut GradientBuffer, vectors: &[Slice<'_>], weights: &[f64]) -> Result<()> {
        let len = vectors[0].len();
        self.with_device(vectors, |layers, views| {
            layers.write_coefficients(&Coefficients { weights: weights.to_vec(), cancelled: vec![false] })?;
            let mut sum = DeviceBuffer::zeroed(&self.queue, output.dtype(), len)?;
            layers.combine(sum.as_mut_slice(), views)?;
            sum.as_slice().copy_to_host(output.as_mut_slice().range_mut(0..len))
        })
    }
}
