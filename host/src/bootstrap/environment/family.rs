//! The variables by which launchers tell a process its rank, and the choice among the variables of several launchers.
//!
//! Launchers nest: srun starts one torchrun or one mpirun on each machine, and a batch job sets its own numbers around both. The numbers
//! of the inner launcher count. No variable tells which one that is, but schedulers are always outside of MPI's launchers, and torchrun is
//! inside of both, so the families are tried in a fixed order.

use crate::error::BootstrapError;

/// The most ranks of a group: rank 0 holds a connection and two threads for each. A larger number is a mistake, and the memory for so many
/// ranks might not exist.
pub(crate) const WORLD_SIZE_LIMIT: usize = 1 << 16;

/// The variables of one launcher, or of launchers that share some. Of several names for one number, the first that is set counts.
struct Family {
    rank: &'static [&'static str],
    world_size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world_size: &'static [&'static str],
    launcher: Launcher,
}

/// The kind of a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum Launcher {
    /// torchrun, `gradsync launch` or a script: it sets the address of rank 0.
    Plain,
    /// The launcher of an MPI library.
    Mpi,
    /// A scheduler, whose processes are an MPI job if MPI supports this scheduler.
    Scheduler,
}

/// Inner launchers come first.
const FAMILIES: [Family; 8] = [
    // torchrun, and launchers that set the same variables
    Family {
        rank: &["RANK"],
        world_size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world_size: &["LOCAL_WORLD_SIZE"],
        launcher: Launcher::Plain,
    },
    // mpirun of Open MPI
    Family {
        rank: &["OMPI_COMM_WORLD_RANK"],
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        launcher: Launcher::Mpi,
    },
    // mpirun_rsh of MVAPICH2
    Family {
        rank: &["MV2_COMM_WORLD_RANK"],
        world_size: &["MV2_COMM_WORLD_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        launcher: Launcher::Mpi,
    },
    // mpiexec of MPICH and Intel MPI (Hydra), of HPE Cray (PALS), of MVAPICH 3 and later; srun with PMI
    Family {
        rank: &["PMI_RANK", "PALS_RANKID"],
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MVP_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"],
        launcher: Launcher::Mpi,
    },
    // jsrun
    Family {
        rank: &["JSM_NAMESPACE_RANK"],
        world_size: &["JSM_NAMESPACE_SIZE"],
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_world_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
        launcher: Launcher::Scheduler,
    },
    // flux run
    Family {
        rank: &["FLUX_TASK_RANK"],
        world_size: &["FLUX_JOB_SIZE"],
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        local_world_size: &[],
        launcher: Launcher::Scheduler,
    },
    // PMIx, which every launcher with PMIx sets beside its own; many set the rank only
    Family {
        rank: &["PMIX_RANK"],
        world_size: &["PMIX_SIZE"],
        local_rank: &["PMIX_LOCAL_RANK"],
        local_world_size: &["PMIX_LOCAL_SIZE"],
        launcher: Launcher::Scheduler,
    },
    // srun
    Family {
        rank: &["SLURM_PROCID"],
        world_size: &["SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: &["SLURM_LOCALID"],
        local_world_size: &[],
        launcher: Launcher::Scheduler,
    },
];

/// A number and the variable that it was read from.
#[derive(Clone, Copy)]
pub(super) struct Setting {
    pub(super) variable: &'static str,
    pub(super) value: usize,
}

/// The numbers of this process.
pub(super) struct Numbers {
    pub(super) launcher: Launcher,
    pub(super) rank: Setting,
    pub(super) world_size: Setting,
    pub(super) local_rank: Option<Setting>,
    pub(super) local_world_size: Option<Setting>,
}

/// The names of all these variables.
pub(super) fn variables() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(Family::variables)
}

/// The numbers of the inner launcher, with the numbers on the machine from outer launchers that agree about rank and world size.
///
/// # Errors
/// As [`Launch::from_env`](super::Launch::from_env), for all but `MASTER_ADDR` and `MASTER_PORT`.
pub(super) fn numbers(variable: &impl Fn(&str) -> Option<String>) -> Result<Numbers, BootstrapError> {
    let mut complete = FAMILIES.iter().filter(|family| family.is_complete(variable));
    let Some(inner) = complete.next() else {
        let looked_for = || variables().collect::<Vec<_>>().join(", ");
        let half = FAMILIES.iter().find_map(|family| family.half(variable));
        return Err(half.unwrap_or_else(|| BootstrapError::NoLauncher { looked_for: looked_for() }));
    };
    let mut numbers = inner.read(variable)?;
    // In an interactive session, whose scheduler started one task, each rank of a faulty script would otherwise be the only rank of a job.
    if let (1, Some(half)) = (numbers.world_size.value, FAMILIES[0].half(variable)) {
        return Err(half);
    }
    for outer in complete {
        // The inner launcher has not set these variables, so their faults do not matter.
        let Ok(other) = outer.read(variable) else { continue };
        if other.rank.value == numbers.rank.value && other.world_size.value == numbers.world_size.value {
            numbers.local_rank = numbers.local_rank.or(other.local_rank);
            numbers.local_world_size = numbers.local_world_size.or(other.local_world_size);
        } else if outer.launcher == Launcher::Mpi && inner.launcher != Launcher::Mpi && numbers.local_rank.is_none() {
            return Err(conflict(&numbers, &other, outer));
        }
    }
    if let (Some(rank), Some(size)) = (numbers.local_rank, numbers.local_world_size) {
        below("local rank", rank, size)?;
    }
    match numbers.local_world_size {
        Some(local) if local.value > numbers.world_size.value => {
            let whole = numbers.world_size;
            let reason = format!("a machine has no more ranks than {}, which is {}", whole.variable, whole.value);
            Err(invalid(local.variable, local.value.to_string(), reason))
        }
        _ => Ok(numbers),
    }
}

impl Family {
    fn variables(&self) -> impl Iterator<Item = &'static str> {
        [self.rank, self.world_size, self.local_rank, self.local_world_size].into_iter().flatten().copied()
    }

    /// The variables that are set of its rank and of its world size.
    fn set(&self, variable: &impl Fn(&str) -> Option<String>) -> [Option<&'static str>; 2] {
        [self.rank, self.world_size].map(|names| names.iter().copied().find(|name| variable(name).is_some()))
    }

    fn is_complete(&self, variable: &impl Fn(&str) -> Option<String>) -> bool {
        self.set(variable).iter().all(Option::is_some)
    }

    /// The error where it has a rank or a world size, and not both.
    fn half(&self, variable: &impl Fn(&str) -> Option<String>) -> Option<BootstrapError> {
        let (missed, other) = match self.set(variable) {
            [None, Some(other)] => (self.rank[0], other),
            [Some(other), None] => (self.world_size[0], other),
            _ => return None,
        };
        let reason = format!("{other} is; set both, or `unset {other}` if its launcher did not start this process");
        Some(missing(missed, &reason))
    }

    /// The numbers of a complete family.
    fn read(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<Numbers, BootstrapError> {
        let get = |names: &'static [&'static str]| match names.iter().find_map(|name| Some((*name, variable(name)?))) {
            Some((name, text)) => number(name, text).map(Some),
            None => Ok(None),
        };
        let required = |names: &'static [&'static str]| {
            get(names)?.ok_or_else(|| missing(names[0], "its launcher sets it beside its other variables"))
        };
        let numbers = Numbers {
            launcher: self.launcher,
            rank: required(self.rank)?,
            world_size: required(self.world_size)?,
            local_rank: get(self.local_rank)?,
            local_world_size: get(self.local_world_size)?,
        };
        for size in [Some(numbers.world_size), numbers.local_world_size].into_iter().flatten() {
            if size.value == 0 {
                return Err(invalid(size.variable, "0".into(), "a group has at least one rank".into()));
            }
        }
        for number in [Some(numbers.world_size), numbers.local_world_size, numbers.local_rank].into_iter().flatten() {
            if number.value > WORLD_SIZE_LIMIT {
                let reason = format!("a group has at most {WORLD_SIZE_LIMIT} ranks");
                return Err(invalid(number.variable, number.value.to_string(), reason));
            }
        }
        below("rank", numbers.rank, numbers.world_size)?;
        Ok(numbers)
    }
}

/// The error where RANK and WORLD_SIZE, which any script may have set, contradict the launcher of an MPI job: either may be the inner one.
fn conflict(inner: &Numbers, outer: &Numbers, family: &Family) -> BootstrapError {
    let pairs = [(inner.rank, outer.rank), (inner.world_size, outer.world_size)];
    let (left, right) = pairs.into_iter().find(|(left, right)| left.value != right.value).unwrap_or(pairs[0]);
    let others: Vec<_> = family.variables().collect();
    BootstrapError::ConflictingVariables {
        left: left.variable.to_owned(),
        left_value: left.value,
        right: right.variable.to_owned(),
        right_value: right.value,
        remedy: format!(
            "two launchers claim this process; unset the variables of the one that did not start it: `unset {} {}` or `unset {}`",
            inner.rank.variable,
            inner.world_size.variable,
            others.join(" ")
        ),
    }
}

fn number(variable: &'static str, text: String) -> Result<Setting, BootstrapError> {
    match text.parse() {
        Ok(value) => Ok(Setting { variable, value }),
        Err(_) => Err(invalid(variable, text, format!("it must be a whole number from 0 to {WORLD_SIZE_LIMIT}"))),
    }
}

fn below(description: &str, rank: Setting, size: Setting) -> Result<(), BootstrapError> {
    if rank.value < size.value {
        return Ok(());
    }
    let reason = format!("a {description} must be less than {}, which is {}", size.variable, size.value);
    Err(invalid(rank.variable, rank.value.to_string(), reason))
}

pub(super) fn missing(variable: &str, reason: &str) -> BootstrapError {
    BootstrapError::MissingVariable { variable: variable.to_owned(), reason: reason.to_owned() }
}

pub(super) fn invalid(variable: &str, value: String, reason: String) -> BootstrapError {
    BootstrapError::InvalidVariable { variable: variable.to_owned(), value, reason }
}
