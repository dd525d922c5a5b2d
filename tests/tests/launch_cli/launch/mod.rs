//! `gradsync launch`, and what `gradsync trace` prints of the records of its jobs.

mod blame;
mod descendant_processes;
mod failure_reports;
mod job_ends;
mod outputs;
mod records;
mod restarts;
mod several_machines;
mod variables;
