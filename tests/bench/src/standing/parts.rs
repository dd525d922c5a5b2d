//! The standing set: the measurements, their sizes, and the requirements of each part. This module runs nothing.
//!
//! Parts on GPUs come first, because GPUs are the reason to rent a machine.

/// The requirement of a part beyond a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    Nothing,
    Mpi,
    Gpus(usize),
}

/// One run of `perf`.
pub(super) struct Part {
    /// The name of the part, and of its files.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) needs: Needs,
    /// The arguments, separated by spaces.
    arguments: &'static str,
    /// The sizes of full runs, and of `--quick`.
    sizes: [&'static str; 2],
    /// Whether the cost model has formulas for its rows.
    pub(super) is_for_the_model: bool,
    pub(super) has_plot: bool,
}

impl Part {
    /// The arguments after `perf`.
    pub(super) fn arguments(&self, is_quick: bool) -> impl Iterator<Item = &'static str> {
        let few = if is_quick { "-n 3 -w 1" } else { "" };
        // A repeated option would be refused, so parts that set the number of iterations keep it.
        let few = if self.arguments.contains(" -n ") { "" } else { few };
        [self.arguments, self.sizes[usize::from(is_quick)], few].into_iter().flat_map(str::split_whitespace)
    }
}

const PART: Part = Part {
    name: "",
    title: "",
    needs: Needs::Nothing,
    arguments: "",
    sizes: ["", ""],
    is_for_the_model: false,
    has_plot: true,
};
const LARGE: [&str; 2] = ["-b 1M -e 1G -f 32", "-b 1M -e 16M -f 16"];
const RANKS: [&str; 2] = ["-b 64K -e 16M -f 16", "-b 64K -e 1M -f 16"];

pub(super) const PARTS: [Part; 21] = [
    Part {
        name: "cuda-launch",
        title: "Small launches on a GPU",
        needs: Needs::Gpus(1),
        arguments: "zero cast accumulate squared_norms dots gram combine --launch --backend cuda -d f32,bf16 -g 4",
        sizes: ["-b 64K -e 1M -f 4", "-b 1M"],
        has_plot: false,
        ..PART
    },
    Part {
        name: "cuda-pairs",
        title: "Casts and sums on a GPU, every pair of dtypes",
        needs: Needs::Gpus(1),
        arguments: "cast scale accumulate --backend cuda -d all",
        sizes: ["-b 1G", "-b 16M"],
        ..PART
    },
    Part {
        name: "cuda-kernels",
        title: "Zero and reductions on a GPU",
        needs: Needs::Gpus(1),
        arguments: "zero squared_norms dots gram combine --backend cuda -d f32,f16,bf16 -g 2,4,8",
        sizes: LARGE,
        is_for_the_model: true,
        ..PART
    },
    Part {
        name: "cuda-wide",
        title: "Products of many vectors on a GPU",
        needs: Needs::Gpus(1),
        arguments: "gram combine --backend cuda -g 16,32",
        sizes: ["-b 4M -e 64M -f 16", "-b 4M"],
        is_for_the_model: true,
        ..PART
    },
    Part {
        name: "cuda-graph",
        title: "Kernels in CUDA graphs of 20",
        needs: Needs::Gpus(1),
        arguments: "zero cast accumulate dots gram combine --backend cuda -G 20 -g 4",
        sizes: ["-b 64K -e 64M -f 32", "-b 1M"],
        ..PART
    },
    Part {
        name: "cuda-resnet50",
        title: "ResNet-50's 161 tensors on a GPU",
        needs: Needs::Gpus(1),
        arguments: "--tensors resnet50 --backend cuda",
        has_plot: false,
        ..PART
    },
    Part {
        name: "cuda-bert-large",
        title: "BERT-large's 398 tensors on a GPU",
        needs: Needs::Gpus(1),
        arguments: "--tensors bert-large --backend cuda",
        has_plot: false,
        ..PART
    },
    Part {
        name: "nccl",
        title: "Collectives of all GPUs over NCCL",
        needs: Needs::Gpus(2),
        arguments: "all_reduce all_gather reduce_scatter all_to_all send_recv --transport nccl -d f32,bf16",
        sizes: LARGE,
        is_for_the_model: true,
        ..PART
    },
    Part {
        name: "nccl-adasum",
        title: "Adasum of all GPUs over NCCL, beside the staged mode",
        needs: Needs::Gpus(2),
        // The staged mode takes a hundred times as long, hence fewer iterations.
        arguments: "adasum --transport nccl --algorithm gram,tree -d f32,bf16 -n 5 -w 2",
        sizes: ["-b 1M -e 256M -f 16", "-b 1M"],
        is_for_the_model: true,
        ..PART
    },
    Part {
        name: "nccl-graph",
        title: "Adasum of all GPUs over NCCL in CUDA graphs of 10, beside NCCL's sum",
        needs: Needs::Gpus(2),
        arguments: "adasum --transport nccl --algorithm gram,tree -d f32,bf16 -G 10",
        sizes: ["-b 64K -e 256M -f 16", "-b 1M"],
        ..PART
    },
    Part {
        name: "beside-sum",
        title: "Sums and Adasum of all GPUs, beside NCCL's sum, in tensors as BERT-large has them",
        needs: Needs::Gpus(2),
        arguments: "all_reduce ordered_all_reduce adasum --transport nccl,peer --algorithm gram,tree --layers bert-large --against-sum -d f32,bf16",
        sizes: ["-b 64K -e 1G -f 4", "-b 1M"],
        ..PART
    },
    Part {
        name: "peer",
        title: "All-reduce of all GPUs by peer access",
        needs: Needs::Gpus(2),
        arguments: "all_reduce --transport peer -d f32,bf16",
        sizes: LARGE,
        ..PART
    },
    Part {
        name: "peer-adasum",
        title: "Adasum of all GPUs by peer access, beside the staged mode",
        needs: Needs::Gpus(2),
        arguments: "adasum --transport peer -d f32,bf16 -n 5 -w 2",
        sizes: ["-b 1M -e 256M -f 16", "-b 1M"],
        ..PART
    },
    Part {
        name: "peer-graph",
        title: "Adasum of all GPUs by peer access in CUDA graphs of 10, beside NCCL's sum",
        needs: Needs::Gpus(2),
        arguments: "adasum --transport peer --algorithm gram,tree -d f32,bf16 -G 10",
        sizes: ["-b 64K -e 256M -f 16", "-b 1M"],
        ..PART
    },
    Part {
        name: "cpu-pairs",
        title: "Casts and sums on the CPU, every pair of dtypes",
        arguments: "cast accumulate --backend cpu -d all -n 5 -w 1",
        sizes: ["-b 64M", "-b 4M"],
        ..PART
    },
    Part {
        name: "cpu-kernels",
        title: "Zero and reductions on the CPU",
        arguments: "zero squared_norms dots gram combine --backend cpu -d f32,bf16 -g 2,4,8 -n 5 -w 1",
        sizes: ["-b 1M -e 64M -f 64", "-b 1M"],
        ..PART
    },
    Part {
        name: "cpu-resnet50",
        title: "ResNet-50's 161 tensors on the CPU",
        arguments: "--tensors resnet50 --backend cpu -n 10 -w 2",
        has_plot: false,
        ..PART
    },
    Part {
        name: "cpu-bert-large",
        title: "BERT-large's 398 tensors on the CPU",
        arguments: "--tensors bert-large --backend cpu -n 3 -w 1",
        has_plot: false,
        ..PART
    },
    Part {
        name: "local",
        title: "Collectives of 8 threads",
        arguments: "all_reduce all_gather reduce_scatter all_to_all send_recv --transport local -d f32,bf16 -g 8 -n 10 -w 2",
        sizes: RANKS,
        ..PART
    },
    Part {
        name: "local-adasum",
        title: "Adasum of 2, 4 and 8 threads",
        arguments: "adasum --transport local -d f32,bf16 --algorithm gram,tree -g 2,4,8 -n 10 -w 2",
        sizes: ["-b 64K -e 64M -f 32", RANKS[1]],
        ..PART
    },
    Part {
        name: "mpi",
        title: "Collectives and Adasum of 8 MPI processes",
        needs: Needs::Mpi,
        arguments: "all_reduce all_gather reduce_scatter all_to_all send_recv adasum --transport mpi -d f32,bf16 -n 5 -w 1",
        sizes: RANKS,
        ..PART
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_names_of_their_own() {
        let mut names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PARTS.len());
    }

    #[test]
    fn how_often_is_said_once() {
        for (part, is_quick) in PARTS.iter().flat_map(|part| [(part, false), (part, true)]) {
            for flag in ["-n", "-w", "-b", "-e", "-f", "-g", "-d", "-G"] {
                let count = part.arguments(is_quick).filter(|argument| *argument == flag).count();
                assert!(count <= 1, "{} says {flag} {count} times", part.name);
            }
        }
    }
}
