//! Fits to points of known parameters, simulated messages compared with formulas, and the choice for growing worlds.

use gradsync::plan::cost::{PART_NAMES, Work, all_reduce, all_to_all, choose, work};

use super::fit::{Point, fit, leave_one_out};
use super::*;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

#[test]
fn switches_are_where_the_choice_changes() {
    let parameters = Parameters::default();
    for bytes in [MIB, 64 * MIB, GIB] {
        let load = Workload::of(bytes);
        let switches = switches(Alternatives::OF_ALL, &parameters, 8, load, 4096);
        let chosen = |ranks| choose(Alternatives::OF_ALL, ranks, 8, bytes);
        assert_eq!(switches[0], (2, Scheme::Gram));
        assert!(switches.len() > 1, "the products never stop being free: {switches:?}");
        for &(ranks, scheme) in &switches[1..] {
            assert_eq!(chosen(ranks).scheme, scheme);
            assert_ne!(chosen(ranks / 2).scheme, scheme);
        }
    }
}

#[test]
fn products_are_free_for_few_and_dear_for_many() {
    let parameters = Parameters::default();
    let share = |ranks| products_share(&parameters, World::new(ranks, 8), Workload::of(64 * MIB));
    assert!(share(2) < 0.1, "{}", share(2));
    assert!(share(4096) > 0.9, "{}", share(4096));
    let shares: Vec<f64> = doublings(4096).map(share).collect();
    assert!(shares.iter().all(|share| (0.0..1.0).contains(share)), "{shares:?}");
}

#[test]
fn a_fit_finds_the_parameters_of_exact_points() {
    let mut truth = Parameters::default();
    truth.seconds =
        std::array::from_fn(|part| truth.seconds[part] * [0.5, 1.0, 1.0, 1.3, 2.0, 1.0, 0.7, 1.5, 1.0][part]);
    let sizes = [MIB / 16, MIB, 16 * MIB, 256 * MIB, GIB].map(|bytes| bytes as f64);
    let mut points = Vec::new();
    for bytes in sizes {
        let world = World::new(4, 8);
        // The second kernel is bound by its products.
        let kernels = [Work::kernel(bytes, 0.0), Work::kernel(bytes, 5.0 * bytes)];
        for work in [all_reduce(world, bytes), all_to_all(world, bytes)].into_iter().chain(kernels) {
            points.push(Point { work, seconds: truth.time(&work) });
        }
    }
    let found = fit(&points, Parameters::default());
    assert!(found.error < 1e-2, "{found:?}");
    for (name, (found, truth)) in PART_NAMES.iter().zip(found.parameters.seconds.iter().zip(truth.seconds)) {
        assert!((0.98..1.02).contains(&(found / truth)), "{name}: {found} s, and it is {truth} s");
    }
    assert_eq!(found.is_fitted, [true, false, false, true, true, false, true, true, false]);
    // Each point is predicted by the others.
    let errors = leave_one_out(&points, Parameters::default());
    assert!(errors.iter().all(|error| error.is_some_and(|error| error.abs() < 0.02)), "{errors:?}");
}

#[test]
fn a_fit_keeps_what_no_point_tells_and_never_goes_below_zero() {
    let known = Parameters::default();
    assert_eq!(fit(&[], known).parameters, known);
    // The time falls as bytes grow: the bandwidth parameters get the lower bound.
    let world = World::new(4, 8);
    let points =
        [(MIB, 1e-3), (GIB, 1e-4)].map(|(bytes, seconds)| Point { work: all_reduce(world, bytes as f64), seconds });
    let found = fit(&points, known);
    assert!(found.parameters.seconds.iter().all(|&seconds| seconds > 0.0), "{found:?}");
    assert_eq!(found.parameters.seconds[5], known.seconds[5]);
}

#[test]
fn what_hides_is_not_fitted() {
    let truth = Parameters { seconds: Parameters::default().seconds.map(|seconds| 2.0 * seconds) };
    // With few products, memory determines the time, whatever the cost of a product.
    let points = [MIB, 16 * MIB, GIB].map(|bytes| {
        let work = Work::kernel(bytes as f64, bytes as f64 / 8.0);
        Point { work, seconds: truth.time(&work) }
    });
    let found = fit(&points, Parameters::default());
    assert!(found.error < 1e-2, "{found:?}");
    assert_eq!(found.is_fitted, [false, false, false, true, false, false, true, false, false]);
    assert_eq!(found.parameters.seconds[7], Parameters::default().seconds[7]);
    // A point without similar points is predicted by the known parameters.
    let errors = leave_one_out(&[points[0], Point { seconds: 0.0, ..points[1] }], Parameters::default());
    assert!(errors[0].is_some_and(|error| (error + 0.5).abs() < 1e-9), "{errors:?}");
    assert_eq!(errors[1], None);
}

/// The formulas add up the times of parallel messages, and ignore waiting: they are close to the simulation, and not much below it.
#[test]
fn messages_take_what_the_formulas_say() {
    let parameters = Parameters::default();
    for world in doublings(256).map(|ranks| World::new(ranks, 8)) {
        for load in [MIB / 16, 64 * MIB, GIB].map(Workload::of) {
            for scheme in Scheme::ALL.into_iter().filter(|scheme| scheme.fits(world)) {
                let formula = parameters.time(&work(scheme, world, load).unwrap());
                let simulated = simulate(&parameters, scheme, world, load).unwrap();
                let ratio = simulated / formula;
                assert!((0.6..1.1).contains(&ratio), "{scheme} {world:?} {load:?}: {simulated} s, formula {formula} s");
                if world.nodes() == 1 {
                    assert!((0.999..1.001).contains(&ratio), "{scheme} {world:?}: {simulated} s, formula {formula} s");
                }
            }
        }
    }
    assert_eq!(simulate(&parameters, Scheme::Gram, World::new(20, 8), Workload::of(MIB)), None);
    assert_eq!(simulate(&parameters, Scheme::Tree, World::new(24, 8), Workload::of(MIB)), None);
}
