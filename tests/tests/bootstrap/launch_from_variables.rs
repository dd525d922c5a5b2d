//! Launcher variables, accepted and refused ones, and secrets.

use std::collections::HashMap;

use gradsync::Error;
use gradsync::bootstrap::{BootstrapError, Launch, Rendezvous, Secret};

const TORCHRUN: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
const OPEN_MPI: [&str; 4] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
const MVAPICH: [&str; 4] =
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"];
const HYDRA: [&str; 4] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
const PMI: [&str; 4] = ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"];
const PALS: [&str; 4] = ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"];
const MVAPICH_3: [&str; 3] = ["PMI_RANK", "PMI_SIZE", "MVP_COMM_WORLD_LOCAL_RANK"];
const JSM: [&str; 4] =
    ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"];
const FLUX: [&str; 3] = ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"];
const PMIX: [&str; 4] = ["PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"];
const SLURM: [&str; 3] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"];

fn launch(variables: &[(&str, &str)]) -> Result<Launch, BootstrapError> {
    let variables: HashMap<&str, &str> = variables.iter().copied().collect();
    match Launch::from_variables(|name| variables.get(name).map(|&value| value.to_owned())) {
        Ok(launch) => Ok(launch),
        Err(Error::Bootstrap(error)) => Err(error),
        Err(other) => panic!("{other:?}"),
    }
}

/// The variables of rank 5 of 8, the second of four ranks on its machine.
fn set(names: &'static [&'static str]) -> Vec<(&'static str, &'static str)> {
    names.iter().copied().zip(["5", "8", "1", "4"]).collect()
}

#[track_caller]
fn assert_says(outcome: Result<Launch, BootstrapError>, words: &[&str]) -> BootstrapError {
    let error = outcome.expect_err("refused");
    for word in words {
        assert!(error.to_string().contains(word), "\"{error}\" does not say {word}");
    }
    error
}

/// Every family of variables.
fn families() -> Vec<&'static [&'static str]> {
    vec![&TORCHRUN, &OPEN_MPI, &MVAPICH, &HYDRA, &PMI, &PALS, &MVAPICH_3, &JSM, &FLUX, &PMIX, &SLURM]
}

/// The variables of a launcher that has started a single process on each of two machines.
fn outer(names: &'static [&'static str]) -> Vec<(&'static str, &'static str)> {
    names.iter().copied().zip(["1", "2", "0", "1"]).collect()
}

#[test]
fn each_launcher_by_itself() {
    for names in families() {
        let found = launch(&set(names)).unwrap();
        assert_eq!((found.rank, found.world_size, found.local_rank), (5, 8, Some(1)), "{names:?}");
        assert_eq!(found.local_world_size, (names.len() == 4).then_some(4), "{names:?}");
        assert_eq!((found.device(), found.master), (1, None), "{names:?}");
        let least = launch(&set(&names[..2])).unwrap();
        assert_eq!((least.rank, least.world_size, least.local_rank, least.local_world_size), (5, 8, None, None));
    }
}

#[test]
fn launchers_that_agree_complete_each_other() {
    let both = [set(&SLURM), set(&TORCHRUN)].concat();
    assert_eq!(launch(&both).unwrap().local_world_size, Some(4));
    for names in families() {
        let all = [set(&TORCHRUN[..2]), set(names)].concat();
        assert_eq!(launch(&all).unwrap().local_rank, Some(1), "{names:?}");
    }
    // srun with PMI tells the rank twice, and the number on the machine once.
    let all = [set(&PMI[..2]), set(&SLURM)].concat();
    assert_eq!(launch(&all).unwrap().local_rank, Some(1));
}

/// `srun torchrun`, `srun mpirun`, `mpirun torchrun`: each launcher has its own numbers.
#[test]
fn the_inner_one_of_nested_launchers_counts() {
    let of = |variables: Vec<(&str, &str)>| {
        let found = launch(&variables).unwrap_or_else(|error| panic!("{variables:?}: {error}"));
        (found.rank, found.world_size, found.local_rank)
    };
    let schedulers: [&[&str]; 4] = [&SLURM, &FLUX, &PMIX, &JSM];
    let of_mpi: [&[&str]; 4] = [&OPEN_MPI, &MVAPICH, &HYDRA, &PALS];
    for scheduler in schedulers {
        for inner in [&TORCHRUN[..]].into_iter().chain(of_mpi) {
            assert_eq!(of([outer(scheduler), set(inner)].concat()), (5, 8, Some(1)), "{inner:?} in {scheduler:?}");
        }
        // Numbers that a script has exported count too; the outer number on the machine belongs to another process.
        assert_eq!(of([outer(scheduler), set(&TORCHRUN[..2])].concat()), (5, 8, None), "{scheduler:?}");
    }
    for mpi in of_mpi {
        assert_eq!(of([outer(mpi), set(&TORCHRUN)].concat()), (5, 8, Some(1)), "torchrun in {mpi:?}");
    }
    // srun with PMI around mpirun.
    assert_eq!(of([outer(&SLURM), outer(&PMI[..2]), set(&OPEN_MPI)].concat()), (5, 8, Some(1)));
}

#[test]
fn half_a_family_is_no_error_beside_a_whole_one() {
    for half in families() {
        for variable in &half[..2] {
            for whole in [&TORCHRUN[..], &OPEN_MPI, &SLURM] {
                if whole[..2].contains(variable) {
                    continue;
                }
                let found = launch(&[vec![(*variable, "7")], set(whole)].concat()).unwrap();
                assert_eq!((found.rank, found.world_size), (5, 8), "{variable} beside {whole:?}");
            }
        }
    }
    // A scheduler's single task does not make a rank of a script with half of the numbers the only one.
    let task = vec![("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    for (variable, missing) in [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")] {
        assert_says(launch(&[vec![(variable, "1")], task.clone()].concat()), &[variable, missing]);
    }
    // Faults of the outer launcher's variables do not matter either.
    let found = launch(&[vec![("SLURM_PROCID", "x"), ("SLURM_NTASKS", "0")], set(&TORCHRUN)].concat()).unwrap();
    assert_eq!(found.rank, 5);
}

#[test]
fn numbers_of_a_script_that_contradict_mpi_are_refused() {
    for names in [&OPEN_MPI, &MVAPICH, &HYDRA] {
        let error = assert_says(
            launch(&[set(&TORCHRUN[..2]), outer(names)].concat()),
            &["RANK=5", &format!("{}=1", names[0]), "unset RANK WORLD_SIZE", &format!("unset {}", names[0])],
        );
        assert!(
            matches!(error, BootstrapError::ConflictingVariables { left_value: 5, right_value: 1, .. }),
            "{error:?}"
        );
    }
}

#[test]
fn half_a_pair_is_refused_by_name() {
    for names in families() {
        for (absent, present) in [(0, 1), (1, 0)] {
            let error = assert_says(launch(&[(names[present], "2")]), &[names[present]]);
            assert!(matches!(error, BootstrapError::MissingVariable { .. }), "{error:?}");
            if names != PALS {
                assert_says(launch(&[(names[present], "2")]), &[names[absent]]);
            }
        }
    }
    assert_says(launch(&[("SLURM_NTASKS", "8")]), &["SLURM_PROCID", "unset SLURM_NTASKS"]);
    assert_says(launch(&[set(&TORCHRUN), vec![("MASTER_ADDR", "host")]].concat()), &["MASTER_PORT"]);
    assert_says(launch(&[set(&TORCHRUN), vec![("MASTER_PORT", "80")]].concat()), &["MASTER_ADDR"]);
}

/// A scheduler that gives every task a GPU of its own shows only that one.
#[test]
fn a_single_visible_gpu_is_device_0() {
    for (visible, device) in [("3", 0), ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 0), ("0,1,2,3", 1), ("", 1)] {
        let variables = [set(&SLURM), vec![("CUDA_VISIBLE_DEVICES", visible)]].concat();
        assert_eq!(launch(&variables).unwrap().device(), device, "{visible:?}");
    }
    let mut found = launch(&set(&TORCHRUN)).unwrap();
    found.local_rank = Some(1 << 32);
    assert_eq!(found.device(), u32::MAX, "a number beyond the range is not another GPU's");
}

#[test]
fn numbers_beyond_the_limit_are_refused_by_name() {
    let huge = ["65537", "100000000", "4294967296", "99999999999", "18446744073709551615", "18446744073709551616"];
    for names in families() {
        for (index, variable) in names.iter().enumerate().skip(1) {
            for value in huge {
                let mut variables = set(names);
                variables[index].1 = value;
                let error = assert_says(launch(&variables), &[variable, value]);
                assert!(matches!(error, BootstrapError::InvalidVariable { .. }), "{error:?}");
            }
        }
    }
    assert!(launch(&[("RANK", "65535"), ("WORLD_SIZE", "65536")]).is_ok());
    let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")];
    assert_says(launch(&local), &["LOCAL_WORLD_SIZE", "WORLD_SIZE, which is 2"]);
}

#[test]
fn impossible_addresses_are_refused_and_brackets_taken() {
    let of = |address: &'static str| {
        launch(&[set(&TORCHRUN), vec![("MASTER_ADDR", address), ("MASTER_PORT", "29500")]].concat())
    };
    for (address, host) in [("[::1]", "::1"), (" node-7\n", "node-7"), ("fe80::1%eth0", "fe80::1%eth0")] {
        assert_eq!(of(address).unwrap().master, Some((host.to_owned(), 29500)));
    }
    for address in ["tcp://node-7", "node-7:29500", "[::1]:29500", "node 7", "10.0.0.256", "$(hostname)", "", " "] {
        let error = assert_says(of(address), &["MASTER_ADDR", &format!("{address:?}")]);
        assert!(matches!(error, BootstrapError::InvalidVariable { .. }), "{error:?}");
    }
}

#[test]
fn the_port_of_gradsync_takes_the_place_of_the_master_port() {
    let of = |port: &'static str| [vec![("GRADSYNC_PORT", port)], set(&TORCHRUN)].concat();
    let at = |port| [of(port), vec![("MASTER_ADDR", "node-7"), ("MASTER_PORT", "29500")]].concat();
    assert_eq!(launch(&at("7000")).unwrap().master, Some(("node-7".to_owned(), 7000)));
    assert_says(launch(&at("0")), &["GRADSYNC_PORT"]);
    assert_eq!(launch(&of("7000")).unwrap().master, None, "the ranks do not meet at an address");
}

#[test]
fn values_that_cannot_be_are_refused_by_name() {
    for (variable, value) in [
        ("RANK", "five"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "8"),
        ("WORLD_SIZE", "8.0"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_ADDR", ""),
    ] {
        let mut variables = [set(&TORCHRUN), vec![("MASTER_ADDR", "host"), ("MASTER_PORT", "29500")]].concat();
        variables.iter_mut().filter(|(name, _)| *name == variable).for_each(|setting| setting.1 = value);
        let error = assert_says(launch(&variables), &[variable, &format!("{value:?}")]);
        assert!(matches!(error, BootstrapError::InvalidVariable { .. }), "{error:?}");
    }
}

#[test]
fn without_a_launcher_all_variables_are_listed() {
    // These variables alone do not give a rank.
    let outcome = launch(&[("LOCAL_RANK", "0"), ("MASTER_ADDR", "host"), ("SLURM_LOCALID", "0")]);
    let names: Vec<&str> = families().concat();
    assert_says(outcome, &names);
}

#[test]
fn the_master_counts_whoever_launched() {
    for names in [&TORCHRUN[..], &SLURM] {
        let variables = [set(names), vec![("MASTER_ADDR", "node-7"), ("MASTER_PORT", "29500")]].concat();
        assert_eq!(launch(&variables).unwrap().master, Some(("node-7".to_owned(), 29500)));
    }
    let without = launch(&set(&TORCHRUN)).unwrap();
    let error = Rendezvous::from_env(&without).expect_err("nobody says where").to_string();
    assert!(error.contains("MASTER_ADDR") && error.contains("MASTER_PORT"), "{error}");
}

#[test]
fn secret_is_a_generated_one() {
    let text = Secret::generate().unwrap().reveal();
    assert_ne!(text, Secret::generate().unwrap().reveal());
    let digits = text.strip_prefix("gradsync-secret-").expect("a form that is known when it is seen");
    assert_eq!(digits.len(), 72);
    assert_eq!(format!(" {text}\n").parse::<Secret>().unwrap().reveal(), text);
    // The last 8 digits are the check, as a launcher in another language would compute it.
    let known = format!("gradsync-secret-{}", "0123456789abcdef".repeat(4));
    assert_eq!(format!("{known}4b9a891d").parse::<Secret>().map(|secret| secret.reveal()).unwrap()[..80], known);
    // Secrets that a person would choose, and altered forms of a generated secret.
    let altered = text.replacen(&digits[..8], if digits.starts_with('0') { "10000000" } else { "00000000" }, 1);
    let upper = format!("gradsync-secret-{}", "A".repeat(72));
    let foreign = format!("gradsync-secret-{}", "é".repeat(36));
    for (weak, reason) in [
        ("", "0 characters"),
        ("tellnobody", "10 characters"),
        ("d41d8cd98f00b204e9800998ecf8427e", "does not begin with `gradsync-secret-`"),
        (&text[..text.len() - 1], "71 characters follow"),
        (&format!("{text}0"), "73 characters follow"),
        (&upper, "digits from 0 to 9 and a to f"),
        (&foreign, "36 characters follow"),
        (&format!("gradsync-secret-{}", "0".repeat(72)), "check does not fit"),
        (&altered, "check does not fit"),
    ] {
        let error = weak.parse::<Secret>().expect_err("weak");
        assert!(matches!(error, Error::Bootstrap(BootstrapError::WeakSecret { .. })), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(reason) && error.contains("`gradsync secret`"), "{error}");
        let end = weak.get(weak.len().saturating_sub(8)..).unwrap_or("é");
        assert!(end.is_empty() || !error.contains(end), "it shows the secret: {error}");
    }
}

#[test]
fn secret_stays_unseen_in_debug_and_errors() {
    let secret = Secret::generate().unwrap();
    let text = secret.reveal();
    assert_eq!(format!("{secret:?}"), "Secret(..)");
    let rendezvous = format!("{:?}", Rendezvous::tcp("host", 29500, secret));
    assert!(!rendezvous.contains(&text[16..32]), "{rendezvous}");
}
