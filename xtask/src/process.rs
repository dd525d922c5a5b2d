//! Running other programs: echoes the command, runs it, and names it in errors. There is never a shell in between.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    // `cargo run` sets the variable; the compiled-in value serves an xtask binary that is started by hand.
    let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let manifest = PathBuf::from(manifest);
    manifest.parent().map(Path::to_path_buf).unwrap_or(manifest)
}

/// A folder for this repository's tasks under `target/`, even if `CARGO_TARGET_DIR` moves cargo's own output.
pub(crate) fn target(folder: &str) -> PathBuf {
    root().join("target").join(folder)
}

/// A command that can be printed and run.
#[derive(Clone, Debug)]
pub(crate) struct Cmd {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(String, Option<OsString>)>,
    folder: PathBuf,
    quiet: bool,
}

impl Cmd {
    pub(crate) fn new(program: impl Into<OsString>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new(), folder: root(), quiet: false }
    }

    /// The cargo that runs this program, without the environment variables that `cargo run` sets: build scripts that depend on these
    /// variables would otherwise run again.
    pub(crate) fn cargo(subcommand: &str) -> Self {
        let mut cmd = Self::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).arg(subcommand);
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "CARGO_BIN_NAME" {
                cmd = cmd.env_remove(&name);
            }
        }
        cmd
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    pub(crate) fn env_remove(mut self, name: &str) -> Self {
        self.env.push((name.to_owned(), None));
        self
    }

    pub(crate) fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = folder.into();
        self
    }

    /// Run it with the lowest priority, so that it takes only the time that other programs leave.
    pub(crate) fn nice(mut self) -> Self {
        let program = std::mem::replace(&mut self.program, "nice".into());
        self.args.splice(0..0, ["-n".into(), "19".into(), program]);
        self
    }

    /// Do not echo it: for queries about the machine.
    pub(crate) fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Runs it with xtask's own output streams; the error names the command.
    pub(crate) fn run(&self) -> Result<()> {
        let status = self.prepare().status().with_context(|| format!("cannot start `{}`", self.name()))?;
        if !status.success() {
            bail!("`{self}` failed ({status})");
        }
        Ok(())
    }

    /// Runs it and returns its standard output; its standard error goes to xtask's.
    pub(crate) fn read(&self) -> Result<String> {
        let output = self
            .prepare()
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start `{}`", self.name()))?;
        if !output.status.success() {
            bail!("`{self}` failed ({})", output.status);
        }
        String::from_utf8(output.stdout).with_context(|| format!("`{self}` printed something that is not UTF-8"))
    }

    /// Runs it without output; returns whether it succeeded, and its text on both streams.
    pub(crate) fn probe(&self) -> (bool, String) {
        match self.clone().quiet().prepare().stdin(Stdio::null()).output() {
            Ok(output) => {
                let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
                text.push_str(&String::from_utf8_lossy(&output.stderr));
                (output.status.success(), text)
            }
            Err(error) => (false, format!("cannot start `{}`: {error}", self.name())),
        }
    }

    fn prepare(&self) -> Command {
        if !self.quiet {
            eprintln!("$ {self}");
        }
        let mut command = Command::new(&self.program);
        command.args(&self.args).current_dir(&self.folder);
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn name(&self) -> String {
        let path = Path::new(&self.program);
        // Cargo is called by its full path, but shown by name; other programs are shown as they are called.
        match path.file_name() {
            Some(name) if name == "cargo" => "cargo".to_owned(),
            _ => path.display().to_string(),
        }
    }
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.env {
            if let Some(value) = value {
                write!(f, "{name}={} ", quote(value))?;
            }
        }
        f.write_str(&self.name())?;
        for arg in &self.args {
            write!(f, " {}", quote(arg))?;
        }
        Ok(())
    }
}

/// Quotes a word for a POSIX shell, so that an echoed command can be pasted.
fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Writes a program for a test to start. Another process writes it: if a test on another thread forked while this process had the file
/// open, the program could not be executed.
#[cfg(test)]
pub(crate) fn write_program(path: &Path, text: &str) {
    use std::io::Write;

    let mut command = Command::new("sh");
    command.args(["-c", r#"cat >"$0" && chmod +x "$0""#]).arg(path).stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cmd_shows_a_command_that_can_be_pasted() {
        let cmd = Cmd::new("cc").env("A", "b c").args(["-O2", "it's"]).env_remove("B");
        assert_eq!(cmd.to_string(), r"A='b c' cc -O2 'it'\''s'");
        assert_eq!(cmd.nice().to_string(), r"A='b c' nice -n 19 cc -O2 'it'\''s'");
    }
}
