//! The places of a run: backends, transports and numbers of ranks, from the arguments and from the machine.

use gradsync::bootstrap::Launch;

use super::PerfError;
use super::arguments::{BackendChoice, Settings, TransportChoice};
use super::operation::Operation;
use super::plan::Place;

/// The default number of threads as ranks, and of vectors.
const DEFAULT_RANKS: usize = 4;

/// The places of a run.
pub(crate) struct Places {
    /// The places of kernels.
    pub(crate) kernels: Vec<Place>,
    pub(crate) transports: Vec<TransportChoice>,
    /// The launcher's variables, if there is a launcher.
    pub(crate) launch: Option<Launch>,
    /// Whether this process is rank 0, which prints and measures kernels.
    pub(crate) is_speaker: bool,
}

impl Places {
    /// # Errors
    /// [`PerfError::NotBuilt`] and `PerfError::NoDriver` if this program or this machine lacks a backend or transport;
    /// [`PerfError::Arguments`] for a transport without its backend.
    pub(crate) fn find(settings: &Settings) -> Result<Self, PerfError> {
        let launch = Launch::from_env();
        let needs_kernels =
            settings.tensors.is_some() || settings.operations.iter().any(|operation| operation.is_kernel());
        let needs_ranks = settings.operations.iter().any(|operation| !operation.is_kernel());
        let mut transports: Vec<TransportChoice> = if needs_ranks { settings.transport.clone() } else { Vec::new() };
        let mut kernels = Vec::new();
        for &choice in &settings.backend {
            let place = backend(choice, &transports)?;
            if !kernels.contains(&place) {
                kernels.push(place);
            }
        }
        for transport in &transports {
            let needed = Place::Ranks(*transport).backend();
            if kernels.iter().all(|place| place.backend() != needed) {
                let name = Place::Ranks(*transport).transport().unwrap_or_default();
                return Err(PerfError::Arguments(format!("--transport {name} needs --backend {needed}")));
            }
        }
        if needs_ranks && transports.is_empty() {
            let is_mpi_job = cfg!(feature = "mpi") && launch.as_ref().is_ok_and(|launch| launch.world_size > 1);
            let host = if is_mpi_job { TransportChoice::Mpi } else { TransportChoice::Local };
            transports =
                kernels.iter().map(|place| if *place == Place::Cpu { host } else { TransportChoice::Nccl }).collect();
        }
        if let Some(transport) = transports.iter().find(|transport| transport.is_over_mpi())
            && !cfg!(feature = "mpi")
        {
            let name = Place::Ranks(*transport).transport().unwrap_or_default();
            return Err(PerfError::NotBuilt { what: format!("--transport {name}"), feature: "mpi" });
        }
        if !needs_kernels {
            kernels.clear();
        }
        let has_gpus = |transport: &TransportChoice| Place::Ranks(*transport).backend() == "cuda";
        let launch = match launch {
            Ok(launch) => Some(launch),
            // Contradictory launcher variables are an error only for transports that need them.
            Err(error) if transports.iter().any(has_gpus) && !is_no_launcher(&error) => return Err(error.into()),
            Err(_) => None,
        };
        let is_speaker = launch.as_ref().is_none_or(|launch| launch.rank == 0);
        Ok(Self { kernels, transports, launch, is_speaker })
    }

    /// Whether all ranks of the launcher, if there is one, are on this machine.
    pub(crate) fn is_one_machine(&self) -> bool {
        self.launch.as_ref().is_none_or(|launch| launch.local_world_size == Some(launch.world_size))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Place> {
        self.kernels.iter().copied().chain(self.transports.iter().map(|&transport| Place::Ranks(transport)))
    }

    /// The numbers of vectors for a kernel's measurements.
    pub(crate) fn vectors(&self, operation: Operation, settings: &Settings) -> Vec<usize> {
        match operation {
            Operation::Gram | Operation::Combine if settings.ranks.is_empty() => vec![DEFAULT_RANKS],
            Operation::Gram | Operation::Combine => settings.ranks.clone(),
            other => vec![other.vectors(1).max(1)],
        }
    }

    /// The numbers of ranks for the measurements of collectives.
    ///
    /// # Errors
    /// [`PerfError::Arguments`] if the number differs from the launcher's, or exceeds the number of GPUs.
    pub(crate) fn ranks(&self, transport: TransportChoice, settings: &Settings) -> Result<Vec<usize>, PerfError> {
        if transport == TransportChoice::Local {
            return Ok(if settings.ranks.is_empty() { vec![DEFAULT_RANKS] } else { settings.ranks.clone() });
        }
        if let Some(Launch { world_size, .. }) = self.launch {
            if let Some(other) = settings.ranks.iter().find(|&&ranks| ranks != world_size) {
                return Err(PerfError::Arguments(format!("-g {other}: the launcher started {world_size} ranks")));
            }
            return Ok(vec![world_size]);
        }
        let needs_launcher = transport.is_over_mpi() || transport == TransportChoice::Process;
        let most = if needs_launcher { 1 } else { gpus()? };
        if let Some(ranks) = settings.ranks.iter().find(|&&ranks| ranks > most) {
            let reason = match (transport, needs_launcher) {
                (TransportChoice::Process, _) => format!("-g {ranks}: without a launcher there is one rank"),
                (_, true) => format!("-g {ranks}: without mpirun there is one rank"),
                (_, false) => format!("-g {ranks}: there are {most} GPUs"),
            };
            return Err(PerfError::Arguments(reason));
        }
        Ok(if settings.ranks.is_empty() { vec![most] } else { settings.ranks.clone() })
    }
}

fn is_no_launcher(error: &gradsync::Error) -> bool {
    matches!(error, gradsync::Error::Bootstrap(gradsync::bootstrap::BootstrapError::NoLauncher { .. }))
}

/// The place of kernels for a choice. If the choice leaves it open, a transport decides.
fn backend(choice: BackendChoice, transports: &[TransportChoice]) -> Result<Place, PerfError> {
    let wants = |backend: &str| transports.iter().any(|&transport| Place::Ranks(transport).backend() == backend);
    match choice {
        BackendChoice::Cpu => Ok(Place::Cpu),
        BackendChoice::Auto if wants("cpu") && !wants("cuda") => Ok(Place::Cpu),
        BackendChoice::Auto if !wants("cuda") => Ok(gpus().map_or(Place::Cpu, |_| Place::Cuda)),
        BackendChoice::Auto | BackendChoice::Cuda => gpus().map(|_| Place::Cuda),
    }
}

/// The number of GPUs.
#[cfg(feature = "cuda")]
pub(crate) fn gpus() -> Result<usize, PerfError> {
    gradsync::internal::driver::devices().map(|names| names.len()).map_err(PerfError::NoDriver)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn gpus() -> Result<usize, PerfError> {
    Err(PerfError::NotBuilt { what: "--backend cuda".into(), feature: "cuda" })
}
