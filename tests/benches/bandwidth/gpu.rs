//! The CUDA backend's half: 20 rounds after warm-up, timed by events on the queue, the driver's copy in every round.

use gradsync::driver::{DeviceBuffer, Queue, devices};
use gradsync::kernels::cuda::{self, SegmentWorkspace};
use gradsync::{DType, Result};

use crate::{Figure, print_table};

const WARM_UP: usize = 3;
const ROUNDS: usize = 20;

/// Something to time: its name, the bytes that it must move, and the work.
type Case<'a> = (String, usize, Box<dyn FnMut() -> Result<()> + 'a>);

pub(crate) fn run(quick: bool) {
    let names = match devices() {
        Ok(names) => names,
        Err(error) => return println!("\nGPU: not run: {error}"),
    };
    let queue = Queue::new(0).expect("a device that was just listed");
    for bytes in if quick { vec![32 << 20] } else { vec![256 << 20, 1 << 30] } {
        let title = |what: &str| format!("{}, {} MiB: {what}", names[0], bytes >> 20);
        streaming(&queue, bytes, &title).expect("the device works");
        reductions(&queue, bytes, &title).expect("the device works");
    }
}

/// Times the cases in turn, with the driver's copy of `copy` to `target` as the first of them.
fn measure(queue: &Queue, cases: Vec<Case<'_>>) -> Result<Vec<Figure>> {
    let mut cases = cases;
    let mut figures: Vec<_> = cases
        .iter()
        .map(|(name, bytes, _)| Figure { name: name.clone(), bytes: *bytes, seconds: Vec::new() })
        .collect();
    for round in 0..WARM_UP + ROUNDS {
        for ((_, _, work), figure) in cases.iter_mut().zip(&mut figures) {
            // An idle queue before each case: the time is the work's, not that of what was still running.
            queue.synchronize()?;
            let start = queue.record()?;
            work()?;
            let seconds = queue.record()?.seconds_since(&start)?;
            if round >= WARM_UP {
                figure.seconds.push(seconds);
            }
        }
    }
    Ok(figures)
}

fn random(queue: &Queue, dtype: DType, len: usize) -> Result<DeviceBuffer> {
    // A few MiB of values in -1..1, repeated: enough that no hardware finds them alike.
    let block: Vec<f32> = (0..1 << 20).map(|index: u32| index.wrapping_mul(2_654_435_761) as f32 / 2e9 - 1.0).collect();
    let source = DeviceBuffer::from_host(queue, (&block).into())?;
    let mut buffer = DeviceBuffer::zeroed(queue, dtype, len)?;
    for begin in (0..len).step_by(block.len()) {
        let end = len.min(begin + block.len());
        cuda::cast(buffer.as_mut_slice().range_mut(begin..end), source.as_slice().range(0..end - begin))?;
    }
    Ok(buffer)
}

fn streaming(queue: &Queue, bytes: usize, title: &dyn Fn(&str) -> String) -> Result<()> {
    for to in DType::ALL {
        for from in DType::ALL {
            let len = bytes / to.size_bytes().max(from.size_bytes());
            let (to_bytes, from_bytes) = (len * to.size_bytes(), len * from.size_bytes());
            let value = random(queue, from, len)?;
            let (mut sum, mut cast, mut scaled) =
                (random(queue, to, len)?, DeviceBuffer::zeroed(queue, to, len)?, DeviceBuffer::zeroed(queue, to, len)?);
            let source = random(queue, DType::F32, bytes / 4)?;
            let mut target = DeviceBuffer::zeroed(queue, DType::F32, bytes / 4)?;
            let value = value.as_slice();
            let cases: Vec<Case<'_>> = vec![
                (
                    "driver's copy".into(),
                    2 * bytes,
                    Box::new(|| target.as_mut_slice().copy_from_device(source.as_slice())),
                ),
                (
                    format!("accumulate {to} += {from}"),
                    2 * to_bytes + from_bytes,
                    Box::new(|| cuda::accumulate(sum.as_mut_slice(), value)),
                ),
                (
                    format!("cast {from} to {to}"),
                    to_bytes + from_bytes,
                    Box::new(|| cuda::cast(cast.as_mut_slice(), value)),
                ),
                (
                    format!("scale {from} to {to}"),
                    to_bytes + from_bytes,
                    Box::new(|| cuda::scale(scaled.as_mut_slice(), value, 0.5)),
                ),
            ];
            print_table(&title(&format!("{to} and {from}")), &measure(queue, cases)?);
        }
    }
    Ok(())
}

fn reductions(queue: &Queue, bytes: usize, title: &dyn Fn(&str) -> String) -> Result<()> {
    for dtype in DType::ALL {
        let source = random(queue, DType::F32, bytes / 4)?;
        let mut target = DeviceBuffer::zeroed(queue, DType::F32, bytes / 4)?;
        let mut cleared = DeviceBuffer::zeroed(queue, dtype, bytes / dtype.size_bytes())?;
        let len = bytes / dtype.size_bytes();
        let vectors = (0..8).map(|_| random(queue, dtype, len)).collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = vectors.iter().map(DeviceBuffer::as_slice).collect();
        let mut result = DeviceBuffer::zeroed(queue, dtype, len)?;
        let layers = |ranks| SegmentWorkspace::new(queue, len, &[0..len], ranks);
        let (mut one, mut two, mut gram_two, mut four, mut eight, mut weighted) =
            (layers(1)?, layers(2)?, layers(2)?, layers(4)?, layers(8)?, layers(4)?);
        let cases: Vec<Case<'_>> = vec![
            ("driver's copy".into(), 2 * bytes, Box::new(|| target.as_mut_slice().copy_from_device(source.as_slice()))),
            (format!("zero {dtype}"), bytes, Box::new(|| cuda::zero(cleared.as_mut_slice()))),
            (format!("squared_norms {dtype}"), bytes, Box::new(|| one.squared_norms(views[0]))),
            (format!("dots {dtype}"), 2 * bytes, Box::new(|| two.dots(views[0], views[1]))),
            (format!("gram {dtype}, 2 vectors"), 2 * bytes, Box::new(|| gram_two.gram(&views[..2]))),
            (format!("gram {dtype}, 4 vectors"), 4 * bytes, Box::new(|| four.gram(&views[..4]))),
            (format!("gram {dtype}, 8 vectors"), 8 * bytes, Box::new(|| eight.gram(&views))),
            (
                format!("combine {dtype}, 4 vectors"),
                5 * bytes,
                Box::new(|| weighted.combine(result.as_mut_slice(), &views[..4])),
            ),
        ];
        print_table(&title(&format!("zero and reductions, {dtype}")), &measure(queue, cases)?);
    }
    Ok(())
}
