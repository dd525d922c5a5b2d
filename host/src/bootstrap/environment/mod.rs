//! [`Launch`]: the rank and the world size of this process, from its launcher's environment variables, and where rank 0 is.

mod address;
mod family;
mod torchrun;

use std::time::Duration;

pub(super) use self::address::host;
pub(crate) use self::family::WORLD_SIZE_LIMIT;
use self::family::{Launcher, invalid, missing};
use self::torchrun::Torchrun;
use crate::error::BootstrapError;
use crate::error::{Error, Result};
use crate::trace;

/// The variables of the address at which rank 0 listens. The third takes the place of the second.
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
const OWN_PORT: &str = "GRADSYNC_PORT";
/// The variables of the deadlines of joins and of calls, in seconds.
const JOIN_DEADLINE: &str = "GRADSYNC_JOIN_DEADLINE";
const CALL_DEADLINE: &str = "GRADSYNC_DEADLINE";
/// The longest deadline that a variable sets: a clock can count so many seconds.
const LONGEST_DEADLINE: f64 = 1e9;

/// The rank of this process and the world size, as its launcher has set them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// The number of this rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub world_size: usize,
    /// The number of this rank among the ranks of its machine (the local rank).
    pub local_rank: Option<usize>,
    /// The number of ranks on this machine.
    pub local_world_size: Option<usize>,
    /// The host and the port on which rank 0 listens: `MASTER_ADDR`, and `GRADSYNC_PORT` or else `MASTER_PORT`. Under torchrun, whose
    /// agent listens at `MASTER_PORT`, rank 0 listens at another port unless `GRADSYNC_PORT` is set.
    pub master: Option<(String, u16)>,
    /// Whether this process sees a single GPU.
    has_one_gpu: bool,
    launcher: Launcher,
    /// The job of torchrun, if rank 0 needs another port than `MASTER_PORT`.
    pub(super) torchrun: Option<Torchrun>,
}

impl Launch {
    /// The ordinal of the GPU for this rank, among those that this process sees: its local rank; 0 where the launcher does not set one, and
    /// where `CUDA_VISIBLE_DEVICES` names a single GPU, as schedulers set it that give every task its own.
    pub fn device(&self) -> u32 {
        if self.has_one_gpu {
            return 0;
        }
        // No machine has a GPU of that number, so the driver refuses it.
        u32::try_from(self.local_rank.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// Reads the environment of this process.
    ///
    /// | launcher | rank and world size | on the machine |
    /// |---|---|---|
    /// | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | MVAPICH2 | `MV2_COMM_WORLD_RANK`, `_SIZE` | `MV2_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    /// | HPE Cray PALS | `PMI_RANK` or `PALS_RANKID`, `PMI_SIZE` | `PMI_LOCAL_RANK` or `PALS_LOCAL_RANKID`, `_LOCAL_SIZE` |
    /// | jsrun | `JSM_NAMESPACE_RANK`, `_SIZE` | `JSM_NAMESPACE_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | Flux | `FLUX_TASK_RANK`, `FLUX_JOB_SIZE` | `FLUX_TASK_LOCAL_ID` |
    /// | PMIx | `PMIX_RANK`, `PMIX_SIZE` | `PMIX_LOCAL_RANK`, `PMIX_LOCAL_SIZE` |
    /// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_LOCALID` |
    ///
    /// Launchers may be nested, as in `srun torchrun`: the first line of this table with both a rank and a world size counts, and lines
    /// with one of them do not. A number on the machine that it lacks comes from another line with the same rank and world size.
    /// `MASTER_ADDR` and `MASTER_PORT` are read with every launcher. From now on, this process writes traces on SIGUSR1 if
    /// `GRADSYNC_TRACE_DIR` is set ([`trace`](crate::trace)).
    ///
    /// # Errors
    /// [`BootstrapError::NoLauncher`] if none is set; [`BootstrapError::MissingVariable`] if only one half of a pair is set;
    /// [`BootstrapError::InvalidVariable`] for a value that is no number or out of range (there are at most 65536 ranks), and for a
    /// `MASTER_ADDR` that can be no name and no address; [`BootstrapError::ConflictingVariables`] if `RANK` and `WORLD_SIZE` without
    /// `LOCAL_RANK` contradict a launcher of MPI, since either may have been set by the inner one.
    pub fn from_env() -> Result<Self> {
        trace::start();
        Launch::from_variables(environment)
    }

    /// Like [`from_env`](Self::from_env), but a process that no launcher has started is the only rank of its group: rank 0 of 1.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env), but for [`BootstrapError::NoLauncher`]. A process with any variable of a launcher is not alone: where
    /// only a local rank or `MASTER_ADDR` is set, the error is [`BootstrapError::MissingVariable`] too.
    pub fn from_env_or_alone() -> Result<Self> {
        trace::start();
        Launch::from_variables_or_alone(&environment)
    }

    fn from_variables_or_alone(variable: &impl Fn(&str) -> Option<String>) -> Result<Self> {
        let launch = Launch::from_variables(variable);
        if !matches!(&launch, Err(Error::Bootstrap(BootstrapError::NoLauncher { .. }))) {
            return launch;
        }
        let mut variables = Launch::variables().chain([ADDRESS, PORT, OWN_PORT]);
        if let Some(set) = variables.find(|name| variable(name).is_some()) {
            let reason = format!(
                "{set} is; set RANK and WORLD_SIZE too, or `unset {set}` if this process is to be the only rank"
            );
            return Err(missing("RANK", &reason).into());
        }
        Ok(Launch {
            rank: 0,
            world_size: 1,
            local_rank: Some(0),
            local_world_size: Some(1),
            master: None,
            has_one_gpu: has_one_gpu(variable),
            launcher: Launcher::Plain,
            torchrun: None,
        })
    }

    /// The names of all variables by which launchers tell a process its rank, the world size, and its number on the machine, and by which
    /// torchrun's agent is recognised. A program that starts ranks removes them before it sets its own.
    pub fn variables() -> impl Iterator<Item = &'static str> {
        family::variables().chain(Torchrun::VARIABLES)
    }

    /// Like [`from_env`](Self::from_env), with `variable` in place of the environment: it returns the value of a variable that is set.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variable = &variable;
        let numbers = family::numbers(variable)?;
        let torchrun = if variable(OWN_PORT).is_some() { None } else { Torchrun::of(variable)? };
        Ok(Launch {
            rank: numbers.rank.value,
            world_size: numbers.world_size.value,
            local_rank: numbers.local_rank.map(|setting| setting.value),
            local_world_size: numbers.local_world_size.map(|setting| setting.value),
            master: master(variable)?,
            has_one_gpu: has_one_gpu(variable),
            launcher: numbers.launcher,
            torchrun,
        })
    }

    /// Whether the ranks are the processes of an MPI job, as far as the launcher's variables tell, and this program has the feature `mpi`. A
    /// scheduler's are if nothing says where rank 0 listens: they have no other way to find each other.
    #[doc(hidden)]
    pub fn is_mpi_job(&self) -> bool {
        let is_launcher_of_mpi = match self.launcher {
            Launcher::Plain => false,
            Launcher::Mpi => true,
            Launcher::Scheduler => self.master.is_none(),
        };
        cfg!(feature = "mpi") && is_launcher_of_mpi
    }

    /// Whether all ranks are known to be on this machine.
    pub(super) fn is_one_machine(&self) -> bool {
        self.local_world_size == Some(self.world_size)
    }
}

/// A variable of this process. A value that is not Unicode is no value of any of these variables, and is refused as such.
fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn has_one_gpu(variable: &impl Fn(&str) -> Option<String>) -> bool {
    variable("CUDA_VISIBLE_DEVICES").is_some_and(|devices| is_one(&devices))
}

/// Whether CUDA shows a single GPU for this value of `CUDA_VISIBLE_DEVICES`: it ends the list at the first name of no GPU.
fn is_one(devices: &str) -> bool {
    let names = devices.split(',').map(str::trim);
    names.take_while(|name| !name.is_empty() && !name.starts_with('-')).count() == 1
}

fn master(variable: &impl Fn(&str) -> Option<String>) -> Result<Option<(String, u16)>, BootstrapError> {
    let half =
        |name: &str, other: &str| Err(missing(name, &format!("{other} is, and rank 0 listens at both together")));
    let port_variable = if variable(OWN_PORT).is_some() { OWN_PORT } else { PORT };
    match (variable(ADDRESS), variable(port_variable)) {
        (None, None) => Ok(None),
        (None, Some(_)) if port_variable == OWN_PORT && variable(PORT).is_none() => Ok(None),
        (None, Some(_)) => half(ADDRESS, PORT),
        (Some(_), None) => half(PORT, ADDRESS),
        (Some(address), Some(port)) => match (host(&address), port.parse()) {
            (Ok(host), Ok(number @ 1..)) => Ok(Some((host, number))),
            (Err(reason), _) => Err(invalid(ADDRESS, address, reason.into())),
            (Ok(_), _) => Err(invalid(port_variable, port, "it must be a port, from 1 to 65535".into())),
        },
    }
}

/// The generation of the group, which a launcher counts up with every restart: `GRADSYNC_GENERATION`, or 0.
pub(super) fn generation() -> Result<Option<u64>, BootstrapError> {
    const VARIABLE: &str = "GRADSYNC_GENERATION";
    let Some(text) = environment(VARIABLE) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| invalid(VARIABLE, text, "it must be a whole number from 0".into()))
}

/// The deadline of a join that the user has set: `GRADSYNC_JOIN_DEADLINE`.
pub(super) fn join_deadline() -> Result<Option<Duration>, BootstrapError> {
    seconds(JOIN_DEADLINE, environment(JOIN_DEADLINE))
}

/// The deadline of calls that the user has set: `GRADSYNC_DEADLINE`.
pub(super) fn call_deadline() -> Result<Option<Duration>, BootstrapError> {
    seconds(CALL_DEADLINE, environment(CALL_DEADLINE))
}

fn seconds(variable: &str, text: Option<String>) -> Result<Option<Duration>, BootstrapError> {
    let Some(text) = text else { return Ok(None) };
    match text.trim().parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= LONGEST_DEADLINE => Ok(Some(Duration::from_secs_f64(seconds))),
        _ => Err(invalid(
            variable,
            text,
            format!("it must be a number of seconds above 0, at most {LONGEST_DEADLINE:e}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_takes_positive_deadlines() {
        let read = |text: &str| seconds(JOIN_DEADLINE, Some(text.into()));
        assert_eq!(seconds(JOIN_DEADLINE, None), Ok(None));
        assert_eq!(read("0.5"), Ok(Some(Duration::from_millis(500))));
        assert_eq!(read(" 1800 "), Ok(Some(Duration::from_secs(1800))));
        for wrong in ["", "0", "-1", "nan", "inf", "1e10", "10m", "1e-300x"] {
            let error = read(wrong).expect_err(wrong).to_string();
            assert!(error.contains(JOIN_DEADLINE) && error.contains("seconds above 0"), "{error}");
        }
    }

    #[test]
    fn from_variables_or_alone_is_alone_without_variables() {
        let read = |set: &'static [&'static str]| {
            Launch::from_variables_or_alone(&move |name: &str| set.contains(&name).then(|| "1".to_owned()))
        };
        for set in [&[][..], &["CUDA_VISIBLE_DEVICES", "GRADSYNC_SECRET", "GRADSYNC_DEADLINE"]] {
            let alone = read(set).expect("alone");
            assert_eq!(
                (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size),
                (0, 1, Some(0), Some(1))
            );
            assert_eq!((alone.device(), alone.master), (0, None));
        }
        for half in Launch::variables().chain([ADDRESS, PORT, OWN_PORT]) {
            let set: &'static [&'static str] = Box::leak(Box::new([half]));
            let error = read(set).expect_err(half);
            assert!(matches!(error, Error::Bootstrap(BootstrapError::MissingVariable { .. })), "{half}: {error}");
            assert!(error.to_string().contains(half), "{half}: {error}");
        }
    }

    #[test]
    fn is_one_ends_cudas_list_at_the_first_name_of_no_gpu() {
        for one in ["0", "3", " 3 ", "GPU-8932f937", "MIG-GPU-8932f937/1/2", "2,-1,3", "2,"] {
            assert!(is_one(one), "{one}");
        }
        for other in ["", "0,1", "-1", "-1,0", "NoDevFiles,1"] {
            assert!(!is_one(other), "{other}");
        }
    }
}
