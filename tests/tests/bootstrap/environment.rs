//! Launcher variables, accepted and refused ones, and secrets.

use std::collections::HashMap;

use gradsync::Error;
use gradsync::bootstrap::{BootstrapError, Launch, Rendezvous, Secret};

const TORCHRUN: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
const OPEN_MPI: [&str; 4] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
const PMI: [&str; 3] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"];
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

#[test]
fn each_launcher_by_itself() {
    for names in [&TORCHRUN[..], &OPEN_MPI, &PMI, &SLURM] {
        let found = launch(&set(names)).unwrap();
        assert_eq!((found.rank, found.world_size, found.local_rank), (5, 8, Some(1)), "{names:?}");
        assert_eq!(found.local_world_size, (names.len() == 4).then_some(4), "{names:?}");
        assert_eq!(found.master, None);
        let least = launch(&set(&names[..2])).unwrap();
        assert_eq!((least.rank, least.world_size, least.local_rank, least.local_world_size), (5, 8, None, None));
    }
}

#[test]
fn launchers_that_agree_complete_each_other() {
    let both = [set(&SLURM), set(&TORCHRUN)].concat();
    assert_eq!(launch(&both).unwrap().local_world_size, Some(4));
    let all = [set(&TORCHRUN[..2]), set(&OPEN_MPI[..2]), set(&PMI[..2]), set(&SLURM)].concat();
    assert_eq!(launch(&all).unwrap().local_rank, Some(1));
}

#[test]
fn launchers_that_disagree_are_refused() {
    let outer_job = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    let error = assert_says(
        launch(&[set(&TORCHRUN), outer_job.to_vec()].concat()),
        &["RANK=5", "SLURM_PROCID=0", "unset SLURM_PROCID SLURM_NTASKS SLURM_LOCALID"],
    );
    assert!(matches!(error, BootstrapError::ConflictingVariables { left_value: 5, right_value: 0, .. }), "{error:?}");
    for index in 0..3 {
        let mut other = set(&OPEN_MPI);
        other[index].1 = "2";
        let words = [format!("{}=2", OPEN_MPI[index]), format!("{}=", TORCHRUN[index])];
        assert_says(launch(&[set(&TORCHRUN), other].concat()), &[&words[0], &words[1]]);
    }
}

#[test]
fn half_a_pair_is_refused_by_name() {
    for names in [&TORCHRUN, &OPEN_MPI] {
        for (absent, present) in [(0, 1), (1, 0)] {
            let error = assert_says(launch(&[(names[present], "2")]), &[names[absent], names[present]]);
            assert!(
                matches!(&error, BootstrapError::MissingVariable { variable, .. } if variable == names[absent]),
                "{error:?}"
            );
        }
    }
    assert_says(
        launch(&[set(&TORCHRUN), vec![("SLURM_NTASKS", "8")]].concat()),
        &["SLURM_PROCID", "unset SLURM_NTASKS"],
    );
    assert_says(launch(&[set(&TORCHRUN), vec![("MASTER_ADDR", "host")]].concat()), &["MASTER_PORT"]);
    assert_says(launch(&[set(&TORCHRUN), vec![("MASTER_PORT", "80")]].concat()), &["MASTER_ADDR"]);
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
    let names: Vec<&str> = [&TORCHRUN[..], &OPEN_MPI, &PMI, &SLURM].concat();
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
fn a_secret_is_a_generated_one() {
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
fn secrets_stay_unseen() {
    let secret = Secret::generate().unwrap();
    let text = secret.reveal();
    assert_eq!(format!("{secret:?}"), "Secret(..)");
    let rendezvous = format!("{:?}", Rendezvous::tcp("host", 29500, secret));
    assert!(!rendezvous.contains(&text[16..32]), "{rendezvous}");
}
