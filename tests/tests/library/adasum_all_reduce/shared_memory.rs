//! Adasum over shared memory against Adasum by messages: every bit of the result and of the report is equal, however the layers are divided
//! into the ranks' parts.

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Collective, Communicator, Ranks};
use gradsync::ops::{Granularity, adasum_all_reduce};
use gradsync::{Result, Slice, SliceMut};
use gradsync_tests::array::patterns_of;
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{agreed, guarded};

use gradsync_tests::suite::adasum::case::Case;

/// A communicator that does not offer the memory which its ranks share.
pub(crate) struct WithoutWindows<'a>(pub(crate) &'a LocalCommunicator);

impl Ranks for WithoutWindows<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.0.gather_words(words)
    }
}

impl Communicator for WithoutWindows<'_> {
    fn run(&self, collective: Collective<'_>) -> Result<()> {
        self.0.run(collective)
    }

    fn exchange(&self, sends: &[(usize, Slice<'_>)], receives: &mut [(usize, SliceMut<'_>)]) -> Result<()> {
        self.0.exchange(sends, receives)
    }
}

/// Returns the bits of the arena, the bits of the weights and the number of recomputed layers, which agree on all ranks.
fn outcome(case: &Case, without_windows: bool) -> (Vec<u64>, Vec<u64>, usize) {
    agreed(&case.name(), case.world_size(), |comm| {
        let mut buffer = case.buffer(comm.rank());
        let hidden = WithoutWindows(&comm);
        let comm: &dyn Communicator = if without_windows { &hidden } else { &comm };
        let report = adasum_all_reduce(comm, &mut buffer, case.options()).unwrap();
        let weights = report.weights.expect("Gram reports weights").into_iter().map(f64::to_bits).collect();
        (patterns_of(buffer.as_slice()), weights, report.recomputed)
    })
}

/// Several layers per part, and layers that span parts; every third layer cancels, and some layers hold NaN or infinity.
fn mixed(format: Format, world_size: usize, shapes: &[&[usize]], seed: u64) -> Case {
    let mut case = Case::of(Kind::Random, format, world_size, shapes, seed);
    let opposite = Case::of(Kind::NearlyOpposite(1e-6), format, world_size, shapes, seed);
    for (rank, layers) in case.inputs.iter_mut().enumerate() {
        for (index, layer) in layers.iter_mut().enumerate() {
            if index % 3 == 1 {
                layer.clone_from(&opposite.inputs[rank][index]);
            }
            match (index % 11, layer.first_mut()) {
                (4, Some(first)) if rank == 1 => *first = f64::NAN,
                (7, Some(first)) => *first = -0.0,
                (9, Some(first)) if rank == 0 => *first = f64::INFINITY,
                _ => (),
            }
        }
    }
    case
}

#[test]
fn small_layers_have_the_bits_of_messages() {
    guarded(120, || {
        let lens: Vec<[usize; 1]> = (0..60).map(|index| [index * 37 % 101]).collect();
        let shapes: Vec<&[usize]> = lens.iter().map(<[usize; 1]>::as_slice).collect();
        for format in Format::ALL {
            for world_size in [1, 2, 3, 4, 5, 8] {
                for granularity in [Granularity::Tensor, Granularity::Whole] {
                    let case = mixed(format, world_size, &shapes, 7);
                    let case = case.with(gradsync::ops::Algorithm::Gram, granularity);
                    let (reached, sent) = (outcome(&case, false), outcome(&case, true));
                    assert!(reached == sent, "{}", case.name());
                    let narrow = matches!(format, Format::F16 | Format::BF16);
                    let cancels = world_size > 2 && granularity == Granularity::Tensor && !narrow;
                    assert!(!cancels || reached.2 > 5, "{}: {} layers cancelled", case.name(), reached.2);
                }
            }
        }
    });
}

/// Layers of several chunks, and parts larger than the number of bytes that is kept in the caches at a time.
#[test]
fn large_layers_have_the_bits_of_messages() {
    guarded(120, || {
        let shapes: [&[usize]; 8] = [&[200_003], &[7], &[410_000], &[130_000], &[1], &[70_001], &[300_000], &[90_000]];
        for (format, world_size) in [(Format::F32, 2), (Format::F64, 3), (Format::BF16, 4)] {
            let case = mixed(format, world_size, &shapes, 11);
            assert!(outcome(&case, false) == outcome(&case, true), "{}", case.name());
        }
    });
}
