//! Collectives × dtypes × operations × rank counts.

use gradsync::comm::ReduceOp;
use gradsync::comm::{Collectives, Ranks};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::{LENS, assert_reduced, inputs, ours};
use gradsync_tests::inputs::edges;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::reduce::{self, Op};
use gradsync_tests::ranks::{agreed, guarded, on_ranks};
use gradsync_tests::tolerance::assert_equal;

use crate::WORLD_SIZES;

#[test]
fn all_reduce() {
    guarded(120, || {
        for format in Format::ALL {
            for op in Op::ALL {
                for world_size in WORLD_SIZES {
                    for len in LENS {
                        let inputs = inputs(format, world_size, len);
                        let what = format!("all_reduce {op:?} of {len} {format:?} over {world_size}");
                        let got = agreed(&what, world_size, |comm| {
                            let mut data = Array::new(format, &inputs[comm.rank()]);
                            comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
                            data
                        });
                        assert_reduced(&what, op, format, &got.values(), &inputs);
                    }
                }
            }
        }
    });
}

#[test]
fn reduce_scatter() {
    guarded(120, || {
        for format in Format::ALL {
            for op in Op::ALL {
                for world_size in WORLD_SIZES {
                    for len in [0, 1, 33, 600] {
                        let inputs = inputs(format, world_size, len * world_size);
                        let what = format!("reduce_scatter {op:?} of {len} {format:?} each over {world_size}");
                        let shards = on_ranks(world_size, |comm| {
                            let input = Array::new(format, &inputs[comm.rank()]);
                            let mut output = Array::unwritten(format, len);
                            comm.reduce_scatter(input.slice(), output.slice_mut(), ours(op)).unwrap();
                            output.values()
                        });
                        assert_reduced(&what, op, format, &shards.concat(), &inputs);
                    }
                }
            }
        }
    });
}

#[test]
fn all_gather_and_in_place() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in WORLD_SIZES {
                for len in LENS {
                    let inputs = inputs(format, world_size, len);
                    let what = format!("all_gather of {len} {format:?} over {world_size}");
                    let (gathered, in_place) = agreed(&what, world_size, |comm| {
                        let input = Array::new(format, &inputs[comm.rank()]);
                        let mut output = Array::unwritten(format, len * world_size);
                        comm.all_gather(input.slice(), output.slice_mut()).unwrap();
                        let mut whole = vec![7.0; len * world_size];
                        whole[comm.rank() * len..(comm.rank() + 1) * len].copy_from_slice(&inputs[comm.rank()]);
                        let mut data = Array::new(format, &whole);
                        comm.all_gather_in_place(data.slice_mut()).unwrap();
                        (output, data)
                    });
                    assert_equal(&what, &gathered.values(), &inputs.concat());
                    assert_equal(&format!("{what} in place"), &in_place.values(), &inputs.concat());
                }
            }
        }
    });
}

#[test]
fn all_to_all() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in WORLD_SIZES {
                for len in [0, 1, 33, 600] {
                    let inputs = inputs(format, world_size, len * world_size);
                    // No rank, every second rank, or every rank has its operand in place.
                    for in_place in 0..3 {
                        let outputs = on_ranks(world_size, |comm| {
                            let mut input = Array::new(format, &inputs[comm.rank()]);
                            if comm.rank() % 2 < in_place {
                                comm.all_to_all_in_place(input.slice_mut()).unwrap();
                                return input.values();
                            }
                            let mut output = Array::unwritten(format, len * world_size);
                            comm.all_to_all(input.slice(), output.slice_mut()).unwrap();
                            assert_equal("the input", &input.values(), &inputs[comm.rank()]);
                            output.values()
                        });
                        for (rank, output) in outputs.iter().enumerate() {
                            let what = format!(
                                "all_to_all of {len} {format:?} over {world_size}, rank {rank} ({in_place} of 2 in place)"
                            );
                            assert_equal(&what, output, &reduce::all_to_all(&inputs, rank));
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn broadcast_from_every_root() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in WORLD_SIZES {
                for root in 0..world_size {
                    let inputs = inputs(format, world_size, 257);
                    let what = format!("broadcast of {format:?} from {root} of {world_size}");
                    let got = agreed(&what, world_size, |comm| {
                        let mut data = Array::new(format, &inputs[comm.rank()]);
                        comm.broadcast(data.slice_mut(), root).unwrap();
                        data
                    });
                    assert_equal(&what, &got.values(), &inputs[root]);
                }
            }
        }
    });
}

/// NaN is the result of any maximum or minimum with a NaN, and infinities of both signs sum to NaN. The sum max + max − max is max, not
/// infinity, because sums run in f64.
#[test]
fn edge_values() {
    guarded(60, || {
        for format in [Format::F32, Format::F16, Format::BF16] {
            let mut inputs = vec![edges(format); 3];
            let len = inputs[0].len();
            inputs[1].rotate_left(1);
            inputs[2].rotate_left(len / 2);
            for op in [Op::Sum, Op::Max, Op::Min] {
                let what = format!("{op:?} of {format:?} edges");
                let got = agreed(&what, 3, |comm| {
                    let mut data = Array::new(format, &inputs[comm.rank()]);
                    comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
                    data.values()
                        .into_iter()
                        .map(|x| if x.is_nan() { f64::NAN } else { x }.to_bits())
                        .collect::<Vec<_>>()
                });
                let got: Vec<f64> = got.into_iter().map(f64::from_bits).collect();
                assert_equal(&what, &got, &reduce::all_reduce(op, format, &inputs));
            }
            let max = format.max_finite();
            let sum = agreed("max + max - max", 3, |comm| {
                let mut data = Array::new(format, &[[max, max, -max][comm.rank()]]);
                comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
                data
            });
            assert_eq!(sum.values(), [max], "{format:?}");
        }
    });
}

#[test]
fn nan_is_bitwise_the_same_on_all_ranks() {
    guarded(60, || {
        for format in Format::ALL {
            for op in Op::ALL {
                let got = agreed(&format!("{op:?} with NaN on one rank"), 4, |comm| {
                    let mut data = Array::new(format, &[if comm.rank() == 2 { f64::NAN } else { 1.0 }, 2.0]);
                    comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
                    data
                });
                assert!(got.values()[0].is_nan() && !got.values()[1].is_nan(), "{format:?} {op:?}: {got:?}");
            }
        }
    });
}

#[test]
fn ranks_know_themselves_and_meet_at_barriers() {
    guarded(60, || {
        for world_size in WORLD_SIZES {
            let arrived = std::sync::atomic::AtomicUsize::new(0);
            let ranks = on_ranks(world_size, |comm| {
                assert_eq!(comm.world_size(), world_size);
                for round in 1..=20 {
                    arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    comm.barrier().unwrap();
                    let seen = arrived.load(std::sync::atomic::Ordering::SeqCst);
                    assert!(seen >= round * world_size, "left the barrier after {seen} arrivals, round {round}");
                    comm.barrier().unwrap();
                }
                comm.rank()
            });
            assert_eq!(ranks, (0..world_size).collect::<Vec<_>>());
        }
    });
}

#[test]
fn no_ranks_is_an_error() {
    for none in [0, 65_537, usize::MAX] {
        assert!(gradsync::comm::local::group(none).is_err(), "{none} ranks");
    }
    assert!(gradsync::comm::local::run_each(0, |_| ()).is_err());
}
