//! Times of the steps of Adasum on one rank's shard, without any exchange: where the time of an Adasum all-reduce goes.

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, DeviceSlice};
use gradsync::kernels::cuda::SegmentWorkspace;
use gradsync::plan::layout::Layout;
use gradsync::plan::segments::clip;

use crate::context::Context;
use crate::figures::{bert_lens, race};
use crate::report::Report;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let queue = &context.queue;
    report.case("stages", || {});
    for dtype in [DType::F32, DType::BF16] {
        for mib in [1usize, 64, 256, 1024] {
            let lens = bert_lens((mib << 20) / dtype.size_bytes());
            let layout = Layout::new(dtype, 4, &lens).unwrap();
            let len = layout.shard_len;
            let parts = clip(&layout.segments, len..2 * len);
            let vectors: Vec<DeviceBuffer> = (0..4).map(|_| DeviceBuffer::zeroed(queue, dtype, len).unwrap()).collect();
            let mut result = DeviceBuffer::zeroed(queue, dtype, len).unwrap();
            let views: Vec<DeviceSlice<'_>> = vectors.iter().map(DeviceBuffer::as_slice).collect();
            let mut layers = SegmentWorkspace::new(queue, len, &parts, 4).unwrap();
            let cell = std::cell::RefCell::new((&mut layers, &mut result));
            let mut gram = || cell.borrow_mut().0.gram(&views).unwrap();
            let mut coefficients = || cell.borrow_mut().0.coefficients().unwrap();
            let mut combine = || {
                let (layers, result) = &mut *cell.borrow_mut();
                layers.combine(result.as_mut_slice(), &views).unwrap()
            };
            let mut all = || {
                let (layers, result) = &mut *cell.borrow_mut();
                layers.adasum(result.as_mut_slice(), &views).unwrap()
            };
            let times = race(queue, 50, [&mut gram, &mut coefficients, &mut combine, &mut all]);
            for (name, time) in ["gram", "coefficients", "combine", "all"].into_iter().zip(times) {
                let floor = (4 * len * dtype.size_bytes()) as f64 / 4.2e12;
                report.figure(&format!("{name} {dtype} {mib} MiB"), time * 1e6, "µs", Some(floor * 1e6));
            }
        }
    }
}
