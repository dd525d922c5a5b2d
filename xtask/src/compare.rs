//! `cargo xtask compare PEER`: has `gradsync-bench` measure an operation beside another implementation. Horovod is downloaded and compiled.

mod horovod;

use anyhow::Result;

use crate::{
    flags, perf,
    process::{Cmd, target},
    toolchain::{Need, Toolchain, python},
};

impl flags::Compare {
    pub(crate) fn run(self) -> Result<()> {
        let mut command = Cmd::new(perf::build(&self.setup)?).folder(".").args(["compare", &self.peer]);
        if self.peer == "horovod" {
            Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Mpi, Need::CppCompiler, Need::Horovod])?;
            let horovod::Program { path, compiler, flags } = horovod::program(&target("horovod"))?;
            let about = format!("Horovod {} by {compiler} with {flags}", python::HOROVOD_VERSION);
            command = command.arg("--program").arg(path).args(["--about", &about]);
        }
        command.args(self.arguments).run()
    }
}
