//! [`Launch`]: the rank and the world size of this process, from its launcher's environment variables.
//!
//! The variables of all known launchers are read and compared: where two launchers disagree, it is unknown which of them started this
//! process, and that is an error.

use crate::error::BootstrapError;
use crate::error::Result;
use crate::trace;

/// The variables of one launcher.
struct Family {
    rank: &'static str,
    world_size: &'static str,
    local_rank: Option<&'static str>,
    local_world_size: Option<&'static str>,
}

const FAMILIES: [Family; 4] = [
    // torchrun, and launchers that set the same variables
    Family {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: Some("LOCAL_RANK"),
        local_world_size: Some("LOCAL_WORLD_SIZE"),
    },
    // mpirun of Open MPI
    Family {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    // mpiexec of MPICH and Intel MPI
    Family { rank: "PMI_RANK", world_size: "PMI_SIZE", local_rank: Some("MPI_LOCALRANKID"), local_world_size: None },
    // srun
    Family {
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: Some("SLURM_LOCALID"),
        local_world_size: None,
    },
];

impl Family {
    fn variables(&self) -> impl Iterator<Item = &'static str> {
        [Some(self.rank), Some(self.world_size), self.local_rank, self.local_world_size].into_iter().flatten()
    }
}

/// A number and the variable that it was read from.
#[derive(Clone, Copy)]
struct Setting {
    variable: &'static str,
    value: usize,
}

/// The variables of one family: rank, world size, local rank, local world size.
type Settings = [Option<Setting>; 4];

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
    /// The host and the port on which rank 0 listens: `MASTER_ADDR` and `MASTER_PORT`.
    pub master: Option<(String, u16)>,
}

impl Launch {
    /// The ordinal of the GPU for this rank: its local rank, or 0 where the launcher does not set one.
    pub fn device(&self) -> u32 {
        self.local_rank.unwrap_or(0) as u32
    }

    /// Reads the environment of this process.
    ///
    /// | launcher | rank and world size | on the machine |
    /// |---|---|---|
    /// | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID` |
    /// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_LOCALID` |
    ///
    /// Several launchers' variables may be set, if they agree. `MASTER_ADDR` and `MASTER_PORT` are read with every launcher. From now on,
    /// this process writes traces on SIGUSR1 if `GRADSYNC_TRACE_DIR` is set ([`trace`](crate::trace)).
    ///
    /// # Errors
    /// [`BootstrapError::NoLauncher`] if none is set; [`BootstrapError::MissingVariable`] for one half of a pair,
    /// [`BootstrapError::InvalidVariable`] for a value that is no number or out of range, and
    /// [`BootstrapError::ConflictingVariables`] if launchers disagree, as inside the shell of an outer Slurm job.
    pub fn from_env() -> Result<Self> {
        trace::start();
        // A value that is not Unicode is not a number, and is refused as such.
        Launch::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// The names of all variables by which launchers tell a process its rank, the world size, and its number on the machine. A program
    /// that starts ranks removes them before it sets its own.
    pub fn variables() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().flat_map(Family::variables)
    }

    /// Like [`from_env`](Self::from_env), with `variable` in place of the environment: it returns the value of a variable that is set.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variable = &variable;
        let mut found: Option<Settings> = None;
        for family in &FAMILIES {
            let Some(settings) = read(family, variable)? else { continue };
            found = Some(match found {
                Some(earlier) => agree(&earlier, &settings, family)?,
                None => settings,
            });
        }
        let Some([Some(rank), Some(world_size), local_rank, local_world_size]) = found else {
            let looked_for: Vec<_> = Launch::variables().collect();
            return Err(BootstrapError::NoLauncher { looked_for: looked_for.join(", ") }.into());
        };
        below("rank", rank, world_size)?;
        if let (Some(rank), Some(size)) = (local_rank, local_world_size) {
            below("local rank", rank, size)?;
        }
        Ok(Launch {
            rank: rank.value,
            world_size: world_size.value,
            local_rank: local_rank.map(|setting| setting.value),
            local_world_size: local_world_size.map(|setting| setting.value),
            master: master(variable)?,
        })
    }
}

/// The settings of a family if its rank and its world size are set.
fn read(family: &Family, variable: &impl Fn(&str) -> Option<String>) -> Result<Option<Settings>, BootstrapError> {
    let get = |name: Option<&'static str>| match name {
        Some(name) => number(name, variable(name)),
        None => Ok(None),
    };
    let missing = |name: &str, other: &str| {
        let reason = format!("{other} is; set both, or `unset {other}` if its launcher did not start this process");
        Err(BootstrapError::MissingVariable { variable: name.to_owned(), reason })
    };
    match (variable(family.rank), variable(family.world_size)) {
        (None, None) => return Ok(None),
        (None, Some(_)) => return missing(family.rank, family.world_size),
        (Some(_), None) => return missing(family.world_size, family.rank),
        (Some(_), Some(_)) => {}
    }
    let settings = [
        get(Some(family.rank))?,
        get(Some(family.world_size))?,
        get(family.local_rank)?,
        get(family.local_world_size)?,
    ];
    match [settings[1], settings[3]].into_iter().flatten().find(|size| size.value == 0) {
        Some(size) => Err(invalid(size.variable, "0".into(), "a group has at least one rank".into())),
        None => Ok(Some(settings)),
    }
}

/// Merges the settings of two families, if they do not contradict each other.
fn agree(earlier: &Settings, later: &Settings, family: &Family) -> Result<Settings, BootstrapError> {
    let mut both = *earlier;
    for (left, right) in both.iter_mut().zip(later) {
        match (&left, right) {
            (Some(left), Some(right)) if left.value != right.value => {
                let variables: Vec<_> = family.variables().collect();
                let remedy = format!(
                    "two launchers claim this process, one perhaps only as the shell of an outer job; unset the \
                     variables of the one that did not start it, e.g. `unset {}`",
                    variables.join(" ")
                );
                return Err(BootstrapError::ConflictingVariables {
                    left: left.variable.to_owned(),
                    left_value: left.value,
                    right: right.variable.to_owned(),
                    right_value: right.value,
                    remedy,
                });
            }
            _ => *left = left.or(*right),
        }
    }
    Ok(both)
}

fn master(variable: &impl Fn(&str) -> Option<String>) -> Result<Option<(String, u16)>, BootstrapError> {
    const ADDRESS: &str = "MASTER_ADDR";
    const PORT: &str = "MASTER_PORT";
    let missing = |name: &str, other: &str| {
        let reason = format!("{other} is, and rank 0 listens at both together");
        Err(BootstrapError::MissingVariable { variable: name.to_owned(), reason })
    };
    match (variable(ADDRESS), variable(PORT)) {
        (None, None) => Ok(None),
        (None, Some(_)) => missing(ADDRESS, PORT),
        (Some(_), None) => missing(PORT, ADDRESS),
        (Some(address), Some(_)) if address.is_empty() => {
            Err(invalid(ADDRESS, address, "it must name the machine of rank 0".into()))
        }
        (Some(address), Some(port)) => match port.parse() {
            Ok(number @ 1..) => Ok(Some((address, number))),
            _ => Err(invalid(PORT, port, "it must be a port, from 1 to 65535".into())),
        },
    }
}

/// The generation of the group, which a launcher counts up with every restart: `GRADSYNC_GENERATION`, or 0. torchrun's restart count is
/// not used, because its machines may count separately.
pub(super) fn generation() -> Result<u64, BootstrapError> {
    const VARIABLE: &str = "GRADSYNC_GENERATION";
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(0) };
    let text = text.to_string_lossy().into_owned();
    text.parse().map_err(|_| invalid(VARIABLE, text, "it must be a whole number from 0".into()))
}

fn number(variable: &'static str, text: Option<String>) -> Result<Option<Setting>, BootstrapError> {
    let Some(text) = text else { return Ok(None) };
    match text.parse() {
        Ok(value) => Ok(Some(Setting { variable, value })),
        Err(_) => Err(invalid(variable, text, "it must be a whole number from 0".into())),
    }
}

fn below(description: &str, rank: Setting, size: Setting) -> Result<(), BootstrapError> {
    if rank.value < size.value {
        return Ok(());
    }
    let reason = format!("a {description} must be less than {}, which is {}", size.variable, size.value);
    Err(invalid(rank.variable, rank.value.to_string(), reason))
}

fn invalid(variable: &str, value: String, reason: String) -> BootstrapError {
    BootstrapError::InvalidVariable { variable: variable.to_owned(), value, reason }
}
