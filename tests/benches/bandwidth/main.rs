//! Bandwidth of the kernels, each beside the copy that the same memory gives in the same run: the C library's on all cores for
//! the CPU, the driver's device-to-device copy for a GPU.
//!
//! Bytes are those that an operation must move: each input read once, each output written once, a sum both. Prints medians
//! and ratios; checks nothing. `--quick` takes smaller data, `--cpu` or `--gpu` one half alone.

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

/// One line of the table.
pub(crate) struct Figure {
    name: String,
    bytes: usize,
    seconds: Vec<f64>,
}

impl Figure {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }

    /// Bytes a second at the median.
    fn rate(&self) -> f64 {
        self.bytes as f64 / self.median()
    }
}

/// Prints figures with their ratio to the first, the baseline.
pub(crate) fn print_table(title: &str, figures: &[Figure]) {
    println!("\n{title}");
    println!("{:<34} {:>10} {:>12} {:>10} {:>8}", "operation", "MiB", "median ms", "GB/s", "ratio");
    let baseline = figures[0].rate();
    for figure in figures {
        let (mib, milliseconds) = (figure.bytes as f64 / f64::from(1 << 20), figure.median() * 1e3);
        let (rate, ratio) = (figure.rate() / 1e9, figure.rate() / baseline);
        println!("{:<34} {mib:>10.1} {milliseconds:>12.4} {rate:>10.1} {ratio:>8.3}", figure.name);
    }
}

fn main() {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let quick = has("--quick");
    if !has("--gpu") {
        cpu::run(quick);
    }
    if !has("--cpu") {
        #[cfg(feature = "cuda")]
        gpu::run(quick);
        #[cfg(not(feature = "cuda"))]
        println!("\nGPU: not run: built without the feature `cuda`");
    }
}
